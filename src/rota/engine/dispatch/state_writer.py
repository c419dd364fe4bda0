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

WRITE_STATES = query(__package__, "jobs_mark")

log = structlog.get_logger(__name__)
DEBOUNCE_S: Final = 0.2
"""What ends within this time is not marked."""
MAX_BATCH: Final = 1000
QUEUE_WAIT = metrics.histogram("rota_queue_wait_seconds", "From submission to the first hand-over.", labels=("topic",))


class PendingState(NamedTuple):
    """When it happened, by the wall and by what no change of the wall moves."""

    at_ms: int
    since_s: float


class JobStateChange(NamedTuple):
    """A job that was marked."""

    job: UUID
    show: ShowId
    topic: str


class JobStateWriter:
    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self._clock = clock
        self._dispatched: dict[UUID, PendingState] = {}
        self._running: dict[UUID, PendingState] = {}
        self._some = asyncio.Event()
        self.on_marked: Callable[[str, Sequence[JobStateChange]], None] = _ignore
        """Called with the state and the jobs that were marked with it."""

    def record_dispatched(self, jobs: Iterable[UUID]) -> None:
        self._record(self._dispatched, jobs)

    def record_running(self, jobs: Iterable[UUID]) -> None:
        self._record(self._running, jobs)

    def forget(self, jobs: Iterable[UUID]) -> None:
        for job in jobs:
            self._dispatched.pop(job, None)
            self._running.pop(job, None)

    def _record(self, marks: dict[UUID, PendingState], jobs: Iterable[UUID]) -> None:
        mark = PendingState(self._clock.now_ms(), self._clock.monotonic())
        for job in jobs:
            marks.setdefault(job, mark)
        self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await self._clock.sleep(DEBOUNCE_S)
            try:
                await self.flush()
            except (PostgresUnavailable, asyncpg.PostgresError) as away:
                # Nothing is decided by marks: whatever it was, the dispatcher goes on, and they are tried again.
                log.warning("marks_wait", reason=str(away))

    @property
    def pending(self) -> int:
        """Marks that are not written yet."""
        return len(self._dispatched) + len(self._running)

    async def flush(self) -> None:
        """Write what has stood for long enough. Kept until it is written."""
        before_s = self._clock.monotonic() - DEBOUNCE_S
        for state, marks in (("DISPATCHED", self._dispatched), ("RUNNING", self._running)):
            while some := _due(marks, before_s):
                rows = await self.database.rows(WRITE_STATES, list(some), state, [mark.at_ms for mark in some.values()])
                taken = {row["pk_job"] for row in rows if row["topic"] is None}
                self._remove_written(marks, some, taken)
                marked = [row for row in rows if row["topic"] is not None]
                self.on_marked(state, [JobStateChange(row["pk_job"], row["pk_show"], row["topic"]) for row in marked])
                if state == "DISPATCHED":
                    _observe_queue_wait(some, marked)
        if not self.pending:
            self._some.clear()

    def _remove_written(self, marks: dict[UUID, PendingState], some: Iterable[UUID], taken: set[UUID]) -> None:
        """Jobs that somebody else was at are tried again a while later, unless they ended meanwhile."""
        now_s = self._clock.monotonic()
        for job in some:
            mark = marks.pop(job, None)
            if mark and job in taken:
                marks[job] = mark._replace(since_s=now_s)


def _due(marks: Mapping[UUID, PendingState], before_s: float) -> dict[UUID, PendingState]:
    """The oldest, as many as are written together."""
    old = takewhile(lambda item: item[1].since_s <= before_s, marks.items())
    return dict(islice(old, MAX_BATCH))


def _observe_queue_wait(marks: Mapping[UUID, PendingState], rows: Iterable[Record]) -> None:
    for row in rows:
        wait_ms = marks[row["pk_job"]].at_ms - row["submitted_ms"]
        QUEUE_WAIT.labels(row["topic"]).observe(max(0, wait_ms) / 1000)


def _ignore(_state: str, _marked: Sequence[JobStateChange]) -> None:
    return None
