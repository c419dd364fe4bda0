"""Writing down how far jobs have come: DISPATCHED and RUNNING, a moment after it happened and many at a time.

A job that ended meanwhile needs no mark: its end says that it was dispatched. If we die before a mark is written, the
job shows an earlier state until its next mark or its end; nothing is decided by it. So marks wait for no lock: whoever
ends jobs takes them in an order of its own, and a mark that waited for it could wait in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple
from uuid import UUID

import asyncpg
import structlog

from rota.infra.clock import Clock
from rota.infra.postgres import Database, Record, query
from rota.infra.telemetry import metrics
from rota.model.errors import PostgresUnavailable
from rota.model.ids import ShowId

MARK = query(__package__, "jobs_mark")

log = structlog.get_logger(__name__)
SETTLE_S: Final = 0.2
"""What ends within this time is not marked."""
MOST: Final = 1000
WAIT = metrics.histogram("rota_queue_wait_seconds", "From submission to the first hand-over.", labels=("topic",))


class Mark(NamedTuple):
    """When it happened, by the wall and by what no change of the wall moves."""

    at_ms: int
    since_s: float


class Marked(NamedTuple):
    """A job that was marked."""

    job: UUID
    show: ShowId
    topic: str


class Marks:
    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self._clock = clock
        self._dispatched: dict[UUID, Mark] = {}
        self._running: dict[UUID, Mark] = {}
        self._some = asyncio.Event()
        self.on_marked: Callable[[str, Sequence[Marked]], None] = _ignore
        """Called with the state and the jobs that were marked with it."""

    def dispatched(self, jobs: Iterable[UUID]) -> None:
        self._note(self._dispatched, jobs)

    def running(self, jobs: Iterable[UUID]) -> None:
        self._note(self._running, jobs)

    def ended(self, jobs: Iterable[UUID]) -> None:
        for job in jobs:
            self._dispatched.pop(job, None)
            self._running.pop(job, None)

    def _note(self, marks: dict[UUID, Mark], jobs: Iterable[UUID]) -> None:
        mark = Mark(self._clock.now_ms(), self._clock.monotonic())
        for job in jobs:
            marks.setdefault(job, mark)
        self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await self._clock.sleep(SETTLE_S)
            try:
                await self.write()
            except (PostgresUnavailable, asyncpg.PostgresError) as away:
                # Nothing is decided by marks: whatever it was, the dispatcher goes on, and they are tried again.
                log.warning("marks_wait", reason=str(away))

    @property
    def pending(self) -> int:
        """Marks that are not written yet."""
        return len(self._dispatched) + len(self._running)

    async def write(self) -> None:
        """Write what has stood for long enough. Kept until it is written."""
        before_s = self._clock.monotonic() - SETTLE_S
        for state, marks in (("DISPATCHED", self._dispatched), ("RUNNING", self._running)):
            while some := _settled(marks, before_s):
                rows = await self.database.rows(MARK, list(some), state, [mark.at_ms for mark in some.values()])
                taken = {row["pk_job"] for row in rows if row["topic"] is None}
                self._written(marks, some, taken)
                marked = [row for row in rows if row["topic"] is not None]
                self.on_marked(state, [Marked(row["pk_job"], row["pk_show"], row["topic"]) for row in marked])
                if state == "DISPATCHED":
                    _observe(some, marked)
        if not self.pending:
            self._some.clear()

    def _written(self, marks: dict[UUID, Mark], some: Iterable[UUID], taken: set[UUID]) -> None:
        """Jobs that somebody else was at are tried again a while later, unless they ended meanwhile."""
        now_s = self._clock.monotonic()
        for job in some:
            mark = marks.pop(job, None)
            if mark and job in taken:
                marks[job] = mark._replace(since_s=now_s)


def _settled(marks: Mapping[UUID, Mark], before_s: float) -> dict[UUID, Mark]:
    """The oldest, as many as are written together."""
    old = takewhile(lambda item: item[1].since_s <= before_s, marks.items())
    return dict(islice(old, MOST))


def _observe(marks: Mapping[UUID, Mark], rows: Iterable[Record]) -> None:
    for row in rows:
        wait_ms = marks[row["pk_job"]].at_ms - row["submitted_ms"]
        WAIT.labels(row["topic"]).observe(max(0, wait_ms) / 1000)


def _ignore(_state: str, _marked: Sequence[Marked]) -> None:
    return None
