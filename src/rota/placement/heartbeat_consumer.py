"""Feeds the registry with what workers say: heartbeats, and who is lost.

Room is free when the end of a frame is committed, which the engine tells: room that is filled while ends wait to be
committed would only make more of them wait.

Whatever cannot be read is counted and passed over; workers speak again in a moment. Frames that a worker lists and this
replica did not book are looked up in the books, in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Final
from uuid import UUID

import structlog

from rota.infra.nats import Bus
from rota.infra.nats.bus import CoreMessage
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, Unavailable
from rota.model.protocol import HEARTBEAT_SUBJECT, LIVENESS_SUBJECT, Heartbeat, TokenRange, WorkerLiveness, decode
from rota.placement import metrics
from rota.placement.registry import WorkerRegistry
from rota.placement.requirements import Resources
from rota.placement.worker_allocations import merge_ranges

log = structlog.get_logger(__name__)

BOOKED = query(__package__, "booked")
MAINTENANCE_INTERVAL_S: Final = 1.0
METRICS_INTERVAL_S: Final = 5.0
LOOKUP_TOKENS_MAX: Final = 4096
"""Tokens that are looked up at once."""
MESSAGES_PER_YIELD: Final = 100
"""Messages that are handled before others get a turn."""


class HeartbeatConsumer:
    """`Service("heartbeats", listener.run)`. Without a database, frames that nobody here booked count as strangers."""

    def __init__(self, bus: Bus, registry: WorkerRegistry, database: Database | None = None) -> None:
        self._bus = bus
        self._registry = registry
        self._database = database

    async def run(self, life: Lifecycle) -> None:
        async with (
            self._bus.subscribe_core(HEARTBEAT_SUBJECT) as beats,
            self._bus.subscribe_core(LIVENESS_SUBJECT) as told,
            asyncio.TaskGroup() as tasks,
        ):
            listening = [
                tasks.create_task(self._consume(beats, self.on_heartbeat), name="placement.heartbeats"),
                tasks.create_task(self._consume(told, self.on_workers_lost), name="placement.told"),
                tasks.create_task(self._maintain(), name="placement.keep"),
            ]
            life.ready()
            await life.until_draining()
            for task in listening:
                task.cancel()

    def on_heartbeat(self, heard: CoreMessage) -> None:
        beat = self._registry.record_heartbeat(decode(Heartbeat, heard.data))
        metrics.HEARTBEATS.labels(beat.value).inc()

    def on_workers_lost(self, heard: CoreMessage) -> None:
        for worker in decode(WorkerLiveness, heard.data).lost:
            self._registry.remove(worker, lost=True)

    async def resolve_unknown_frames(self) -> None:
        """Look up what workers list and nobody here booked, all of them together."""
        unsettled = self._registry.unknown_frames()
        if not unsettled:
            return
        asked = merge_ranges(run for runs in unsettled.values() for run in runs)
        booked = await self._booked_by_worker(self._database, asked) if self._database is not None else {}
        for worker, runs in unsettled.items():
            self._registry.resolve_unknown_frames(worker, runs, booked.get(worker, []))
        log.info("workers_settled", workers=len(unsettled), runs=len(asked))

    async def _consume(self, queue: asyncio.Queue[CoreMessage], handle: Callable[[CoreMessage], None]) -> None:
        for turn in count(1):
            self._handle(await queue.get(), handle)
            if turn % MESSAGES_PER_YIELD == 0:
                await asyncio.sleep(0)

    def _handle(self, heard: CoreMessage, handle: Callable[[CoreMessage], None]) -> None:
        try:
            handle(heard)
        except InvalidInput as wrong:
            metrics.HEARTBEATS.labels("unreadable").inc()
            log.warning("worker_not_understood", subject=heard.subject, reason=wrong.sentence)

    async def _maintain(self) -> None:
        """Forget the silent, settle what is unclear, and tell how many workers there are."""
        rounds = 0
        while True:
            self._registry.sweep()
            try:
                await self.resolve_unknown_frames()
            except Unavailable as away:
                log.warning("workers_not_settled", reason=away.sentence)
            if rounds % round(METRICS_INTERVAL_S / MAINTENANCE_INTERVAL_S) == 0:
                metrics.count_workers(self._registry.workers.values(), self._registry.routes)
            rounds += 1
            await asyncio.sleep(MAINTENANCE_INTERVAL_S)

    async def _booked_by_worker(
        self, database: Database, asked: Sequence[TokenRange]
    ) -> dict[UUID, list[tuple[TokenRange, Resources]]]:
        """By worker; a token that is booked elsewhere is none of those who list it."""
        found: dict[UUID, list[tuple[TokenRange, Resources]]] = {}
        for batch in lookup_batches(asked):
            rows = await database.rows(BOOKED, [first for first, _ in batch], [first + n - 1 for first, n in batch])
            for row in rows:
                need = Resources(row["cores"], row["gpus"], row["memory_mb"])
                found.setdefault(row["worker"], []).append(((row["token"], 1), need))
        return found


def lookup_batches(runs: Iterable[TokenRange]) -> Iterator[list[TokenRange]]:
    """Runs in order, cut so that each batch holds at most `ASKED_MAX` tokens."""
    batch: list[TokenRange] = []
    room = LOOKUP_TOKENS_MAX
    for first, n in runs:
        while n > 0:
            taken = min(n, room)
            batch.append((first, taken))
            first, n, room = first + taken, n - taken, room - taken
            if not room:
                yield batch
                batch, room = [], LOOKUP_TOKENS_MAX
    if batch:
        yield batch
