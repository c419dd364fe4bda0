"""Writes DISPATCHED and RUNNING job states in batches, shortly after the fact.

Jobs that have ended meanwhile are skipped. If the process dies before a write, the leader writes DISPATCHED a moment
later (`rota.engine.recovery.reconciler`); no decision depends on these states. Never waits for row locks: finishers
lock jobs in a different order, so waiting could deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice, takewhile
from typing import Final, NamedTuple
from uuid import UUID

import asyncpg
import structlog

from rota.engine.completion.job_ends import JobEnd
from rota.engine.events.sink import EventSink
from rota.infra.clock import Clock
from rota.infra.postgres import Database, Record, query
from rota.infra.telemetry import metrics
from rota.model.errors import PostgresUnavailable
from rota.model.ids import ShowId

WRITE_STATES = query(__package__, "jobs_mark")

log = structlog.get_logger(__name__)
DEBOUNCE_S: Final = 0.2
"""Jobs that end within this time are not written."""
MAX_BATCH: Final = 1000
QUEUE_WAIT = metrics.histogram("rota_queue_wait_seconds", "From submission to the first assignment.", labels=("topic",))


class PendingState(NamedTuple):
    """When the change happened: wall clock (`at_ms`) and monotonic clock (`since_s`)."""

    at_ms: int
    since_s: float


class JobStateChange(NamedTuple):
    """A job whose state was written."""

    job: UUID
    show: ShowId
    topic: str


class JobStateWriter:
    def __init__(self, database: Database, events: EventSink, clock: Clock) -> None:
        self.database = database
        self._clock = clock
        self._dispatched: dict[UUID, PendingState] = {}
        self._running: dict[UUID, PendingState] = {}
        self._has_pending = asyncio.Event()
        self._events = events

    def record_dispatched(self, jobs: Iterable[UUID]) -> None:
        self._record(self._dispatched, jobs)

    def record_running(self, jobs: Iterable[UUID]) -> None:
        self._record(self._running, jobs)

    def forget_ended(self, jobs: Iterable[JobEnd]) -> None:
        """For `CompletionPublisher.listeners`."""
        for end in jobs:
            self._dispatched.pop(end.job, None)
            self._running.pop(end.job, None)

    def _record(self, changes: dict[UUID, PendingState], jobs: Iterable[UUID]) -> None:
        change = PendingState(self._clock.now_ms(), self._clock.monotonic())
        for job in jobs:
            changes.setdefault(job, change)
        self._has_pending.set()

    async def run(self) -> None:
        while True:
            await self._has_pending.wait()
            await self._clock.sleep(DEBOUNCE_S)
            try:
                await self.flush()
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                # No decision depends on these states: keep dispatching and retry on the next flush.
                log.warning("job_state_write_failed", reason=str(error))

    @property
    def pending(self) -> int:
        """Number of unwritten state changes."""
        return len(self._dispatched) + len(self._running)

    async def flush(self) -> None:
        """Write changes older than `DEBOUNCE_S`; each is kept until it is written."""
        before_s = self._clock.monotonic() - DEBOUNCE_S
        for state, changes in (("DISPATCHED", self._dispatched), ("RUNNING", self._running)):
            while batch := _due(changes, before_s):
                rows = await self.database.rows(
                    WRITE_STATES, list(batch), state, [change.at_ms for change in batch.values()]
                )
                locked = {row["pk_job"] for row in rows if row["topic"] is None}
                self._remove_written(changes, batch, locked)
                written = [row for row in rows if row["topic"] is not None]
                changes_written = [JobStateChange(row["pk_job"], row["pk_show"], row["topic"]) for row in written]
                self._events.job_states_changed(state, changes_written)
                if state == "DISPATCHED":
                    _observe_queue_wait(batch, written)
        if not self.pending:
            self._has_pending.clear()

    def _remove_written(self, changes: dict[UUID, PendingState], batch: Iterable[UUID], locked: set[UUID]) -> None:
        """Keep jobs whose row was locked, and retry them later unless they have ended."""
        now_s = self._clock.monotonic()
        for job in batch:
            change = changes.pop(job, None)
            if change and job in locked:
                changes[job] = change._replace(since_s=now_s)


def _due(changes: Mapping[UUID, PendingState], before_s: float) -> dict[UUID, PendingState]:
    """The oldest changes, at most one batch."""
    due = takewhile(lambda item: item[1].since_s <= before_s, changes.items())
    return dict(islice(due, MAX_BATCH))


def _observe_queue_wait(changes: Mapping[UUID, PendingState], rows: Iterable[Record]) -> None:
    for row in rows:
        wait_ms = changes[row["pk_job"]].at_ms - row["submitted_ms"]
        QUEUE_WAIT.labels(row["topic"]).observe(max(0, wait_ms) / 1000)
