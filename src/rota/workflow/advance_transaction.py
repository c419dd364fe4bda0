"""One transaction that advances runs: news and timers, decisions, next jobs, state and history.

Everything of a batch is one commit. Who dies before it has done nothing, who dies after it has nothing left to do. A
submission that is refused undoes the whole batch; the next try is made run by run, each behind a savepoint, so that a
bad one fails alone (`alone=True`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final
from uuid import UUID

import asyncpg
import msgspec
import structlog

from rota.engine.completion.finisher import END_AS
from rota.engine.submission.submitter import Submitter
from rota.infra import failpoints, outbox
from rota.infra.nats import BusMessage
from rota.infra.postgres import Record, Transaction, query
from rota.infra.postgres.failures import FAILURES
from rota.infra.telemetry import metrics
from rota.model.approvals import Approval
from rota.model.errors import NotFound, RotaError, StaleFence, Unavailable
from rota.model.ids import ENTROPY_BYTES, RunId, uuid7
from rota.model.job_states import JobState
from rota.model.jobs.submission import SubmitResult
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.reasons import Reason
from rota.model.workflows.compensation import step_compensation
from rota.model.workflows.compiler import CompiledWorkflow
from rota.model.workflows.run_state import RUN_DEPTH_MAX, RecordCompensation, RunBegan
from rota.model.workflows.state_machine import new_run_status
from rota.workflow.definitions import Definitions, WorkflowVersion
from rota.workflow.run_context import RunContext, contexts_from_inbox, for_each_results, storable_text, write_arguments
from rota.workflow.sagas import JobCompensation, Sagas, joined_job_compensation
from rota.workflow.step_approvals import StepApprovals

TAKE_INBOX = query(__package__, "take")
WRITE = query(__package__, "write")
VALUES = query(__package__, "values")
FOR_EACH_RESULTS = query(__package__, "mapped")
PARTIALLY_SUCCEEDED = query(__package__, "partly")
OUTPUTS = query(__package__, "outputs")
INSERT_RUNS = query(__package__, "start")
CANCEL = query(__package__, "cancel")
SHOW_NAMES = query(__package__, "called")

log = structlog.get_logger(__name__)
BATCH: Final = 256
STALE_FENCE_SQLSTATE: Final = "RT001"
INTERNAL_ERROR: Final = "A defect of Rota keeps this run from going on: its server's log has the trace."
NOTIFY_SUBJECT: Final = "sys.workflow.notify"
_pack = msgspec.msgpack.Encoder().encode

RUNS_ENDED = metrics.counter("rota_workflow_runs_ended", "Runs of workflows that ended, by how.", labels=("state",))
STEPS_STARTED = metrics.counter("rota_workflow_steps_started", "Jobs and runs that steps of workflows have started.")
BATCH_RUNS = metrics.histogram(
    "rota_workflow_batch_runs", "Runs advanced by one transaction.", buckets=(1, 4, 16, 64, 128, 256, 512)
)


Flows = dict[int, tuple[int, CompiledWorkflow]]


class AdvanceResult(msgspec.Struct):
    """What came of a batch, for whoever tells others once it is committed."""

    turns: list[RunContext] = []
    plans: list[ValidatedSubmission] = []
    submitted: list[SubmitResult] = []
    stops: list[UUID] = []
    timers: int = 0
    first: int | None = None
    """The least number of the news that was taken up."""
    asked: list[Approval] = []

    def add(self, more: AdvanceResult) -> None:
        self.turns += more.turns
        self.plans += more.plans
        self.submitted += more.submitted
        self.stops += more.stops
        self.timers += more.timers
        self.asked += more.asked

    def record_metrics(self) -> None:
        STEPS_STARTED.inc(sum(len(turn.moves.starts) + len(turn.moves.children) for turn in self.turns))
        for state, runs in Counter(turn.state for turn in self.turns if turn.state.ended).items():
            RUNS_ENDED.labels(state.value).inc(runs)
        BATCH_RUNS.observe(len(self.turns))


class AdvanceTransaction:
    def __init__(self, submitter: Submitter, definitions: Definitions, sagas: Sagas) -> None:
        self.submitter = submitter
        self.definitions = definitions
        self.sagas = sagas
        self.approving = StepApprovals(definitions)

    async def advance_pending(
        self, tx: Transaction, most: int = BATCH, *, since: int = 0, alone: bool = False
    ) -> AdvanceResult:
        """Advance runs that have something to hear, by news from number `since` on."""
        rows = await tx.rows(TAKE_INBOX, most, since)
        if not rows:
            return AdvanceResult()
        failpoints.hit("workflow.after_take")
        if alone:
            done = await self._advance_individually(tx, rows)
        else:
            done = await self.advance(tx, await self._load_contexts(tx, rows))
        done.first = min((row["news_id"] for row in rows if row["news_id"] is not None), default=None)
        return done

    async def advance(self, tx: Transaction, turns: Sequence[RunContext], *, alone: bool = False) -> AdvanceResult:
        """Decide about runs that are locked, and write it."""
        done = AdvanceResult()
        wave = list(turns)
        for _ in range(RUN_DEPTH_MAX + 1):
            if not wave:
                break
            wave = await self._advance_level(tx, wave, done, alone=alone)
        done.timers = sum(len(turn.moves.timers) for turn in done.turns)
        await self._write(tx, done.turns)
        done.asked = await self.approving.request_and_withdraw(tx, done.turns)
        failpoints.hit("workflow.before_commit")
        return done

    async def _advance_individually(self, tx: Transaction, rows: Sequence[Record]) -> AdvanceResult:
        """Each run behind a savepoint: what cannot be read, decided or written of one keeps no other from going on."""
        done = AdvanceResult()
        for _, told in groupby(rows, itemgetter("pk_run")):
            news = list(told)
            try:
                async with tx.savepoint():
                    done.add(await self.advance(tx, await self._load_contexts(tx, news), alone=True))
            except Exception as error:
                if _is_transient(error):
                    raise
                log.exception("run_cannot_be_advanced", run=str(news[0]["pk_run"]))
                turn = RunContext.from_row(news[0])
                turn.fail(INTERNAL_ERROR)
                await self._write(tx, [turn])
                done.turns.append(turn)
        return done

    async def create_runs(
        self, tx: Transaction, given: Sequence[tuple[WorkflowVersion, RunId, dict[str, object], str | None]], actor: str
    ) -> list[RunContext | None]:
        """New runs, not advanced yet; None for one whose key was used before. `actor` submits all that they do."""
        return await self._insert_runs(tx, [(*each, RunParent(actor)) for each in given])

    async def _load_contexts(self, tx: Transaction, rows: Sequence[Record]) -> list[RunContext]:
        layers = [row["pk_layer"] for row in rows if row["kind"] == "job" and (row["frames"] or 0) > 1]
        children = [row["pk_job"] for row in rows if row["kind"] == "run"]
        mapped = for_each_results(await tx.rows(FOR_EACH_RESULTS, layers)) if layers else {}
        partly = await _partially_succeeded(tx, rows) if layers else frozenset()
        outputs = {row["pk_run"]: row["output"] for row in await tx.rows(OUTPUTS, children)} if children else {}
        turns = contexts_from_inbox(rows, mapped, outputs, partly)
        await self.sagas.record(tx, _joined_job_compensations(turns, rows))
        return turns

    async def _advance_level(
        self, tx: Transaction, turns: list[RunContext], done: AdvanceResult, *, alone: bool
    ) -> list[RunContext]:
        """Decide about these; returns the runs that they start."""
        flows = await self.definitions.many({turn.workflow for turn in turns}, tx)
        await self._read_values(tx, [turn for turn in turns if flows[turn.workflow][1].reads])
        await self._read_show_names(tx, turns)
        for turn in turns:
            version, flow = flows[turn.workflow]
            try:
                turn.decide(flow, version)
            except Exception:
                if not alone:
                    raise
                log.exception("run_cannot_be_advanced", run=str(turn.run))
                turn.fail(INTERNAL_ERROR)
        children = await self._resolve_child_runs(tx, turns, flows)
        await self._record_compensations(tx, turns, flows)
        await self._cancel_jobs_and_runs(tx, turns, done)
        if alone:
            for turn in turns:
                children = await self._submit_individually(tx, turn, flows, done, children)
            await self._cancel_jobs_and_runs(tx, turns, done)
        else:
            await self._submit(tx, turns, flows, done)
        for turn in turns:
            turn.assign_approval_ids(flows[turn.workflow][1])
        done.turns += turns
        await self._notify(tx, turns, flows)
        return await self._start_child_runs(tx, [birth for birth in children if birth.is_current], flows)

    async def _record_compensations(self, tx: Transaction, turns: Sequence[RunContext], flows: Flows) -> None:
        """Record what undoes the steps that have succeeded; runs that fail and want it undone go on until it is."""
        await self.sagas.record(
            tx, [_job_compensation(turn, flows, undo) for turn in turns for undo in turn.moves.undos]
        )
        for turn in [each for each in turns if each.wants_rollback(flows[each.workflow][1].spec)]:
            if await self.sagas.roll_back(tx, [(turn.show, str(turn.run))], storable_text(turn.now.error)):
                turn.start_compensating()

    async def _read_values(self, tx: Transaction, turns: Sequence[RunContext]) -> None:
        by_run = {turn.run: turn for turn in turns if turn.fence > 0}
        for row in await tx.rows(VALUES, list(by_run)) if by_run else ():
            by_run[row["pk_run"]].values[row["place"]] = msgspec.msgpack.decode(row["value"])

    async def _read_show_names(self, tx: Transaction, turns: Sequence[RunContext]) -> None:
        """Shows by the names that they have now; of one that is gone nothing has the name."""
        names = {
            row["pk_show"]: row["str_name"] for row in await tx.rows(SHOW_NAMES, list({turn.show for turn in turns}))
        }
        for turn in turns:
            turn.called = names.get(turn.show) or str(turn.show)

    async def _submit(self, tx: Transaction, turns: Sequence[RunContext], flows: Flows, done: AdvanceResult) -> None:
        starts = [(turn, start) for turn in turns for start in turn.moves.starts]
        if not starts:
            return
        plans = [start.plan for _, start in starts]
        submitted = await self.submitter.write(plans, on=tx)
        for (turn, start), one in zip(starts, submitted, strict=True):
            turn.step_started(flows[turn.workflow][1], start.place, one.job)
        done.plans += plans
        done.submitted += submitted

    async def _submit_individually(
        self, tx: Transaction, turn: RunContext, flows: Flows, done: AdvanceResult, children: list[ChildRunStart]
    ) -> list[ChildRunStart]:
        """A run whose steps are refused goes on without them: they fail, and say why. Returns the runs to start."""
        for _ in range(len(turn.now.steps) + 1):
            try:
                async with tx.savepoint():
                    await self._submit(tx, [turn], flows, done)
            except Unavailable:
                raise
            except RotaError as refused:
                turn.refused |= {start.place: refused.sentence for start in turn.moves.starts}
                version, flow = flows[turn.workflow]
                turn.decide(flow, version)
                others = [birth for birth in children if birth.turn is not turn]
                children = [*others, *await self._resolve_child_runs(tx, [turn], flows)]
                await self._record_compensations(tx, [turn], flows)
            else:
                break
        return children

    async def _cancel_jobs_and_runs(self, tx: Transaction, turns: Sequence[RunContext], done: AdvanceResult) -> None:
        """Jobs first, since whoever submits locks queues after jobs."""
        stops = sorted({job for turn in turns for job in turn.moves.stops})
        for job in stops:
            await tx.row(END_AS, job, JobState.CANCELLED.value, Reason.CANCELLED.value)
        done.stops += stops
        if runs := sorted({run for turn in turns for run in turn.moves.stop_runs}):
            await tx.run(CANCEL, runs)

    async def _resolve_child_runs(
        self, tx: Transaction, turns: Sequence[RunContext], flows: Flows
    ) -> list[ChildRunStart]:
        """What steps start, by name; one that cannot be started fails."""
        births: list[ChildRunStart] = []
        for turn in turns:
            if not turn.moves.children:
                continue
            version, flow = flows[turn.workflow]
            found: list[ChildRunStart] = []
            for _ in range(len(turn.now.steps) + 1):
                found, faults_ = await self._child_run_starts(tx, turn)
                if not faults_:
                    break
                turn.refused |= faults_
                turn.decide(flow, version)
            births += found
        return births

    async def _child_run_starts(self, tx: Transaction, turn: RunContext) -> tuple[list[ChildRunStart], dict[int, str]]:
        births: list[ChildRunStart] = []
        wrong: dict[int, str] = {}
        for child in turn.moves.children:
            try:
                if turn.depth >= RUN_DEPTH_MAX:
                    raise NotFound(f"Runs inside runs are {RUN_DEPTH_MAX} deep: does {child.workflow} start itself?")
                version = await self.definitions.find(turn.called, child.workflow, on=tx)
                births.append(ChildRunStart(turn, child.place, version, version.flow.inputs(child.input)))
            except Unavailable:
                raise
            except RotaError as refused:
                wrong[child.place] = refused.sentence
        return births, wrong

    async def _start_child_runs(
        self, tx: Transaction, births: Sequence[ChildRunStart], flows: Flows
    ) -> list[RunContext]:
        if not births:
            return []
        given = []
        for birth in births:
            run = new_run_id(birth.turn.now_ms)
            birth.turn.step_started(flows[birth.turn.workflow][1], birth.place, run)
            parent = birth.turn
            given.append(
                (birth.version, run, birth.input, None, RunParent(parent.actor, parent.run, parent.root, parent.depth))
            )
        return [turn for turn in await self._insert_runs(tx, given) if turn is not None]

    async def _insert_runs(
        self,
        tx: Transaction,
        given: Sequence[tuple[WorkflowVersion, RunId, dict[str, object], str | None, RunParent]],
    ) -> list[RunContext | None]:
        steps = [_pack(new_run_status(version.flow)) for version, *_ in given]
        inputs = [_pack(values) for _, _, values, *_ in given]
        rows = await tx.rows(
            INSERT_RUNS,
            [run for _, run, *_ in given],
            [version.show for version, *_ in given],
            [version.id for version, *_ in given],
            steps,
            inputs,
            [key for *_, key, _ in given],
            [parent.run for *_, parent in given],
            [parent.root or run for _, run, *_, parent in given],
            [parent.depth + 1 for *_, parent in given],
            [parent.actor for *_, parent in given],
        )
        turns: list[RunContext | None] = []
        for row, (version, run, *_, parent), now, values in zip(rows, given, steps, inputs, strict=True):
            depth, root = parent.depth + 1, parent.root or run
            turn = RunContext(
                run, version.show, version.id, now, 0, values, row["now_ms"], depth, root, actor=parent.actor
            )
            turn.news = [RunBegan()]
            turns.append(turn if row["made"] else None)
        return turns

    async def _notify(self, tx: Transaction, turns: Sequence[RunContext], flows: Flows) -> None:
        notes = [(turn, place, text) for turn in turns for place, text in turn.moves.notes]
        if notes:
            await outbox.add(
                tx, [_notification(turn, flows[turn.workflow][1].steps[place].id, text) for turn, place, text in notes]
            )

    async def _write(self, tx: Transaction, turns: Sequence[RunContext]) -> None:
        if not turns:
            return
        try:
            await tx.rows(WRITE, *write_arguments(turns))
        except asyncpg.PostgresError as error:
            if error.sqlstate != STALE_FENCE_SQLSTATE:
                raise
            raise StaleFence(
                "A run was advanced by somebody else meanwhile: nothing was written, look again."
            ) from error


class RunParent(msgspec.Struct, frozen=True):
    """What starts a run: somebody, by a run of theirs or without one."""

    actor: str
    run: RunId | None = None
    root: RunId | None = None
    depth: int = -1


class ChildRunStart(msgspec.Struct, frozen=True):
    """A run that a step is to start."""

    turn: RunContext
    place: int
    version: WorkflowVersion
    input: dict[str, object]

    @property
    def is_current(self) -> bool:
        """Whether what was decided about its parent since then still starts it."""
        return any(child.place == self.place for child in self.turn.moves.children)


def _is_transient(error: Exception) -> bool:
    """Whether trying again later may help: the server was away, busy or in the way of itself."""
    if isinstance(error, (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError)):
        return False
    return isinstance(error, (Unavailable, StaleFence, *FAILURES))


def new_run_id(now_ms: int) -> RunId:
    return RunId(uuid7(now_ms, secrets.token_bytes(ENTROPY_BYTES)))


def _job_compensation(turn: RunContext, flows: Flows, undo: RecordCompensation) -> JobCompensation:
    """What a step has done, with what undoes it; it belongs to the saga of the run that all of it began with."""
    step = flows[turn.workflow][1].steps[undo.place]
    by = step_compensation(step, undo)
    name = f"{step.id}" if turn.depth == 0 else f"{turn.run}/{step.id}"
    return JobCompensation(
        show=turn.show, saga=str(turn.root), job=undo.job, by=by, step=name, error=storable_text(undo.error)
    )


async def _partially_succeeded(tx: Transaction, rows: Sequence[Record]) -> frozenset[UUID]:
    """Jobs of several frames that did not succeed, and some frames of which have."""
    failed = [
        row["pk_job"]
        for row in rows
        if row["kind"] == "job" and (row["frames"] or 1) > 1 and row["ended_as"] != JobState.SUCCEEDED.value
    ]
    return frozenset(row["pk_job"] for row in await tx.rows(PARTIALLY_SUCCEEDED, failed)) if failed else frozenset()


def _joined_job_compensations(turns: Sequence[RunContext], rows: Sequence[Record]) -> list[JobCompensation]:
    """Jobs that are no steps, and have named the run as theirs."""
    by_run = {turn.run: turn for turn in turns}
    found = []
    for row in rows:
        if row["kind"] == "job" and row["request"] is not None:
            turn = by_run[row["pk_run"]]
            if not turn.is_step_job(row["pk_job"]):
                found.append(
                    joined_job_compensation(row["ended_as"], row["request"], turn.show, str(turn.root), row["pk_job"])
                )
    return [each for each in found if each is not None]


def _notification(turn: RunContext, step: str, text: str) -> BusMessage:
    told = {"run": str(turn.run), "step": step, "text": text}
    return BusMessage(
        subject=NOTIFY_SUBJECT, data=msgspec.json.encode(told), msg_id=f"workflow:{turn.run}:{step}:{turn.fence}"
    )
