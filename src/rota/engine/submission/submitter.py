"""Submits jobs: validates them, then writes each with its layers, caps, keys and queue entries by one statement.

Invariants and who enforces them:
- an invalid batch writes nothing: `rota.model.jobs.validation` before, `rota.job_submit` inside the statement;
- a job exists together with its queue entries or not at all: one statement, in the caller's or in our own transaction;
- a job that depends on others (`after`) is PENDING and not queued before they have ended: `rota.job_admit`. The
  transaction that ends the last dependency releases it (`rota.jobs_release`); a dependency that ends while we write is
  found by the leader (`rota.engine.recovery.reconciler`). Only existing jobs can be named, so there are no cycles;
- one key, one job: the primary key of `rota.idempotency_key`, whose second user waits for the first to commit or
  abort.

The statement itself resolves names of shows, folders and departments, so renamed or deleted ones cannot be used.
Queues are created and committed before the first submission that needs them, on a reserved connection, so that a
caller with a long transaction does not block other producers; without a database of ours (`submit_on_async`,
`submit_on_sync`) they are created in the caller's transaction. After a crash or a lost reply, a submission with a key
can be repeated; without a key the outcome is unknown, as with any insert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from rota.engine.admission.decision import AdmissionGate, AllowAll
from rota.engine.admission.precheck import AdmissionPrecheck
from rota.engine.events.sink import EventSink
from rota.engine.submission.bulk_key import BulkKey, bulk_ids
from rota.engine.submission.statements import StaleDecision, Statement, SubmissionBatch, new_job_ids
from rota.engine.tracing import SubmissionSpans
from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction
from rota.infra.postgres.foreign import Rows, async_fetch, sync_fetch
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput
from rota.model.identity.principals import UnverifiedFace
from rota.model.jobs.submission import Submission, SubmitResult, decode_submission, encode_submission
from rota.model.jobs.validation import ValidatedSubmission, validate_submission, validate_unverified

if TYPE_CHECKING:
    from opentelemetry.context import Context

BATCH_MAX: Final = 10_000
"""Submissions per call."""
BATCH_BYTES_MAX: Final = 64 * 1024 * 1024

RECEIVED = metrics.counter("rota_jobs_received", "Jobs submitted by this process.", labels=("topic",))

SubmissionInput = Submission | bytes
"""Bytes: a submission in msgpack or JSON."""


class Submitter:
    """A caller's transaction must be READ COMMITTED, the default of PostgreSQL."""

    def __init__(
        self,
        database: Database,
        events: EventSink,
        *,
        gate: AdmissionGate | None = None,
        ahead: AdmissionPrecheck | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.gate: AdmissionGate = gate or AllowAll()
        self.ahead = ahead
        """Queries the policy before jobs are written in our own transaction; in a caller's transaction `gate` decides.
        """
        self._clock = clock or SystemClock()
        self.events = events
        """Told of jobs that were written in our own transaction."""

    async def submit(
        self,
        submissions: Sequence[SubmissionInput],
        *,
        on: Transaction | None = None,
        may_be_critical: bool = False,
        own: frozenset[str] = frozenset(),
    ) -> list[SubmitResult]:
        """Submit all or none, in the given order; `own` are Rota's reserved labels that the caller has set."""
        return await self.write(validate_submissions(submissions, may_be_critical=may_be_critical, own=own), on=on)

    async def write(
        self,
        plans: Sequence[ValidatedSubmission],
        *,
        on: Transaction | None = None,
        parents: Sequence[Context | None] | None = None,
        bulk: BulkKey | None = None,
    ) -> list[SubmitResult]:
        """Write validated submissions; `parents` are their trace contexts, by default the current one. `bulk`: a key
        for all of them, which have none of their own."""
        if not plans:
            return []
        with SubmissionSpans(plans, parents) as submitting:
            if on is None and self.ahead is not None:
                submitted = await self._write_prechecked(submitting.plans, self.ahead, bulk)
            else:
                now_ms = self._clock.now_ms()
                ids = bulk_ids(len(plans), now_ms) if bulk is not None else None
                batch = SubmissionBatch(submitting.plans, self.gate, now_ms, ids=ids, bulk=bulk)
                submitted = await self._write_or_defer(batch, on)
            submitting.record_submitted(submitted)
            if on is None:
                self.events.jobs_submitted(submitting.plans, submitted)
            return submitted

    async def _write_prechecked(
        self, plans: Sequence[ValidatedSubmission], ahead: AdmissionPrecheck, bulk: BulkKey | None
    ) -> list[SubmitResult]:
        now_ms = self._clock.now_ms()
        ids = bulk_ids(len(plans), now_ms) if bulk is not None else new_job_ids(len(plans), now_ms)
        decided = await ahead.decide(ids, plans)
        batch = SubmissionBatch(plans, self.gate, now_ms, ids=ids, ahead=decided, bulk=bulk)
        return await self._write_or_defer(batch, None)

    async def _write_or_defer(self, batch: SubmissionBatch, on: Transaction | None) -> list[SubmitResult]:
        """Deferred jobs keep their ids, so that a velocity limit counts each of them once."""
        try:
            return await self._write_once(batch, on)
        except StaleDecision:
            return await self._write_once(batch.deferred(), on)

    async def _write_once(self, batch: SubmissionBatch, on: Transaction | None) -> list[SubmitResult]:
        if on is None and batch.needs_transaction:
            async with self.database.transaction() as tx:
                return await self._execute(batch, lambda step: tx.rows(step.query, *step.arguments))
        target = on or self.database
        return await self._execute(
            batch, lambda step: target.rows(step.query, *step.arguments), together=on is not None
        )

    async def _execute(
        self, batch: SubmissionBatch, run: Callable[[Statement], Awaitable[Rows]], *, together: bool = True
    ) -> list[SubmitResult]:
        steps = batch.statements(together=together)
        step = next(steps)
        while True:
            failpoints.hit("submit.before_statement")
            if step.ahead:
                rows: Rows = await self.database.rows(step.query, *step.arguments, urgent=True)
            else:
                rows = await run(step)
            failpoints.after_send("submit.statement")
            try:
                step = steps.send(rows)
            except StopIteration as end:
                submitted: list[SubmitResult] = end.value
                _count(batch.plans, submitted)
                return submitted


async def submit_on_async(
    connection: Any,
    submissions: Sequence[SubmissionInput],
    *,
    gate: AdmissionGate | None = None,
    clock: Clock | None = None,
    may_be_critical: bool = False,
) -> list[SubmitResult]:
    """In an open transaction of asyncpg, psycopg (async) or SQLAlchemy (async), without a database of ours."""
    fetch = async_fetch(connection)
    plans = validate_submissions(submissions, may_be_critical=may_be_critical, face="sql")
    if not plans:
        return []
    with SubmissionSpans(plans) as submitting:
        steps = SubmissionBatch(submitting.plans, gate or AllowAll(), (clock or SystemClock()).now_ms()).statements()
        step = next(steps)
        while True:
            try:
                step = steps.send(await fetch(step.query.text, step.arguments))
            except StopIteration as end:
                submitted: list[SubmitResult] = end.value
                submitting.record_submitted(submitted)
                _count(plans, submitted)
                return submitted


def submit_on_sync(
    connection: Any,
    submissions: Sequence[SubmissionInput],
    *,
    gate: AdmissionGate | None = None,
    clock: Clock | None = None,
    may_be_critical: bool = False,
) -> list[SubmitResult]:
    """The same, in an open transaction of psycopg, SQLAlchemy or Django."""
    fetch = sync_fetch(connection)
    plans = validate_submissions(submissions, may_be_critical=may_be_critical, face="sql")
    if not plans:
        return []
    with SubmissionSpans(plans) as submitting:
        steps = SubmissionBatch(submitting.plans, gate or AllowAll(), (clock or SystemClock()).now_ms()).statements()
        step = next(steps)
        while True:
            try:
                step = steps.send(fetch(step.query.text, step.arguments))
            except StopIteration as end:
                submitted: list[SubmitResult] = end.value
                submitting.record_submitted(submitted)
                _count(plans, submitted)
                return submitted


def _count(plans: Sequence[ValidatedSubmission], submitted: Sequence[SubmitResult]) -> None:
    """Also counts jobs of transactions that roll back later: the counter is of received submissions."""
    new = Counter(plan.topic for plan, one in zip(plans, submitted, strict=True) if not one.already)
    for topic, jobs in new.items():
        RECEIVED.labels(topic).inc(jobs)


def validate_decoded(submissions: Sequence[Submission]) -> list[ValidatedSubmission]:
    """Validate submissions that `rota.model.jobs.submission` has decoded, so that their types are known.

    The caller checks who may use CRITICAL, and the batch size.
    """
    return [validate_submission(submission, may_be_critical=True) for submission in submissions]


def validate_submissions(
    submissions: Sequence[SubmissionInput],
    *,
    may_be_critical: bool = False,
    own: frozenset[str] = frozenset(),
    face: UnverifiedFace | None = None,
) -> list[ValidatedSubmission]:
    """Validate each submission as untrusted input; from a `face` without keys, its principal becomes a claim."""
    if len(submissions) > BATCH_MAX:
        raise InvalidInput(f"{len(submissions)} submissions are too many for one call: submit {BATCH_MAX} at a time.")
    messages = [
        submission if isinstance(submission, bytes) else encode_submission(submission) for submission in submissions
    ]
    if sum(map(len, messages)) > BATCH_BYTES_MAX:
        raise InvalidInput(
            f"Submissions of more than {BATCH_BYTES_MAX} bytes are too large for one call: submit them in parts."
        )
    decoded = [decode_submission(message) for message in messages]
    if face is not None:
        return [validate_unverified(each, face, may_be_critical=may_be_critical) for each in decoded]
    return [validate_submission(each, may_be_critical=may_be_critical, own=own) for each in decoded]
