"""Sagas: what undoes jobs that have succeeded is recorded, and carried out in reverse when it comes to that.

What holds, and who sees to it:
- a job is undone once at most: `rota.saga_entry` has one row for it, and its compensation one idempotency key;
- in reverse, each waited for: a saga that runs a compensation is not due (`rota.saga_due`), and the next is the last
  that was recorded;
- what cannot be undone ends visibly: FAILED after its retries, SKIPPED when the policy denies it, CORRUPT when it
  cannot be read; each is a dead letter, and the rest goes on. A person may have these tried again (`Desk.roll_back`);
- runs never touch each other: a saga is a show and a run, or whatever else jobs of that show name as `workflow_id`.

Recording, hearing and going on are each part of one transaction under the lock of the saga's row. If we die before its
commit nothing happened; after it, the saga is due, or its compensation runs and its end is news.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final
from uuid import UUID

import msgspec
import structlog

from rota.engine.admission.controller import KERNEL_TIMEOUT_S, gate_for
from rota.engine.admission.policy_call import query_kernel
from rota.engine.queries.jobs import JobQueries, JobView
from rota.engine.submission.submitter import Submitter
from rota.infra import failpoints
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, RotaError, Unavailable
from rota.model.ids import JobId, ShowId
from rota.model.job_states import JobState
from rota.model.jobs.submission import Compensation, Submission, SubmitResult, decode_details
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.policy.decision import Kernel, PolicyEffect
from rota.model.protocol import FATAL_CODES
from rota.model.workflows import compensation
from rota.policy.request_builder import group_stored_jobs, input_of_submission
from rota.queue.dead_letters import DeadLetter, DeadLetterQueue

TAKE_INBOX = query(__package__, "saga_take")
RECORD = query(__package__, "saga_record")
ROLL_BACK = query(__package__, "saga_roll_back")
DUE = query(__package__, "saga_due")
START_ENTRIES = query(__package__, "saga_begun")
END_PENDING_ENTRIES = query(__package__, "saga_over")
END_RUNNING_ENTRIES = query(__package__, "saga_undone")
END_SAGAS = query(__package__, "saga_end")
SAGA_STATES = query(__package__, "saga_ended")
COUNT_ACTIVE = query(__package__, "saga_active")

log = structlog.get_logger(__name__)
BATCH: Final = 256
REASON_UNREADABLE: Final = "saga_unmarshal_failed"
REASON_FAILED: Final = "saga_compensation_failed"
REASON_DENIED: Final = "saga_compensation_denied"

RECORDED = metrics.counter("rota_saga_recorded", "Compensations that were recorded.")
TRIGGERED = metrics.counter("rota_saga_rollback_triggered", "Rollbacks that began.")
DISPATCHED = metrics.counter("rota_saga_compensation_dispatched", "Compensations that were submitted.")
COMPENSATIONS_FAILED = metrics.counter(
    "rota_saga_compensation_failed", "Compensations that ended without effect, by why.", labels=("reason",)
)
ROLLBACK_DURATION = metrics.histogram(
    "rota_saga_rollback_duration_seconds", "From the beginning of a rollback to its end.", buckets=(0.1, 1, 10, 60, 600)
)
ACTIVE_SAGAS = metrics.gauge("rota_saga_active", "Sagas that roll back.")
UNREADABLE_TEMPLATES = metrics.counter("rota_saga_unmarshal_error", "Recorded compensations that could not be read.")


class JobCompensation(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has succeeded, and what undoes it."""

    show: ShowId
    saga: str
    job: UUID
    by: Compensation
    step: str = ""
    error: str = ""


class SagaEvent(msgspec.Struct, frozen=True):
    """What happened to an entry of a saga, or to all of it."""

    what: str
    show: ShowId
    saga: str
    step: str = ""
    job: UUID | None = None
    """The one that is undone."""


class SagaPassResult(msgspec.Struct):
    """What came of a pass, for whoever tells others once it is committed."""

    count: int = 0
    plans: list[ValidatedSubmission] = []
    submitted: list[SubmitResult] = []
    letters: int = 0
    happened: list[SagaEvent] = []


class Sagas:
    def __init__(self, database: Database, letters: DeadLetterQueue, kernel: Kernel | None = None) -> None:
        self.database = database
        self.letters = letters
        self.kernel = kernel
        """Asked before each compensation, so that what it denies is skipped; the gate lets in what it allows."""
        self.on_change: Callable[[Sequence[tuple[ShowId, str]]], None] = _ignore_changes
        """Called with sagas that have changed, after the commit."""
        self._submitter = Submitter(database, gate=gate_for(kernel))
        self._jobs = JobQueries(database)

    async def record(self, tx: Transaction, undone: Sequence[JobCompensation]) -> None:
        """In the transaction that takes up the news of their success."""
        if not undone:
            return
        jobs = {job.id: job for job in await self._jobs.get_many([JobId(each.job) for each in undone], on=tx)}
        made = [_template(each, jobs.get(JobId(each.job))) for each in undone]
        recorded = await tx.value(
            RECORD,
            [each.show for each in undone],
            [each.saga for each in undone],
            [each.job for each in undone],
            [each.step for each in undone],
            [data for data, _ in made],
            [error for _, error in made],
        )
        RECORDED.inc(int(recorded))
        self.notify_after_commit(tx, ((each.show, each.saga) for each in undone))

    def notify_after_commit(self, tx: Transaction, sagas: Iterable[tuple[ShowId, str]]) -> None:
        """That they change with `tx`, once it is committed."""
        changed = list(dict.fromkeys(sagas))
        tx.after_commit.append(lambda: self.on_change(changed))

    async def roll_back(self, tx: Transaction, sagas: Sequence[tuple[ShowId, str]], why: str) -> set[str]:
        """Those of them that have something to undo, and do so from now on."""
        if not sagas:
            return set()
        rows = await tx.rows(ROLL_BACK, [show for show, _ in sagas], [name for _, name in sagas], why)
        TRIGGERED.inc(len(rows))
        self.notify_after_commit(tx, sagas)
        return {row["workflow_id"] for row in rows}

    async def drain_inbox(self, tx: Transaction, told: SagaPassResult) -> int:
        """Ends of compensations, and of jobs that have joined a saga by themselves; how many."""
        rows = await tx.rows(TAKE_INBOX, BATCH)
        if not rows:
            return 0
        failpoints.hit("saga.after_take")
        await self._end_compensations(tx, [row for row in rows if row["kind"] == "undo"], told)
        await self._record_joined_jobs(tx, [row for row in rows if row["kind"] == "free"])
        failpoints.hit("saga.before_heard")
        return len(rows)

    async def _end_compensations(self, tx: Transaction, rows: Sequence[Record], told: SagaPassResult) -> None:
        if not rows:
            return
        states = [_entry_state(JobState(row["state"])) for row in rows]
        ended = await tx.rows(
            END_RUNNING_ENTRIES, [row["pk_job"] for row in rows], states, [row["error"] for row in rows]
        )
        told.happened += [_saga_event("undone" if row["state"] == "done" else row["state"], row) for row in ended]
        self.notify_after_commit(tx, ((ShowId(row["pk_show"]), row["workflow_id"]) for row in rows))
        failed = [row for row in ended if row["state"] != "done"]
        await self._add_dead_letters(
            tx, [_dead_letter(row, REASON_FAILED if row["state"] == "failed" else REASON_DENIED) for row in failed]
        )

    async def _record_joined_jobs(self, tx: Transaction, rows: Sequence[Record]) -> None:
        undone = [
            joined_job_compensation(
                row["state"], row["request"], ShowId(row["pk_show"]), row["workflow_id"], row["pk_job"]
            )
            for row in rows
        ]
        await self.record(tx, [each for each in undone if each is not None])
        # What a run did is undone as its workflow says, or when a person does.
        failed = [row for row in rows if row["state"] == JobState.FAILED.value and not row["of_run"]]
        fatal = [row for row in failed if row["code"] in FATAL_CODES]
        for row in fatal:
            why = f"Job {row['pk_job']} failed for good."
            await self.roll_back(tx, [(ShowId(row["pk_show"]), row["workflow_id"])], why)

    async def advance(self, tx: Transaction) -> SagaPassResult:
        """The next compensation of each saga that is due; a saga that has none left has ended."""
        rows = await tx.rows(DUE, BATCH)
        told = SagaPassResult(len(rows))
        if not rows:
            return told
        failpoints.hit("saga.after_due")
        self.notify_after_commit(tx, ((ShowId(row["pk_show"]), row["workflow_id"]) for row in rows))
        over = [row for row in rows if row["number"] is None]
        if over:
            await tx.rows(END_SAGAS, [row["pk_saga"] for row in over])
            states = {
                row["pk_saga"]: row["state"] for row in await tx.rows(SAGA_STATES, [row["pk_saga"] for row in over])
            }
            for row in over:
                ROLLBACK_DURATION.observe(row["took_s"] or 0.0)
                what = f"ended.{states[row['pk_saga']]}"
                told.happened.append(SagaEvent(what, ShowId(row["pk_show"]), row["workflow_id"]))
        due = await self._decode_templates(tx, [row for row in rows if row["number"] is not None], told)
        allowed = await self._check_policy(tx, due, told)
        for row, submission in allowed:
            await self._submit_compensation(tx, row, submission, told)
        failpoints.hit("saga.before_commit")
        return told

    async def _decode_templates(
        self, tx: Transaction, rows: Sequence[Record], told: SagaPassResult
    ) -> list[tuple[Record, Submission]]:
        """What cannot be read is in nobody's way: it is a dead letter, and the rest goes on."""
        read: list[tuple[Record, Submission]] = []
        for row in rows:
            try:
                submission = compensation.decode_compensation(row["template"])
            except InvalidInput as wrong:
                UNREADABLE_TEMPLATES.inc()
                await self._end_unsubmitted(tx, row, "corrupt", wrong.sentence, REASON_UNREADABLE, told)
            else:
                named = msgspec.structs.replace(submission, show=row["show"])
                read.append((row, compensation.with_retry_key(named, row["attempt"]) if row["attempt"] > 1 else named))
        return read

    async def _check_policy(
        self, tx: Transaction, due: Sequence[tuple[Record, Submission]], told: SagaPassResult
    ) -> list[tuple[Record, Submission]]:
        """The soft check: who is denied is skipped, who gets no answer goes on, to the gate."""
        if self.kernel is None or not due:
            return list(due)
        plans = [compensation.validate_compensation(submission) for _, submission in due]
        grouped = group_stored_jobs(
            [JobId(row["pk_job"]) for row, _ in due], [input_of_submission(plan) for plan in plans]
        )
        try:
            words = await query_kernel(self.kernel, grouped.questions, KERNEL_TIMEOUT_S)
        except Unavailable as away:
            log.warning("compensations_unchecked", sagas=len(due), because=away.sentence)
            return list(due)
        except Exception:  # a kernel that fails keeps no saga from going on: the gate asks once more
            log.exception("compensations_unchecked", sagas=len(due))
            return list(due)
        allowed: list[tuple[Record, Submission]] = []
        for (row, submission), place in zip(due, grouped.places, strict=True):
            word = words[place].for_job(JobId(row["pk_job"]))
            if word.says is PolicyEffect.DENY:
                log.error("compensation_denied", saga=row["workflow_id"], job=str(row["pk_job"]), rule=word.rule)
                await self._end_unsubmitted(
                    tx, row, "skipped", word.reason or "The policy denies it.", REASON_DENIED, told
                )
            else:
                allowed.append((row, submission))
        return allowed

    async def _submit_compensation(
        self, tx: Transaction, row: Record, submission: Submission, told: SagaPassResult
    ) -> None:
        """One that is refused, as where its show is gone, ends visibly; the others go on."""
        plan = compensation.validate_compensation(submission)
        try:
            async with tx.savepoint():
                [submitted] = await self._submitter.write([plan], on=tx)
        except Unavailable:
            raise
        except RotaError as refused:
            await self._end_unsubmitted(tx, row, "failed", refused.sentence, REASON_FAILED, told)
            return
        await tx.run(START_ENTRIES, [row["pk_saga"]], [row["number"]], [submitted.job])
        DISPATCHED.inc()
        told.happened.append(_saga_event("undoing", row))
        told.plans.append(plan)
        told.submitted.append(submitted)

    async def _end_unsubmitted(
        self, tx: Transaction, row: Record, state: str, error: str, reason: str, told: SagaPassResult
    ) -> None:
        told.letters += 1
        told.happened.append(_saga_event(state, row))
        await tx.run(END_PENDING_ENTRIES, [row["pk_saga"]], [row["number"]], [state], [error])
        COMPENSATIONS_FAILED.labels(reason).inc()
        letter = DeadLetter(
            kind="saga", reason=reason, cause=_cause(row), job=row["pk_job"], payload=row["template"], error=error
        )
        await self.letters.add([letter], on=tx)

    async def _add_dead_letters(self, tx: Transaction, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            log.error("compensation_failed", job=str(letter.job), because=letter.error)
            COMPENSATIONS_FAILED.labels(letter.reason).inc()
        if letters:
            await self.letters.add(letters, on=tx)

    async def update_active_gauge(self) -> None:
        self.set_active_gauge(int(await self.database.value(COUNT_ACTIVE)))

    def set_active_gauge(self, active: int) -> None:
        """By the one who leads: two that tell the same would be added up."""
        ACTIVE_SAGAS.set(active)


def joined_job_compensation(
    state: str, request: bytes | None, show: ShowId, saga_of: str, job: UUID
) -> JobCompensation | None:
    """What undoes a job that names a saga itself; None: it has not succeeded, or nothing undoes it."""
    if state not in (JobState.SUCCEEDED.value, JobState.OUTPUT_QUARANTINED.value) or request is None:
        return None
    by = decode_details(request).compensation
    return JobCompensation(show=show, saga=saga_of, job=job, by=by) if by is not None else None


def _template(undone: JobCompensation, job: JobView | None) -> tuple[bytes, str | None]:
    """What to submit, or why that cannot be made out."""
    if undone.error:
        return b"", undone.error
    if job is None:
        return b"", f"The job {undone.job} is not kept any more."
    try:
        return compensation.encode_compensation(
            compensation.compensation_submission(origin_of(job), undone.by, undone.saga)
        ), None
    except InvalidInput as wrong:
        return b"", wrong.sentence


def origin_of(job: JobView) -> compensation.CompensatedJob:
    layer = job.layers[0]
    return compensation.CompensatedJob(
        job=job.id,
        show=job.show,
        folder=job.folder,
        dept=job.dept,
        name=job.name,
        labels=job.labels,
        details=job.details,
        work=layer.work,
        input=None if layer.input is None else msgspec.msgpack.decode(layer.input),
    )


def _entry_state(state: JobState) -> str:
    if state in (JobState.SUCCEEDED, JobState.OUTPUT_QUARANTINED):
        return "done"
    return "skipped" if state is JobState.DENIED else "failed"


def _saga_event(what: str, row: Record) -> SagaEvent:
    return SagaEvent(what, ShowId(row["pk_show"]), row["workflow_id"], row["step"], row["pk_job"])


def _dead_letter(row: Record, reason: str) -> DeadLetter:
    return DeadLetter(kind="saga", reason=reason, cause=_cause(row), job=row["pk_job"], error=row["error"])


def _cause(row: Record) -> str:
    return f"saga:{row['pk_saga']}:{row['number']}:{row['attempt']}"


def _ignore_changes(_sagas: Sequence[tuple[ShowId, str]]) -> None:
    return None
