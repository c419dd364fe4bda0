"""Writing down how far jobs have come: DISPATCHED and RUNNING, a moment after it happened and many at a time.

A job that ended meanwhile needs no mark: its end says that it was dispatched. If we die before a mark is written, the
job shows an earlier state until its next mark or its end; nothing is decided by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final
from uuid import UUID

import structlog

from rota.infra.clock import Clock
from rota.infra.postgres import Database, query
from rota.infra.telemetry import metrics
from rota.model.errors import PostgresUnavailable

MARK = query(__package__, "jobs_mark")

log = structlog.get_logger(__name__)
SETTLE_S: Final = 0.2
"""What ends within this time is not marked."""
MOST: Final = 1000
WAIT = metrics.histogram("rota_queue_wait_seconds", "From submission to the first hand-over.", labels=("topic",))


class Marks:
    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self._clock = clock
        self._dispatched: dict[UUID, int] = {}
        self._running: dict[UUID, int] = {}
        self._some = asyncio.Event()

    def dispatched(self, jobs: Iterable[UUID]) -> None:
        now_ms = self._clock.now_ms()
        for job in jobs:
            self._dispatched.setdefault(job, now_ms)
        self._some.set()

    def running(self, jobs: Iterable[UUID]) -> None:
        now_ms = self._clock.now_ms()
        for job in jobs:
            self._running.setdefault(job, now_ms)
        self._some.set()

    def ended(self, jobs: Iterable[UUID]) -> None:
        for job in jobs:
            self._dispatched.pop(job, None)
            self._running.pop(job, None)

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await self._clock.sleep(SETTLE_S)
            try:
                await self.write()
            except PostgresUnavailable as away:
                log.warning("marks_wait", reason=away.sentence)

    async def write(self) -> None:
        """Write what is there now. Kept until it is written."""
        for state, marks in (("DISPATCHED", self._dispatched), ("RUNNING", self._running)):
            while marks:
                some = dict(sorted(marks.items())[:MOST])
                for row in await self.database.rows(MARK, list(some), state, list(some.values())):
                    if state == "DISPATCHED":
                        WAIT.labels(row["topic"]).observe(max(0, some[row["pk_job"]] - row["submitted_ms"]) / 1000)
                for job in some:
                    marks.pop(job, None)
        self._some.clear()
