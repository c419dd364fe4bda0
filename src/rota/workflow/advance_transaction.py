"""One transaction that advances runs: inbox and timers, decisions, next jobs, state and history.

A batch is one commit: a crash before it leaves nothing done, a crash after it leaves nothing to do. A rejected
submission rolls back the whole batch; the retry goes run by run, each behind a savepoint, so that a bad run fails alone
(`alone=True`). A run that cannot be advanced at all stops its jobs and ends as FAILED when they have ended.
"""

from __future__ import annotations

import asyncio
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

from rota.engine.completion.job_ends import END_AS
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
from rota.workflow.run_context import (
    RunContext,
    RunRow,
    contexts_from_inbox,
    for_each_results,
    inbox_without_results,
    storable_text,
    write_arguments,
)
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
INTERNAL_ERROR: Final = "An internal error of Rota stopped this run: see the server's log for the traceback."
NOTIFY_SUBJECT: Final = "sys.workflow.notify"
_pack = msgspec.msgpack.Encoder().encode

RUNS_ENDED = metrics.counter("rota_workflow_runs_ended", "Workflow runs ended, by state.", labels=("state",))
STEPS_STARTED = metrics.counter("rota_workflow_steps_started", "Jobs and child runs started by workflow steps.")
BATCH_RUNS = metrics.histogram(
    "rota_workflow_batch_runs", "Runs advanced by one transaction.", buckets=(1, 4, 16, 64, 128, 256, 512)
)


Flows = dict[int, tuple[int, CompiledWorkflow]]


class AdvanceResult(msgspec.Struct):
    """Changes of a batch, to be published after the commit."""

    turns: list[RunContext] = []
    plans: list[ValidatedSubmission] = []
    submitted: list[SubmitResult] = []
    stops: list[UUID] = []
    timers: int = 0
    first: int | None = None
    """The lowest inbox id processed."""
    asked: list[Approval] = []

    def add(self, more: AdvanceResult) -> None:
        self.turns += more.turns
        self.plans += more.plans
        self.submitted += more.submitted
        self.stops += more.stops
        self.timers += more.timers
        self.asked += more.asked

    def record_metrics(self) -> None:
        STEPS_STARTED.inc(
            sum(len(context.transition.starts) + len(context.transition.children) for context in self.turns)
        )
        for state, runs in Counter(context.state for context in self.turns if context.state.ended).items():
            RUNS_ENDED.labels(state.value).inc(runs)
        BATCH_RUNS.observe(len(self.turns))


class AdvanceTransaction:
    def __init__(self, submitter: Submitter, definitions: Definitions, sagas: Sagas) -> None:
        self.submitter = submitter
        self.definitions = definitions
        self.sagas = sagas
        self.has_news = asyncio.Event()
        """Set when a run of this process may have work."""
        self.approving = StepApprovals(definitions, self.has_news)

    async def advance_pending(
        self, tx: Transaction, most: int = BATCH, *, since: int = 0, alone: bool = False
    ) -> AdvanceResult:
        """Advance runs with inbox messages from id `since` on, or due timers."""
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

    async def advance(self, tx: Transaction, contexts: Sequence[RunContext], *, alone: bool = False) -> AdvanceResult:
        """Decide about locked runs, and write the result."""
        done = AdvanceResult()
        wave = list(contexts)
        for _ in range(RUN_DEPTH_MAX + 1):
            if not wave:
                break
            wave = await self._advance_level(tx, wave, done, alone=alone)
        done.timers = sum(len(context.transition.timers) for context in done.turns)
        await self._write(tx, done.turns)
        done.asked = await self.approving.request_and_withdraw(tx, done.turns)
        failpoints.hit("workflow.before_commit")
        return done

    async def _advance_individually(self, tx: Transaction, rows: Sequence[Record]) -> AdvanceResult:
        """Each run behind a savepoint: a run that cannot be read, decided or written does not block others."""
        done = AdvanceResult()
        for _, group in groupby(rows, itemgetter("pk_run")):
            run_rows = list(group)
            try:
                async with tx.savepoint():
                    done.add(await self.advance(tx, await self._load_contexts(tx, run_rows), alone=True))
            except Exception as error:
                if _is_transient(error):
                    raise
                log.exception("run_advance_failed", run=str(run_rows[0]["pk_run"]))
                await self._abort(tx, run_rows, done)
        return done

    async def _abort(self, tx: Transaction, rows: Sequence[Record], done: AdvanceResult) -> None:
        """Stop the jobs of a run that cannot be advanced. It ends when they have ended, whose ends abort it again."""
        context = RunContext.from_row(rows[0])
        try:
            async with tx.savepoint():
                context.inbox = inbox_without_results(rows, await _partially_succeeded(tx, rows))
                await self.sagas.record(tx, _joined_job_compensations([context], rows))
                flows = await self.definitions.many({context.workflow}, tx)
                version, flow = flows[context.workflow]
                context.abort(flow, version, INTERNAL_ERROR)
                await self._record_compensations(tx, [context], flows)
                await self._cancel_jobs_and_runs(tx, [context], done)
                await self._write(tx, [context])
                await self.approving.request_and_withdraw(tx, [context])
        except Exception as error:
            if _is_transient(error):
                raise
            log.exception("run_abort_failed", run=str(context.run))
            context.fail(INTERNAL_ERROR)
            await self._cancel_jobs_and_runs(tx, [context], done)
            await self._write(tx, [context])
        done.turns.append(context)

    async def create_runs(
        self,
        tx: Transaction,
        new_runs: Sequence[tuple[WorkflowVersion, RunId, dict[str, object], str | None]],
        actor: str,
    ) -> list[RunContext | None]:
        """Insert runs without advancing them; None where the key is taken. `actor` is the principal of their jobs."""
        return await self._insert_runs(tx, [(*each, RunParent(actor)) for each in new_runs])

    async def _load_contexts(self, tx: Transaction, rows: Sequence[Record]) -> list[RunContext]:
        layers = [row["pk_layer"] for row in rows if row["kind"] == "job" and (row["frames"] or 0) > 1]
        children = [row["pk_job"] for row in rows if row["kind"] == "run"]
        mapped = for_each_results(await tx.rows(FOR_EACH_RESULTS, layers)) if layers else {}
        partly = await _partially_succeeded(tx, rows) if layers else frozenset()
        outputs = {row["pk_run"]: row["output"] for row in await tx.rows(OUTPUTS, children)} if children else {}
        contexts = contexts_from_inbox(rows, mapped, outputs, partly)
        await self.sagas.record(tx, _joined_job_compensations(contexts, rows))
        return contexts

    async def _advance_level(
        self, tx: Transaction, contexts: list[RunContext], done: AdvanceResult, *, alone: bool
    ) -> list[RunContext]:
        """Decide about these runs; returns the child runs that they start."""
        flows = await self.definitions.many({context.workflow for context in contexts}, tx)
        await self._read_values(tx, [context for context in contexts if flows[context.workflow][1].reads])
        await self._read_show_names(tx, contexts)
        for context in contexts:
            version, flow = flows[context.workflow]
            try:
                context.decide(flow, version)
            except Exception:
                if not alone:
                    raise
                log.exception("run_advance_failed", run=str(context.run))
                context.abort(flow, version, INTERNAL_ERROR)
        children = await self._resolve_child_runs(tx, contexts, flows)
        await self._record_compensations(tx, contexts, flows)
        await self._cancel_jobs_and_runs(tx, contexts, done)
        if alone:
            for context in contexts:
                children = await self._submit_individually(tx, context, flows, done, children)
            await self._cancel_jobs_and_runs(tx, contexts, done)
        else:
            await self._submit(tx, contexts, flows, done)
        for context in contexts:
            context.assign_approval_ids(flows[context.workflow][1])
        done.turns += contexts
        await self._notify(tx, contexts, flows)
        return await self._start_child_runs(
            tx, [child_start for child_start in children if child_start.is_current], flows
        )

    async def _record_compensations(self, tx: Transaction, contexts: Sequence[RunContext], flows: Flows) -> None:
        """Record compensations of succeeded steps; failed runs with a rollback stay alive until it is done."""
        await self.sagas.record(
            tx, [_job_compensation(context, flows, undo) for context in contexts for undo in context.transition.undos]
        )
        for context in [each for each in contexts if each.wants_rollback(flows[each.workflow][1].spec)]:
            if await self.sagas.roll_back(tx, [(context.show, str(context.run))], storable_text(context.now.error)):
                context.start_compensating()

    async def _read_values(self, tx: Transaction, contexts: Sequence[RunContext]) -> None:
        by_run = {context.run: context for context in contexts if context.fence > 0}
        for row in await tx.rows(VALUES, list(by_run)) if by_run else ():
            by_run[row["pk_run"]].values[row["place"]] = msgspec.msgpack.decode(row["value"])

    async def _read_show_names(self, tx: Transaction, contexts: Sequence[RunContext]) -> None:
        """Current names of the shows; a deleted show is named by its id."""
        names = {
            row["pk_show"]: row["str_name"]
            for row in await tx.rows(SHOW_NAMES, list({context.show for context in contexts}))
        }
        for context in contexts:
            context.show_name = names.get(context.show) or str(context.show)

    async def _submit(self, tx: Transaction, contexts: Sequence[RunContext], flows: Flows, done: AdvanceResult) -> None:
        starts = [(context, start) for context in contexts for start in context.transition.starts]
        if not starts:
            return
        plans = [start.plan for _, start in starts]
        submitted = await self.submitter.write(plans, on=tx)
        for (context, start), one in zip(starts, submitted, strict=True):
            context.step_started(flows[context.workflow][1], start.place, one.job)
        done.plans += plans
        done.submitted += submitted

    async def _submit_individually(
        self, tx: Transaction, context: RunContext, flows: Flows, done: AdvanceResult, children: list[ChildRunStart]
    ) -> list[ChildRunStart]:
        """A run whose submissions are rejected continues: those steps fail with the reason. Returns the child runs."""
        for _ in range(len(context.now.steps) + 1):
            try:
                async with tx.savepoint():
                    await self._submit(tx, [context], flows, done)
            except Unavailable:
                raise
            except RotaError as rejection:
                context.refused |= {start.place: rejection.sentence for start in context.transition.starts}
                version, flow = flows[context.workflow]
                context.decide(flow, version)
                others = [child_start for child_start in children if child_start.turn is not context]
                children = [*others, *await self._resolve_child_runs(tx, [context], flows)]
                await self._record_compensations(tx, [context], flows)
            else:
                break
        return children

    async def _cancel_jobs_and_runs(self, tx: Transaction, contexts: Sequence[RunContext], done: AdvanceResult) -> None:
        """Jobs first: submitters lock queues after jobs, so this order cannot deadlock."""
        stops = sorted({job for context in contexts for job in context.transition.stops})
        for job in stops:
            await tx.row(END_AS, job, JobState.CANCELLED.value, Reason.CANCELLED.value)
        done.stops += stops
        if runs := sorted({run for context in contexts for run in context.transition.stop_runs}):
            await tx.run(CANCEL, runs)

    async def _resolve_child_runs(
        self, tx: Transaction, contexts: Sequence[RunContext], flows: Flows
    ) -> list[ChildRunStart]:
        """Find the workflows of child runs; a step whose child run cannot start fails."""
        child_starts: list[ChildRunStart] = []
        for context in contexts:
            if not context.transition.children:
                continue
            version, flow = flows[context.workflow]
            found: list[ChildRunStart] = []
            for _ in range(len(context.now.steps) + 1):
                found, errors = await self._child_run_starts(tx, context)
                if not errors:
                    break
                context.refused |= errors
                context.decide(flow, version)
            child_starts += found
        return child_starts

    async def _child_run_starts(
        self, tx: Transaction, context: RunContext
    ) -> tuple[list[ChildRunStart], dict[int, str]]:
        child_starts: list[ChildRunStart] = []
        errors: dict[int, str] = {}
        for child in context.transition.children:
            try:
                if context.depth >= RUN_DEPTH_MAX:
                    raise NotFound(
                        f"Child runs are nested {RUN_DEPTH_MAX} deep: check whether {child.workflow} starts itself."
                    )
                version = await self.definitions.find(context.show_name, child.workflow, on=tx)
                child_starts.append(ChildRunStart(context, child.place, version, version.flow.inputs(child.input)))
            except Unavailable:
                raise
            except RotaError as rejection:
                errors[child.place] = rejection.sentence
        return child_starts, errors

    async def _start_child_runs(
        self, tx: Transaction, child_starts: Sequence[ChildRunStart], flows: Flows
    ) -> list[RunContext]:
        if not child_starts:
            return []
        new_runs = []
        for child_start in child_starts:
            run = new_run_id(child_start.turn.now_ms)
            child_start.turn.step_started(flows[child_start.turn.workflow][1], child_start.place, run)
            parent = child_start.turn
            new_runs.append(
                (
                    child_start.version,
                    run,
                    child_start.input,
                    None,
                    RunParent(parent.actor, parent.run, parent.root, parent.depth),
                )
            )
        return [context for context in await self._insert_runs(tx, new_runs) if context is not None]

    async def _insert_runs(
        self,
        tx: Transaction,
        new_runs: Sequence[tuple[WorkflowVersion, RunId, dict[str, object], str | None, RunParent]],
    ) -> list[RunContext | None]:
        steps = [_pack(new_run_status(version.flow)) for version, *_ in new_runs]
        inputs = [_pack(values) for _, _, values, *_ in new_runs]
        rows = await tx.rows(
            INSERT_RUNS,
            [run for _, run, *_ in new_runs],
            [version.show for version, *_ in new_runs],
            [version.id for version, *_ in new_runs],
            steps,
            inputs,
            [key for *_, key, _ in new_runs],
            [parent.run for *_, parent in new_runs],
            [parent.root or run for _, run, *_, parent in new_runs],
            [parent.depth + 1 for *_, parent in new_runs],
            [parent.actor for *_, parent in new_runs],
        )
        contexts: list[RunContext | None] = []
        for row, (version, run, *_, parent), now, values in zip(rows, new_runs, steps, inputs, strict=True):
            stored = RunRow(
                run=run,
                show=version.show,
                workflow=version.id,
                steps=now,
                input=values,
                now_ms=row["now_ms"],
                depth=parent.depth + 1,
                root=parent.root,
                actor=parent.actor,
            )
            context = RunContext(stored)
            context.inbox = [RunBegan()]
            contexts.append(context if row["made"] else None)
        return contexts

    async def _notify(self, tx: Transaction, contexts: Sequence[RunContext], flows: Flows) -> None:
        notes = [(context, place, text) for context in contexts for place, text in context.transition.notes]
        if notes:
            await outbox.add(
                tx,
                [
                    _notification(context, flows[context.workflow][1].steps[place].id, text)
                    for context, place, text in notes
                ],
            )

    async def _write(self, tx: Transaction, contexts: Sequence[RunContext]) -> None:
        if not contexts:
            return
        try:
            await tx.rows(WRITE, *write_arguments(contexts))
        except asyncpg.PostgresError as error:
            if error.sqlstate != STALE_FENCE_SQLSTATE:
                raise
            raise StaleFence(
                "Another process advanced a run meanwhile, and nothing was written: read the run again."
            ) from error


class RunParent(msgspec.Struct, frozen=True):
    """The origin of a run: an actor, and the parent run if there is one."""

    actor: str
    run: RunId | None = None
    root: RunId | None = None
    depth: int = -1


class ChildRunStart(msgspec.Struct, frozen=True):
    """A child run that a step will start."""

    turn: RunContext
    place: int
    version: WorkflowVersion
    input: dict[str, object]

    @property
    def is_current(self) -> bool:
        """Whether the latest decision about its parent still starts it."""
        return any(child.place == self.place for child in self.turn.transition.children)


def _is_transient(error: Exception) -> bool:
    """Whether a retry may help: the server was unavailable or busy, or the transaction conflicted."""
    if isinstance(error, (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError)):
        return False
    return isinstance(error, (Unavailable, StaleFence, *FAILURES))


def new_run_id(now_ms: int) -> RunId:
    return RunId(uuid7(now_ms, secrets.token_bytes(ENTROPY_BYTES)))


def _job_compensation(context: RunContext, flows: Flows, undo: RecordCompensation) -> JobCompensation:
    """The compensation of a step; it belongs to the saga of the root run."""
    step = flows[context.workflow][1].steps[undo.place]
    by = step_compensation(step, undo)
    name = f"{step.id}" if context.depth == 0 else f"{context.run}/{step.id}"
    return JobCompensation(
        show=context.show, saga=str(context.root), job=undo.job, by=by, step=name, error=storable_text(undo.error)
    )


async def _partially_succeeded(tx: Transaction, rows: Sequence[Record]) -> frozenset[UUID]:
    """Failed jobs of several frames of which some succeeded."""
    failed = [
        row["pk_job"]
        for row in rows
        if row["kind"] == "job" and (row["frames"] or 1) > 1 and row["ended_as"] != JobState.SUCCEEDED.value
    ]
    return frozenset(row["pk_job"] for row in await tx.rows(PARTIALLY_SUCCEEDED, failed)) if failed else frozenset()


def _joined_job_compensations(contexts: Sequence[RunContext], rows: Sequence[Record]) -> list[JobCompensation]:
    """Compensations of jobs that are not steps and named the run as their `workflow_id`."""
    by_run = {context.run: context for context in contexts}
    found = []
    for row in rows:
        if row["kind"] == "job" and row["request"] is not None:
            context = by_run[row["pk_run"]]
            if not context.is_step_job(row["pk_job"]):
                found.append(
                    joined_job_compensation(
                        row["ended_as"], row["request"], context.show, str(context.root), row["pk_job"]
                    )
                )
    return [each for each in found if each is not None]


def _notification(context: RunContext, step: str, text: str) -> BusMessage:
    fields = {"run": str(context.run), "step": step, "text": text}
    return BusMessage(
        subject=NOTIFY_SUBJECT,
        data=msgspec.json.encode(fields),
        msg_id=f"workflow:{context.run}:{step}:{context.fence}",
    )
