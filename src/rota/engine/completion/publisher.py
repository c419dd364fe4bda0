"""After the commit of ends: releases in Redis, events, metrics, traces, and listeners in this process.

Nothing here decides anything. If the process dies before it is done, reconciliation corrects Redis, and whatever waits
for the end of a job finds it by polling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import UUID

import msgspec

from rota.accounting.allocations import ProcDeleteResult
from rota.accounting.service import AccountingService
from rota.engine.completion.job_ends import JobEnd
from rota.engine.events.sink import EventSink
from rota.engine.tracing import JobTracer, now_ns
from rota.infra.postgres import Database
from rota.infra.telemetry import metrics, tracing
from rota.model.ids import JobId, ShowId
from rota.model.token_ranges import TokenRange

COMPLETED = metrics.counter("rota_jobs_completed", "Jobs that ended, by state.", labels=("topic", "status"))
LATE_ENDS = metrics.counter("rota_frames_late", "Late results: the attempt had ended before, or was not the sender's.")


class DeadLetterNotice(NamedTuple):
    """A dead-lettered frame or output; `show` is None where it is unknown."""

    reason: str
    show: ShowId | None
    job: JobId
    what: str = "frame"


class CompletionResult(msgspec.Struct):
    """Result of a completion transaction, for the updates of Redis, the worker registry and the dispatcher."""

    released: dict[ShowId, ProcDeleteResult] = {}
    finished: list[JobEnd] = []
    freed: dict[UUID, list[TokenRange]] = {}
    """Tokens whose procs were deleted, by worker."""
    letters: list[DeadLetterNotice] = []
    failing: list[JobId] = []
    """Jobs to terminate because one of their frames failed (fail-fast)."""
    late: int = 0
    locked: list[int] = []
    """Tokens of shows that were locked: nothing was changed about them."""
    scans: bool = False
    """Whether some outputs need an asynchronous scan."""
    since_ns: int = msgspec.field(default_factory=now_ns)
    """When the transaction began."""

    def add(self, other: CompletionResult) -> None:
        """Add the result of another transaction, with other frames."""
        for show, deleted in other.released.items():
            before = self.released.get(show)
            self.released[show] = deleted if before is None else before.plus(deleted)
        self.finished += other.finished
        for worker, tokens in other.freed.items():
            self.freed[worker] = [*self.freed.get(worker, ()), *tokens]
        self.letters += other.letters
        self.failing += other.failing
        self.late += other.late
        self.locked += other.locked
        self.scans = self.scans or other.scans


class CompletionPublisher:
    def __init__(self, database: Database, accounting: AccountingService, events: EventSink) -> None:
        self.accounting = accounting
        self.events = events
        self.listeners: list[Callable[[Sequence[JobEnd]], None]] = []
        """Called with the jobs that ended here, unless the reply of the commit was lost."""
        self._traces = JobTracer(database)

    async def publish(self, result: CompletionResult) -> None:
        """Ends first: those who wait for them need not wait for Redis."""
        if result.letters:
            self.events.dead_lettered(result.letters)
        LATE_ENDS.inc(result.late)
        for (topic, state), jobs in Counter((job.topic, job.state) for job in result.finished).items():
            COMPLETED.labels(topic, state).inc(jobs)
        if result.finished:
            self.publish_ends(result.finished)
        for show, deleted in result.released.items():
            await self.accounting.publisher.publish(show, deleted)
        if result.finished and tracing.is_enabled():
            await self._traces.record_finished(result.finished, result.since_ns)

    def publish_ends(self, jobs: Sequence[JobEnd]) -> None:
        """Announce jobs that ended, or whose final state changed."""
        self.events.jobs_ended(jobs)
        for listener in self.listeners:
            listener(jobs)
