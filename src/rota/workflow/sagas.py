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

from rota.engine.gate_asking import ask
from rota.engine.gatekeeper import ASK_S, gate_before
from rota.engine.jobs import Job, Jobs
from rota.engine.submit import Submitter
from rota.infra import faults
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model import saga
from rota.model.errors import InvalidInput, RotaError, Unavailable
from rota.model.ids import JobId, ShowId
from rota.model.job import Compensation, Submission, Submitted, decode_details
from rota.model.job_plan import Plan
from rota.model.lifecycle import JobState
from rota.model.messages import FATAL
from rota.model.policy import Kernel, Says
from rota.policy.asking import about, seen_of
from rota.queue.dead_letters import DeadLetter, DeadLetters

TAKE = query(__package__, "saga_take")
RECORD = query(__package__, "saga_record")
ROLL_BACK = query(__package__, "saga_roll_back")
DUE = query(__package__, "saga_due")
BEGUN = query(__package__, "saga_begun")
OVER = query(__package__, "saga_over")
UNDONE = query(__package__, "saga_undone")
END = query(__package__, "saga_end")
ENDED = query(__package__, "saga_ended")
ACTIVE = query(__package__, "saga_active")

log = structlog.get_logger(__name__)
BATCH: Final = 256
UNREADABLE: Final = "saga_unmarshal_failed"
FAILED: Final = "saga_compensation_failed"
SKIPPED: Final = "saga_compensation_denied"

RECORDED = metrics.counter("rota_saga_recorded", "Compensations that were recorded.")
TRIGGERED = metrics.counter("rota_saga_rollback_triggered", "Rollbacks that began.")
DISPATCHED = metrics.counter("rota_saga_compensation_dispatched", "Compensations that were submitted.")
NOT_UNDONE = metrics.counter(
    "rota_saga_compensation_failed", "Compensations that ended without effect, by why.", labels=("reason",)
)
TOOK = metrics.histogram(
    "rota_saga_rollback_duration_seconds", "From the beginning of a rollback to its end.", buckets=(0.1, 1, 10, 60, 600)
)
IS_ACTIVE = metrics.gauge("rota_saga_active", "Sagas that roll back.")
DAMAGED = metrics.counter("rota_saga_unmarshal_error", "Recorded compensations that could not be read.")


class Undone(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has succeeded, and what undoes it."""

    show: ShowId
    saga: str
    job: UUID
    by: Compensation
    step: str = ""
    error: str = ""


class SagaTold(msgspec.Struct, frozen=True):
    """What happened to an entry of a saga, or to all of it."""

    what: str
    show: ShowId
    saga: str
    step: str = ""
    job: UUID | None = None
    """The one that is undone."""


class GoneOn(msgspec.Struct):
    """What came of a pass, for whoever tells others once it is committed."""

    count: int = 0
    plans: list[Plan] = []
    submitted: list[Submitted] = []
    letters: int = 0
    happened: list[SagaTold] = []


class Sagas:
    def __init__(self, database: Database, letters: DeadLetters, kernel: Kernel | None = None) -> None:
        self.database = database
        self.letters = letters
        self.kernel = kernel
        """Asked before each compensation, so that what it denies is skipped; the gate lets in what it allows."""
        self.on_change: Callable[[Sequence[tuple[ShowId, str]]], None] = _ignore
        """Called with sagas that have changed, after the commit."""
        self._submitter = Submitter(database, gate=gate_before(kernel))
        self._jobs = Jobs(database)

    async def record(self, tx: Transaction, undone: Sequence[Undone]) -> None:
        """In the transaction that takes up the news of their success."""
        if not undone:
            return
        jobs = {job.id: job for job in await self._jobs.many([JobId(each.job) for each in undone], on=tx)}
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
        self.tell(tx, ((each.show, each.saga) for each in undone))

    def tell(self, tx: Transaction, sagas: Iterable[tuple[ShowId, str]]) -> None:
        """That they change with `tx`, once it is committed."""
        changed = list(dict.fromkeys(sagas))
        tx.afterwards.append(lambda: self.on_change(changed))

    async def roll_back(self, tx: Transaction, sagas: Sequence[tuple[ShowId, str]], why: str) -> set[str]:
        """Those of them that have something to undo, and do so from now on."""
        if not sagas:
            return set()
        rows = await tx.rows(ROLL_BACK, [show for show, _ in sagas], [name for _, name in sagas], why)
        TRIGGERED.inc(len(rows))
        self.tell(tx, sagas)
        return {row["workflow_id"] for row in rows}

    async def hear(self, tx: Transaction, told: GoneOn) -> int:
        """Ends of compensations, and of jobs that have joined a saga by themselves; how many."""
        rows = await tx.rows(TAKE, BATCH)
        if not rows:
            return 0
        faults.at("saga.after_take")
        await self._hear_undone(tx, [row for row in rows if row["kind"] == "undo"], told)
        await self._hear_joined(tx, [row for row in rows if row["kind"] == "free"])
        faults.at("saga.before_heard")
        return len(rows)

    async def _hear_undone(self, tx: Transaction, rows: Sequence[Record], told: GoneOn) -> None:
        if not rows:
            return
        states = [_entry_state(JobState(row["state"])) for row in rows]
        ended = await tx.rows(UNDONE, [row["pk_job"] for row in rows], states, [row["error"] for row in rows])
        told.happened += [_told("undone" if row["state"] == "done" else row["state"], row) for row in ended]
        self.tell(tx, ((ShowId(row["pk_show"]), row["workflow_id"]) for row in rows))
        failed = [row for row in ended if row["state"] != "done"]
        await self._give_up(tx, [_letter(row, FAILED if row["state"] == "failed" else SKIPPED) for row in failed])

    async def _hear_joined(self, tx: Transaction, rows: Sequence[Record]) -> None:
        undone = [
            joined(row["state"], row["request"], ShowId(row["pk_show"]), row["workflow_id"], row["pk_job"])
            for row in rows
        ]
        await self.record(tx, [each for each in undone if each is not None])
        # What a run did is undone as its workflow says, or when a person does.
        failed = [row for row in rows if row["state"] == JobState.FAILED.value and not row["of_run"]]
        fatal = [row for row in failed if row["code"] in FATAL]
        for row in fatal:
            why = f"Job {row['pk_job']} failed for good."
            await self.roll_back(tx, [(ShowId(row["pk_show"]), row["workflow_id"])], why)

    async def go_on(self, tx: Transaction) -> GoneOn:
        """The next compensation of each saga that is due; a saga that has none left has ended."""
        rows = await tx.rows(DUE, BATCH)
        told = GoneOn(len(rows))
        if not rows:
            return told
        faults.at("saga.after_due")
        self.tell(tx, ((ShowId(row["pk_show"]), row["workflow_id"]) for row in rows))
        over = [row for row in rows if row["number"] is None]
        if over:
            await tx.rows(END, [row["pk_saga"] for row in over])
            states = {row["pk_saga"]: row["state"] for row in await tx.rows(ENDED, [row["pk_saga"] for row in over])}
            for row in over:
                TOOK.observe(row["took_s"] or 0.0)
                what = f"ended.{states[row['pk_saga']]}"
                told.happened.append(SagaTold(what, ShowId(row["pk_show"]), row["workflow_id"]))
        due = await self._readable(tx, [row for row in rows if row["number"] is not None], told)
        allowed = await self._allowed(tx, due, told)
        for row, submission in allowed:
            await self._begin(tx, row, submission, told)
        faults.at("saga.before_commit")
        return told

    async def _readable(self, tx: Transaction, rows: Sequence[Record], told: GoneOn) -> list[tuple[Record, Submission]]:
        """What cannot be read is in nobody's way: it is a dead letter, and the rest goes on."""
        read: list[tuple[Record, Submission]] = []
        for row in rows:
            try:
                submission = saga.read(row["template"])
            except InvalidInput as wrong:
                DAMAGED.inc()
                await self._end_unrun(tx, row, "corrupt", wrong.sentence, UNREADABLE, told)
            else:
                named = msgspec.structs.replace(submission, show=row["show"])
                read.append((row, saga.again(named, row["attempt"]) if row["attempt"] > 1 else named))
        return read

    async def _allowed(
        self, tx: Transaction, due: Sequence[tuple[Record, Submission]], told: GoneOn
    ) -> list[tuple[Record, Submission]]:
        """The soft check: who is denied is skipped, who gets no answer goes on, to the gate."""
        if self.kernel is None or not due:
            return list(due)
        plans = [saga.planned(submission) for _, submission in due]
        grouped = about([JobId(row["pk_job"]) for row, _ in due], [seen_of(plan) for plan in plans])
        try:
            words = await ask(self.kernel, grouped.questions, ASK_S)
        except Unavailable as away:
            log.warning("compensations_unchecked", sagas=len(due), because=away.sentence)
            return list(due)
        except Exception:  # a kernel that fails keeps no saga from going on: the gate asks once more
            log.exception("compensations_unchecked", sagas=len(due))
            return list(due)
        allowed: list[tuple[Record, Submission]] = []
        for (row, submission), place in zip(due, grouped.places, strict=True):
            word = words[place].of(JobId(row["pk_job"]))
            if word.says is Says.DENY:
                log.error("compensation_denied", saga=row["workflow_id"], job=str(row["pk_job"]), rule=word.rule)
                await self._end_unrun(tx, row, "skipped", word.reason or "The policy denies it.", SKIPPED, told)
            else:
                allowed.append((row, submission))
        return allowed

    async def _begin(self, tx: Transaction, row: Record, submission: Submission, told: GoneOn) -> None:
        """One that is refused, as where its show is gone, ends visibly; the others go on."""
        plan = saga.planned(submission)
        try:
            async with tx.savepoint():
                [submitted] = await self._submitter.write([plan], on=tx)
        except Unavailable:
            raise
        except RotaError as refused:
            await self._end_unrun(tx, row, "failed", refused.sentence, FAILED, told)
            return
        await tx.run(BEGUN, [row["pk_saga"]], [row["number"]], [submitted.job])
        DISPATCHED.inc()
        told.happened.append(_told("undoing", row))
        told.plans.append(plan)
        told.submitted.append(submitted)

    async def _end_unrun(self, tx: Transaction, row: Record, state: str, error: str, reason: str, told: GoneOn) -> None:
        told.letters += 1
        told.happened.append(_told(state, row))
        await tx.run(OVER, [row["pk_saga"]], [row["number"]], [state], [error])
        NOT_UNDONE.labels(reason).inc()
        letter = DeadLetter(
            kind="saga", reason=reason, cause=_cause(row), job=row["pk_job"], payload=row["template"], error=error
        )
        await self.letters.add([letter], on=tx)

    async def _give_up(self, tx: Transaction, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            log.error("compensation_failed", job=str(letter.job), because=letter.error)
            NOT_UNDONE.labels(letter.reason).inc()
        if letters:
            await self.letters.add(letters, on=tx)

    async def measure(self) -> None:
        self.measured(int(await self.database.value(ACTIVE)))

    def measured(self, active: int) -> None:
        """By the one who leads: two that tell the same would be added up."""
        IS_ACTIVE.set(active)


def joined(state: str, request: bytes | None, show: ShowId, saga_of: str, job: UUID) -> Undone | None:
    """What undoes a job that names a saga itself; None: it has not succeeded, or nothing undoes it."""
    if state not in (JobState.SUCCEEDED.value, JobState.OUTPUT_QUARANTINED.value) or request is None:
        return None
    by = decode_details(request).compensation
    return Undone(show=show, saga=saga_of, job=job, by=by) if by is not None else None


def _template(undone: Undone, job: Job | None) -> tuple[bytes, str | None]:
    """What to submit, or why that cannot be made out."""
    if undone.error:
        return b"", undone.error
    if job is None:
        return b"", f"The job {undone.job} is not kept any more."
    try:
        return saga.write(saga.undoing(origin_of(job), undone.by, undone.saga)), None
    except InvalidInput as wrong:
        return b"", wrong.sentence


def origin_of(job: Job) -> saga.Origin:
    layer = job.layers[0]
    return saga.Origin(
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


def _told(what: str, row: Record) -> SagaTold:
    return SagaTold(what, ShowId(row["pk_show"]), row["workflow_id"], row["step"], row["pk_job"])


def _letter(row: Record, reason: str) -> DeadLetter:
    return DeadLetter(kind="saga", reason=reason, cause=_cause(row), job=row["pk_job"], error=row["error"])


def _cause(row: Record) -> str:
    return f"saga:{row['pk_saga']}:{row['number']}:{row['attempt']}"


def _ignore(_sagas: Sequence[tuple[ShowId, str]]) -> None:
    return None
