"""Feeds the registry from the bus: heartbeats and lost workers.

Capacity becomes free when the end of a frame is committed, reported by the engine: filling it earlier would only
lengthen the queue of uncommitted ends.

Unreadable messages are counted and skipped; workers send again soon. Frames that a worker lists and this replica did
not book are looked up in PostgreSQL, in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final
from uuid import UUID

import structlog

from rota.infra.nats import Bus
from rota.infra.nats.bus import CoreMessage
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, Unavailable
from rota.model.heartbeat_parts import HeartbeatAssembler
from rota.model.protocol import HEARTBEAT_SUBJECT, LIVENESS_SUBJECT, Heartbeat, WorkerLiveness, decode
from rota.model.token_ranges import TokenRange, merge_ranges, span_columns, split_ranges
from rota.placement import metrics
from rota.placement.registry import WorkerRegistry
from rota.placement.requirements import Resources
from rota.placement.workers import BookedRange

log = structlog.get_logger(__name__)

BOOKED = query(__package__, "booked")
MAINTENANCE_INTERVAL_S: Final = 1.0
METRICS_INTERVAL_S: Final = 5.0
LOOKUP_TOKENS_MAX: Final = 4096
"""Tokens per lookup."""
MESSAGES_PER_YIELD: Final = 100
"""Messages handled before the task yields to the event loop."""


class HeartbeatConsumer:
    """Run as `Service("heartbeats", consumer.run)`. Without a database, frames not booked here count as unbooked."""

    def __init__(self, bus: Bus, registry: WorkerRegistry, database: Database | None = None) -> None:
        self._bus = bus
        self._registry = registry
        self._database = database
        self._parts = HeartbeatAssembler()

    async def run(self, life: Lifecycle) -> None:
        async with (
            self._bus.subscribe_core(HEARTBEAT_SUBJECT) as beats,
            self._bus.subscribe_core(LIVENESS_SUBJECT) as liveness,
            asyncio.TaskGroup() as tasks,
        ):
            consumers = [
                tasks.create_task(self._consume(beats, self.on_heartbeat), name="placement.heartbeats"),
                tasks.create_task(self._consume(liveness, self.on_workers_lost), name="placement.told"),
                tasks.create_task(self._maintain(), name="placement.keep"),
            ]
            life.ready()
            await life.until_draining()
            for task in consumers:
                task.cancel()

    def on_heartbeat(self, message: CoreMessage) -> None:
        beat = self._parts.add(decode(Heartbeat, message.data))
        if beat is not None:
            metrics.HEARTBEATS.labels(self._registry.record_heartbeat(beat).value).inc()

    def on_workers_lost(self, message: CoreMessage) -> None:
        for worker in decode(WorkerLiveness, message.data).lost:
            self._registry.remove(worker, lost=True)

    async def resolve_unknown_frames(self) -> None:
        """Look up all frames that workers list and this replica did not book, in one go."""
        unknown = self._registry.unknown_frames()
        if not unknown:
            return
        ranges = merge_ranges(each for unknown_ranges in unknown.values() for each in unknown_ranges)
        booked = await self._booked_by_worker(self._database, ranges) if self._database is not None else {}
        for worker, unknown_ranges in unknown.items():
            self._registry.resolve_unknown_frames(worker, unknown_ranges, booked.get(worker, []))
        log.info("unknown_frames_resolved", workers=len(unknown), ranges=len(ranges))

    async def _consume(self, queue: asyncio.Queue[CoreMessage], handle: Callable[[CoreMessage], None]) -> None:
        for number in count(1):
            self._handle(await queue.get(), handle)
            if number % MESSAGES_PER_YIELD == 0:
                await asyncio.sleep(0)

    def _handle(self, message: CoreMessage, handle: Callable[[CoreMessage], None]) -> None:
        try:
            handle(message)
        except InvalidInput as wrong:
            metrics.HEARTBEATS.labels("unreadable").inc()
            log.warning("worker_message_invalid", subject=message.subject, reason=wrong.sentence)

    async def _maintain(self) -> None:
        """Remove silent workers, resolve unknown frames and update the worker metrics."""
        rounds = 0
        while True:
            self._registry.sweep()
            try:
                await self.resolve_unknown_frames()
            except Unavailable as away:
                log.warning("unknown_frames_unresolved", reason=away.sentence)
            if rounds % round(METRICS_INTERVAL_S / MAINTENANCE_INTERVAL_S) == 0:
                metrics.count_workers(self._registry.workers.values(), self._registry.routes)
            rounds += 1
            await asyncio.sleep(MAINTENANCE_INTERVAL_S)

    async def _booked_by_worker(
        self, database: Database, ranges: Sequence[TokenRange]
    ) -> dict[UUID, list[BookedRange]]:
        """Bookings by worker; a worker that lists a token booked elsewhere does not own it."""
        found: dict[UUID, list[BookedRange]] = {}
        for batch in split_ranges(ranges, LOOKUP_TOKENS_MAX):
            rows = await database.rows(BOOKED, *span_columns(batch))
            for row in rows:
                need = Resources(row["cores"], row["gpus"], row["memory_mb"])
                tokens = (row["first"], row["last"] - row["first"] + 1)
                found.setdefault(row["worker"], []).append(BookedRange(tokens, need, row["series"]))
        return found
