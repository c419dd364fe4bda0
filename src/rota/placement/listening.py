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
from rota.infra.nats.bus import Heard
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, Unavailable
from rota.model.messages import HEARTBEAT, TOLD, Heartbeat, Run, Told, decode
from rota.placement import measures
from rota.placement.classes import Need
from rota.placement.holdings import in_order
from rota.placement.registry import Registry

log = structlog.get_logger(__name__)

BOOKED = query(__package__, "booked")
KEEP_S: Final = 1.0
MEASURE_S: Final = 5.0
ASKED_MAX: Final = 4096
"""Tokens that are looked up at once."""
SPOKEN_MAX: Final = 100
"""Messages that are handled before others get a turn."""


class HeartbeatListener:
    """`Service("heartbeats", listener.run)`. Without a database, frames that nobody here booked count as strangers."""

    def __init__(self, bus: Bus, registry: Registry, database: Database | None = None) -> None:
        self._bus = bus
        self._registry = registry
        self._database = database

    async def run(self, life: Lifecycle) -> None:
        async with (
            self._bus.hear(HEARTBEAT) as beats,
            self._bus.hear(TOLD) as told,
            asyncio.TaskGroup() as tasks,
        ):
            listening = [
                tasks.create_task(self._listen(beats, self.heartbeat), name="placement.heartbeats"),
                tasks.create_task(self._listen(told, self.told), name="placement.told"),
                tasks.create_task(self._keep(), name="placement.keep"),
            ]
            life.ready()
            await life.until_draining()
            for task in listening:
                task.cancel()

    def heartbeat(self, heard: Heard) -> None:
        beat = self._registry.heartbeat(decode(Heartbeat, heard.data))
        measures.HEARTBEATS.labels(beat.value).inc()

    def told(self, heard: Heard) -> None:
        for worker in decode(Told, heard.data).lost:
            self._registry.forget(worker, lost=True)

    async def settle(self) -> None:
        """Look up what workers list and nobody here booked, all of them together."""
        unsettled = self._registry.unsettled()
        if not unsettled:
            return
        asked = in_order(run for runs in unsettled.values() for run in runs)
        booked = await self._booked(self._database, asked) if self._database is not None else {}
        for worker, runs in unsettled.items():
            self._registry.settle(worker, runs, booked.get(worker, []))
        log.info("workers_settled", workers=len(unsettled), runs=len(asked))

    async def _listen(self, queue: asyncio.Queue[Heard], handle: Callable[[Heard], None]) -> None:
        for turn in count(1):
            self._handled(await queue.get(), handle)
            if turn % SPOKEN_MAX == 0:
                await asyncio.sleep(0)

    def _handled(self, heard: Heard, handle: Callable[[Heard], None]) -> None:
        try:
            handle(heard)
        except InvalidInput as wrong:
            measures.HEARTBEATS.labels("unreadable").inc()
            log.warning("worker_not_understood", subject=heard.subject, reason=wrong.sentence)

    async def _keep(self) -> None:
        """Forget the silent, settle what is unclear, and tell how many workers there are."""
        rounds = 0
        while True:
            self._registry.sweep()
            try:
                await self.settle()
            except Unavailable as away:
                log.warning("workers_not_settled", reason=away.sentence)
            if rounds % round(MEASURE_S / KEEP_S) == 0:
                measures.count_workers(self._registry.workers.values(), self._registry.routes)
            rounds += 1
            await asyncio.sleep(KEEP_S)

    async def _booked(self, database: Database, asked: Sequence[Run]) -> dict[UUID, list[tuple[Run, Need]]]:
        """By worker; a token that is booked elsewhere is none of those who list it."""
        found: dict[UUID, list[tuple[Run, Need]]] = {}
        for batch in batches(asked):
            rows = await database.rows(BOOKED, [first for first, _ in batch], [first + n - 1 for first, n in batch])
            for row in rows:
                need = Need(row["cores"], row["gpus"], row["memory_mb"])
                found.setdefault(row["worker"], []).append(((row["token"], 1), need))
        return found


def batches(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Runs in order, cut so that each batch holds at most `ASKED_MAX` tokens."""
    batch: list[Run] = []
    room = ASKED_MAX
    for first, n in runs:
        while n > 0:
            taken = min(n, room)
            batch.append((first, taken))
            first, n, room = first + taken, n - taken, room - taken
            if not room:
                yield batch
                batch, room = [], ASKED_MAX
    if batch:
        yield batch
