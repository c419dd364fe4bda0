"""Repairs stuck runs and sagas (lost wake-ups). Should find nothing; it is a safety net.

The state of a run says what it waits for: jobs, child runs, approvals, timers, a saga. All of it is checked in one
snapshot of PostgreSQL, in which an end and its inbox message are visible together, so work in progress is not reported.
Ends without an inbox message are delivered again: a duplicate changes nothing. A missing job, run or approval counts as
failed. A missing timer is recreated, never early; a run that waits for nothing re-evaluates its steps.

Each repair happens under the leader's fence, and under the lock of the run if it has not advanced since: a paused
leader writes nothing. After a crash between check and write, the next pass finds the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.lease import Lease, Leases
from rota.infra.postgres import Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.approvals import ApprovalState
from rota.model.errors import NotFound
from rota.model.ids import RunId, ShowId
from rota.model.workflows.compiler import CompiledWorkflow
from rota.model.workflows.expressions import ExpressionError
from rota.model.workflows.run_state import PauseRun, ResumeRun, RunInfo, RunState, RunStatus
from rota.model.workflows.state_machine import recompute_due_ms
from rota.model.workflows.waits import RunWaits, run_waits
from rota.workflow.executor import RunExecutor
from rota.workflow.run_context import RunContext

RUNS = query(__package__, "mend_runs")
UNDELIVERED = query(__package__, "mend_unheard")
LOCK_UNCHANGED = query(__package__, "mend_lock")
LOCK_ONE = query("rota.workflow", "lock")
REDELIVER_JOB_ENDS = query(__package__, "mend_jobs")
ENDED_RUNS = query(__package__, "mend_ended")
INSERT_INBOX = query(__package__, "mend_told")
RECREATE_TIMERS = query(__package__, "mend_timers")
REDELIVER_COMPENSATIONS = query(__package__, "mend_undos")
VALUES = query("rota.workflow", "values")

CHUNK: Final = 500
CHUNKS_MAX: Final = 20
"""Per pass; the next pass goes on."""
START_ID: Final = UUID(int=0)
GONE_ERROR: Final = "It no longer exists, and its outcome is unknown."

log = structlog.get_logger(__name__)
REPAIRED = metrics.counter(
    "rota_workflow_mended", "Stuck runs and sagas that were repaired, by what they waited for.", labels=("what",)
)
_RUN_STATUS_DECODER = msgspec.msgpack.Decoder(RunStatus)
_unpack = msgspec.msgpack.Decoder().decode


class StuckRun(msgspec.Struct, frozen=True):
    """A run as read, and the lost events that it waits for."""

    run: RunId
    show: ShowId
    workflow: int
    fence: int
    jobs: tuple[UUID, ...] = ()
    runs: tuple[UUID, ...] = ()
    approvals: tuple[UUID, ...] = ()
    timers: tuple[tuple[int, int], ...] = ()
    undone: bool = False
    nothing: bool = False

    @property
    def is_stuck(self) -> bool:
        return bool(self.missing_kinds)

    @property
    def missing_kinds(self) -> list[str]:
        lost_events = {"job": self.jobs, "run": self.runs, "approval": self.approvals, "timer": self.timers}
        return [
            *(kind for kind, ids in lost_events.items() if ids),
            *(["saga"] if self.undone else []),
            *(["step"] if self.nothing else []),
        ]

    def warn(self) -> None:
        for kind in self.missing_kinds:
            _warn(kind, run=str(self.run))


class StuckRunRepair:
    def __init__(self, leases: Leases, advancer: RunExecutor) -> None:
        self.leases = leases
        self.advancer = advancer
        self.database = advancer.database
        self._after = START_ID

    async def repair_runs(self, lease: Lease) -> int:
        """Check the next runs, and repair stuck ones; returns how many."""
        repaired = 0
        for _ in range(CHUNKS_MAX):
            suspects, self._after = await self._find_stuck(self._after)
            if suspects:
                repaired += await self._repair(lease, suspects)
            if self._after == START_ID:
                break
        return repaired

    async def repair_sagas(self, lease: Lease) -> int:
        """Deliver ends of compensations again that were lost; returns how many."""
        async with self._fenced_transaction(lease) as tx:
            rows = await tx.rows(REDELIVER_COMPENSATIONS, CHUNK)
            self.advancer.advancing.sagas.notify_after_commit(
                tx, ((ShowId(row["pk_show"]), row["workflow_id"]) for row in rows)
            )
        failpoints.after_send("saga.mend")
        for row in rows:
            _warn("compensation", saga=row["workflow_id"], job=str(row["pk_undo"]))
        return len(rows)

    async def _find_stuck(self, after: UUID) -> tuple[list[StuckRun], UUID]:
        """Stuck runs among the next, from one snapshot; and the last run, or `START_ID` at the end."""
        async with self.database.transaction("repeatable read", readonly=True) as tx:
            rows = await tx.rows(RUNS, after, CHUNK)
            flows = await self.advancer.advancing.definitions.many({row["pk_workflow"] for row in rows}, tx)
            checked = [(row, waits) for row in rows if (waits := _waits(row, flows)) is not None]
            undelivered = await tx.rows(
                UNDELIVERED,
                [job for _, waits in checked for job in waits.jobs],
                [run for _, waits in checked for run in waits.runs],
                [approval for _, waits in checked for approval in waits.approvals],
            )
        lost = {row["id"] for row in undelivered}
        found = [_stuck_run(row, waits, lost) for row, waits in checked]
        return [each for each in found if each.is_stuck], rows[-1]["pk_run"] if len(rows) == CHUNK else START_ID

    async def _repair(self, lease: Lease, suspects: Sequence[StuckRun]) -> int:
        async with self._fenced_transaction(lease) as tx:
            rows = await tx.rows(LOCK_UNCHANGED, [each.run for each in suspects], [each.fence for each in suspects])
            locked = {row["pk_run"] for row in rows}
            ours = [each for each in suspects if each.run in locked]
            failpoints.hit("lock.before_mend")
            await self._redeliver_job_ends(tx, ours)
            await self._redeliver_run_ends(tx, ours)
            await self._redeliver_decisions(tx, ours)
            await self._redeliver_saga_ends(tx, [each for each in ours if each.undone])
            for each in ours:
                await self._recreate_timers(tx, each)
        failpoints.after_send("lock.mend")
        for each in ours:
            each.warn()
            if each.nothing:
                await self._reevaluate_steps(lease, each)
        self.advancer.wake()
        return len(ours)

    async def _redeliver_job_ends(self, tx: Transaction, ours: Sequence[StuckRun]) -> None:
        messages = [(each.run, each.show, job) for each in ours for job in each.jobs]
        if messages:
            await tx.run(REDELIVER_JOB_ENDS, *(list(column) for column in zip(*messages, strict=True)))

    async def _redeliver_run_ends(self, tx: Transaction, ours: Sequence[StuckRun]) -> None:
        children = [(each, run) for each in ours for run in each.runs]
        if not children:
            return
        ended = {row["pk_run"]: row for row in await tx.rows(ENDED_RUNS, [run for _, run in children])}
        await _insert_inbox(tx, [_run_end_row(each, run, ended.get(run)) for each, run in children])

    async def _redeliver_decisions(self, tx: Transaction, ours: Sequence[StuckRun]) -> None:
        approving = self.advancer.advancing.approving
        for each, number in [(suspect, approval) for suspect in ours for approval in suspect.approvals]:
            try:
                approval = await approving.approvals.get(number, on=tx)
            except NotFound:
                await _insert_inbox(
                    tx, [(each.run, each.show, "approval", number, ApprovalState.EXPIRED.value, GONE_ERROR, None)]
                )
            else:
                await approving.apply_decision(tx, approval, approval.state, "")

    async def _redeliver_saga_ends(self, tx: Transaction, undone: Sequence[StuckRun]) -> None:
        """Start rollbacks that were never started; the other sagas have ended."""
        sagas = [(each.show, str(each.run)) for each in undone]
        begun = await self.advancer.advancing.sagas.roll_back(tx, sagas, "Its run waits for it.")
        ended = [each for each in undone if str(each.run) not in begun]
        if ended:
            await _insert_inbox(tx, [(each.run, each.show, "saga", None, None, "over", None) for each in ended])

    async def _recreate_timers(self, tx: Transaction, suspect: StuckRun) -> None:
        if not suspect.timers:
            return
        row = await tx.row(LOCK_ONE, suspect.run)
        assert row is not None, "the run is locked"
        context = RunContext.from_row(row)
        version, flow = (await self.advancer.advancing.definitions.many([suspect.workflow], tx))[suspect.workflow]
        rows = await tx.rows(VALUES, [suspect.run])
        values = {row["place"]: _unpack(row["value"]) for row in rows}
        facts = RunInfo(context.run, flow.spec.name, version, context.input)
        timers = [(place, attempt, _due_ms(flow, context, facts, values, place)) for place, attempt in suspect.timers]
        made = [(suspect.run, place, attempt, due) for place, attempt, due in timers if due is not None]
        if made:
            await tx.run(RECREATE_TIMERS, *(list(column) for column in zip(*made, strict=True)))

    async def _reevaluate_steps(self, lease: Lease, suspect: StuckRun) -> None:
        """Pause and resume make a run evaluate all its steps."""
        async with self._fenced_transaction(lease) as tx:
            row = await tx.row(LOCK_ONE, suspect.run)
            if row is None or row["fence"] != suspect.fence:
                return
            context = RunContext.from_row(row)
            context.inbox = [PauseRun(), ResumeRun()]
            done = await self.advancer.advancing.advance(tx, [context], alone=True)
        await self.advancer.after_commit(done)

    @asynccontextmanager
    async def _fenced_transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        async with self.advancer.transaction() as tx:
            await self.leases.guard(tx, lease)
            yield tx


InboxRow = tuple[RunId, ShowId, str, UUID | None, str | None, str | None, str | None]


async def _insert_inbox(tx: Transaction, messages: Sequence[InboxRow]) -> None:
    await tx.run(INSERT_INBOX, *(list(column) for column in zip(*messages, strict=True)))


def _run_end_row(suspect: StuckRun, run: UUID, row: Record | None) -> InboxRow:
    if row is None:
        return suspect.run, suspect.show, "run", run, RunState.FAILED.value, GONE_ERROR, None
    trigger = _RUN_STATUS_DECODER.decode(row["steps"]).trigger
    return suspect.run, suspect.show, "run", run, row["state"], row["error"], trigger


def _waits(row: Record, flows: Mapping[int, tuple[int, CompiledWorkflow]]) -> RunWaits | None:
    """None: the state cannot be decoded. Other runs are checked all the same."""
    try:
        return run_waits(flows[row["pk_workflow"]][1], _RUN_STATUS_DECODER.decode(row["steps"]), RunState(row["state"]))
    except (msgspec.MsgspecError, LookupError, ValueError):
        log.exception("run_state_unreadable", run=str(row["pk_run"]))
        return None


def _stuck_run(row: Record, waits: RunWaits, lost: Collection[UUID]) -> StuckRun:
    existing = set(zip(row["places"] or (), row["attempts"] or (), strict=True))
    return StuckRun(
        run=RunId(row["pk_run"]),
        show=ShowId(row["pk_show"]),
        workflow=row["pk_workflow"],
        fence=row["fence"],
        jobs=tuple(job for job in waits.jobs if job in lost),
        runs=tuple(run for run in waits.runs if run in lost),
        approvals=tuple(each for each in waits.approvals if each in lost),
        timers=tuple(timer for timer in waits.timers if timer not in existing),
        undone=row["is_undone"],
        nothing=waits.nothing,
    )


def _due_ms(
    flow: CompiledWorkflow, context: RunContext, facts: RunInfo, values: dict[int, Any], place: int
) -> int | None:
    """None: the due time cannot be computed; a person must look at the run."""
    try:
        return recompute_due_ms(flow, context.now, facts, values, place, context.now_ms)
    except ExpressionError as failed:
        log.warning("timer_due_time_unknown", run=str(context.run), because=str(failed))
        return None


def _warn(what: str, **facts: str) -> None:
    REPAIRED.labels(what).inc()
    log.warning("stuck_run_repaired", what=what, **facts)
