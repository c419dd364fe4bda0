"""Sagas: compensations of succeeded jobs, recorded and carried out in reverse order on a rollback.

Invariants and who enforces them:
- a job is compensated at most once: it has one row in `rota.saga_entry`, and its compensation one idempotency key;
- in reverse, one after the other: a saga with a running compensation is not due (`rota.saga_due`), and the next entry
  is the last recorded;
- a compensation that has no effect ends visibly: FAILED after its retries, SKIPPED when the policy denies it, CORRUPT
  when it cannot be decoded; each becomes a dead letter, and the rest continues. A person may retry
  (`RunCommands.roll_back`);
- runs are isolated: a saga belongs to a show and a run, or to another `workflow_id` that jobs of that show name.

Recording, processing the inbox and advancing are each one transaction under the lock of the saga's row. A crash before
its commit leaves nothing done; after it, the saga is due, or its compensation runs and its end enters the inbox.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

import msgspec
import structlog

from rota.api.admin import DeadLetter
from rota.api.jobs import JobView
from rota.engine.admission.controller import gate_for
from rota.engine.admission.policy_call import KERNEL_TIMEOUT_S, query_kernel
from rota.engine.events.sink import DiscardedEvents
from rota.engine.queries.jobs import JobQueries
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
from rota.model.reasons import DeadLetterReason
from rota.model.workflows import compensation
from rota.policy.request_builder import group_stored_jobs, input_of_submission
from rota.queue.dead_letters import DeadLetterQueue
from rota.workflow.notifier import RunNotifier

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
REASON_UNREADABLE: Final = DeadLetterReason.SAGA_UNREADABLE.value
REASON_FAILED: Final = DeadLetterReason.SAGA_FAILED.value
REASON_DENIED: Final = DeadLetterReason.SAGA_DENIED.value

RECORDED = metrics.counter("rota_saga_recorded", "Compensations recorded.")
TRIGGERED = metrics.counter("rota_saga_rollback_triggered", "Rollbacks started.")
DISPATCHED = metrics.counter("rota_saga_compensation_dispatched", "Compensations submitted.")
COMPENSATIONS_FAILED = metrics.counter(
    "rota_saga_compensation_failed", "Compensations that ended without effect, by reason.", labels=("reason",)
)
ROLLBACK_DURATION = metrics.histogram(
    "rota_saga_rollback_duration_seconds", "From the start of a rollback to its end.", buckets=(0.1, 1, 10, 60, 600)
)
ACTIVE_SAGAS = metrics.gauge("rota_saga_active", "Sagas that are rolling back.")
UNREADABLE_TEMPLATES = metrics.counter("rota_saga_unmarshal_error", "Recorded compensations that cannot be decoded.")


class JobCompensation(msgspec.Struct, frozen=True, kw_only=True):
    """A succeeded job and its compensation."""

    show: ShowId
    saga: str
    job: UUID
    by: Compensation
    step: str = ""
    error: str = ""


class SagaEvent(msgspec.Struct, frozen=True):
    """A change of a saga, or of one of its entries."""

    what: str
    show: ShowId
    saga: str
    step: str = ""
    job: UUID | None = None
    """The job that is compensated."""


class SagaPassResult(msgspec.Struct):
    """Changes of a pass, to be published after the commit."""

    count: int = 0
    plans: list[ValidatedSubmission] = []
    submitted: list[SubmitResult] = []
    letters: int = 0
    happened: list[SagaEvent] = []


class Sagas:
    def __init__(
        self,
        database: Database,
        dead_letters: DeadLetterQueue,
        notifier: RunNotifier,
        kernel: Kernel | None = None,
        kernel_timeout_s: float = KERNEL_TIMEOUT_S,
    ) -> None:
        self.database = database
        self.dead_letters = dead_letters
        self.kernel = kernel
        """Consulted before each compensation: a denied one is skipped; admission decides about the others."""
        self._kernel_timeout_s = kernel_timeout_s
        self._notifier = notifier
        self._submitter = Submitter(database, DiscardedEvents(), gate=gate_for(kernel))
        """Writes in our transactions; `saga_pass_ended` publishes what it wrote."""
        self._jobs = JobQueries(database)

    async def record(self, tx: Transaction, compensations: Sequence[JobCompensation]) -> None:
        """Part of the transaction that processes the success of these jobs."""
        if not compensations:
            return
        jobs = {job.id: job for job in await self._jobs.get_many([JobId(each.job) for each in compensations], on=tx)}
        made = [_template(each, jobs.get(JobId(each.job))) for each in compensations]
        recorded = await tx.value(
            RECORD,
            [each.show for each in compensations],
            [each.saga for each in compensations],
            [each.job for each in compensations],
            [each.step for each in compensations],
            [data for data, _ in made],
            [error for _, error in made],
        )
        RECORDED.inc(int(recorded))
        self.notify_after_commit(tx, ((each.show, each.saga) for each in compensations))

    def notify_after_commit(self, tx: Transaction, sagas: Iterable[tuple[ShowId, str]]) -> None:
        """Call the notifier for these sagas once `tx` has committed."""
        changed = list(dict.fromkeys(sagas))
        tx.after_commit.append(lambda: self._notifier.sagas_changed(changed))

    async def roll_back(self, tx: Transaction, sagas: Sequence[tuple[ShowId, str]], why: str) -> set[str]:
        """Start the rollback of these sagas; returns those with something to undo."""
        if not sagas:
            return set()
        rows = await tx.rows(ROLL_BACK, [show for show, _ in sagas], [name for _, name in sagas], why)
        TRIGGERED.inc(len(rows))
        self.notify_after_commit(tx, sagas)
        return {row["workflow_id"] for row in rows}

    async def drain_inbox(self, tx: Transaction, result: SagaPassResult) -> int:
        """Process ends of compensations, and of jobs that joined a saga; returns how many."""
        rows = await tx.rows(TAKE_INBOX, BATCH)
        if not rows:
            return 0
        failpoints.hit("saga.after_take")
        await self._end_compensations(tx, [row for row in rows if row["kind"] == "undo"], result)
        await self._record_joined_jobs(tx, [row for row in rows if row["kind"] == "free"])
        failpoints.hit("saga.before_heard")
        return len(rows)

    async def _end_compensations(self, tx: Transaction, rows: Sequence[Record], result: SagaPassResult) -> None:
        if not rows:
            return
        states = [_entry_state(JobState(row["state"])) for row in rows]
        ended = await tx.rows(
            END_RUNNING_ENTRIES, [row["pk_job"] for row in rows], states, [row["error"] for row in rows]
        )
        result.happened += [_saga_event("undone" if row["state"] == "done" else row["state"], row) for row in ended]
        self.notify_after_commit(tx, ((ShowId(row["pk_show"]), row["workflow_id"]) for row in rows))
        failed = [row for row in ended if row["state"] != "done"]
        await self._add_dead_letters(
            tx, [_dead_letter(row, REASON_FAILED if row["state"] == "failed" else REASON_DENIED) for row in failed]
        )

    async def _record_joined_jobs(self, tx: Transaction, rows: Sequence[Record]) -> None:
        compensations = [
            joined_job_compensation(
                row["state"], row["request"], ShowId(row["pk_show"]), row["workflow_id"], row["pk_job"]
            )
            for row in rows
        ]
        await self.record(tx, [each for each in compensations if each is not None])
        # A run's jobs are rolled back as its workflow says, or on a person's command.
        failed = [row for row in rows if row["state"] == JobState.FAILED.value and not row["of_run"]]
        fatal = [row for row in failed if row["code"] in FATAL_CODES]
        for row in fatal:
            why = f"Job {row['pk_job']} failed permanently."
            await self.roll_back(tx, [(ShowId(row["pk_show"]), row["workflow_id"])], why)

    async def advance(self, tx: Transaction) -> SagaPassResult:
        """Start the next compensation of each due saga; a saga without one ends."""
        rows = await tx.rows(DUE, BATCH)
        result = SagaPassResult(len(rows))
        if not rows:
            return result
        failpoints.hit("saga.after_due")
        self.notify_after_commit(tx, ((ShowId(row["pk_show"]), row["workflow_id"]) for row in rows))
        finished = [row for row in rows if row["number"] is None]
        if finished:
            await tx.rows(END_SAGAS, [row["pk_saga"] for row in finished])
            states = {
                row["pk_saga"]: row["state"] for row in await tx.rows(SAGA_STATES, [row["pk_saga"] for row in finished])
            }
            for row in finished:
                ROLLBACK_DURATION.observe(row["took_s"] or 0.0)
                what = f"ended.{states[row['pk_saga']]}"
                result.happened.append(SagaEvent(what, ShowId(row["pk_show"]), row["workflow_id"]))
        due = await self._decode_templates(tx, [row for row in rows if row["number"] is not None], result)
        allowed = await self._check_policy(tx, due, result)
        for row, submission in allowed:
            await self._submit_compensation(tx, row, submission, result)
        failpoints.hit("saga.before_commit")
        return result

    async def _decode_templates(
        self, tx: Transaction, rows: Sequence[Record], result: SagaPassResult
    ) -> list[tuple[Record, Submission]]:
        """A compensation that cannot be decoded becomes a dead letter; the rest continues."""
        read: list[tuple[Record, Submission]] = []
        for row in rows:
            try:
                submission = compensation.decode_compensation(row["template"])
            except InvalidInput as error:
                UNREADABLE_TEMPLATES.inc()
                await self._end_unsubmitted(tx, row, "corrupt", error.sentence, REASON_UNREADABLE, result)
            else:
                named = msgspec.structs.replace(submission, show=row["show"])
                read.append((row, compensation.with_retry_key(named, row["attempt"]) if row["attempt"] > 1 else named))
        return read

    async def _check_policy(
        self, tx: Transaction, due: Sequence[tuple[Record, Submission]], result: SagaPassResult
    ) -> list[tuple[Record, Submission]]:
        """Policy precheck: denied compensations are skipped; without an answer they go on to admission."""
        if self.kernel is None or not due:
            return list(due)
        plans = [compensation.validate_compensation(submission) for _, submission in due]
        grouped = group_stored_jobs(
            [JobId(row["pk_job"]) for row, _ in due], [input_of_submission(plan) for plan in plans]
        )
        try:
            decisions = await query_kernel(self.kernel, grouped.questions, self._kernel_timeout_s)
        except Unavailable as error:
            log.warning("compensation_policy_unavailable", sagas=len(due), because=error.sentence)
            return list(due)
        except Exception:  # a failing policy engine does not block sagas: admission asks again
            log.exception("compensation_policy_failed", sagas=len(due))
            return list(due)
        allowed: list[tuple[Record, Submission]] = []
        for (row, submission), place in zip(due, grouped.places, strict=True):
            decision = decisions[place].for_job(JobId(row["pk_job"]))
            if decision.says is PolicyEffect.DENY:
                log.error("compensation_denied", saga=row["workflow_id"], job=str(row["pk_job"]), rule=decision.rule)
                await self._end_unsubmitted(
                    tx, row, "skipped", decision.reason or "The policy denies it.", REASON_DENIED, result
                )
            else:
                allowed.append((row, submission))
        return allowed

    async def _submit_compensation(
        self, tx: Transaction, row: Record, submission: Submission, result: SagaPassResult
    ) -> None:
        """A rejected compensation, such as one whose show is gone, ends visibly; the others continue."""
        plan = compensation.validate_compensation(submission)
        try:
            async with tx.savepoint():
                [submitted] = await self._submitter.write([plan], on=tx)
        except Unavailable:
            raise
        except RotaError as rejection:
            await self._end_unsubmitted(tx, row, "failed", rejection.sentence, REASON_FAILED, result)
            return
        await tx.run(START_ENTRIES, [row["pk_saga"]], [row["number"]], [submitted.job])
        DISPATCHED.inc()
        result.happened.append(_saga_event("undoing", row))
        result.plans.append(plan)
        result.submitted.append(submitted)

    async def _end_unsubmitted(
        self, tx: Transaction, row: Record, state: str, error: str, reason: str, result: SagaPassResult
    ) -> None:
        result.letters += 1
        result.happened.append(_saga_event(state, row))
        await tx.run(END_PENDING_ENTRIES, [row["pk_saga"]], [row["number"]], [state], [error])
        COMPENSATIONS_FAILED.labels(reason).inc()
        dead_letter = DeadLetter(
            kind="saga", reason=reason, cause=_cause(row), job=row["pk_job"], payload=row["template"], error=error
        )
        await self.dead_letters.add([dead_letter], on=tx)

    async def _add_dead_letters(self, tx: Transaction, dead_letters: Sequence[DeadLetter]) -> None:
        for dead_letter in dead_letters:
            log.error("compensation_failed", job=str(dead_letter.job), because=dead_letter.error)
            COMPENSATIONS_FAILED.labels(dead_letter.reason).inc()
        if dead_letters:
            await self.dead_letters.add(dead_letters, on=tx)

    async def update_active_gauge(self) -> None:
        self.set_active_gauge(int(await self.database.value(COUNT_ACTIVE)))

    def set_active_gauge(self, active: int) -> None:
        """Set by the leader only: values of two replicas would be added up."""
        ACTIVE_SAGAS.set(active)


def joined_job_compensation(
    state: str, request: bytes | None, show: ShowId, saga: str, job: UUID
) -> JobCompensation | None:
    """The compensation of a job that names a saga itself; None: the job did not succeed, or has no compensation."""
    if state not in (JobState.SUCCEEDED.value, JobState.OUTPUT_QUARANTINED.value) or request is None:
        return None
    by = decode_details(request).compensation
    return JobCompensation(show=show, saga=saga, job=job, by=by) if by is not None else None


def _template(compensated: JobCompensation, job: JobView | None) -> tuple[bytes, str | None]:
    """The submission of the compensation, or why it cannot be built."""
    if compensated.error:
        return b"", compensated.error
    if job is None:
        return b"", f"The job {compensated.job} is no longer retained."
    try:
        return compensation.encode_compensation(
            compensation.compensation_submission(origin_of(job), compensated.by, compensated.saga)
        ), None
    except InvalidInput as error:
        return b"", error.sentence


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
