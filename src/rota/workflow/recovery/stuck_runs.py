"""Runs and sagas that wait for what will never come, found and mended. Nothing should: this is the net.

A run says itself what it waits for: jobs, other runs, approvals, timers, a saga. It is looked for in one snapshot of
PostgreSQL, in which whatever ends and the news of it are there together, so nothing is found that is only under way.
What is over and was not told is told again: a second telling changes nothing. What is gone has failed. A timer that is
gone is written again and never early, a run that waits for nothing looks at its steps anew.

Each is mended under the lease of whoever leads, and under the lock of the run if nobody has advanced it since: who was
paused writes nothing. If we die between looking and writing, the next pass finds the same.
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
"""Of one pass; the next goes on."""
START_ID: Final = UUID(int=0)
GONE_ERROR: Final = "It is gone, and nothing is known of its end."

log = structlog.get_logger(__name__)
REPAIRED = metrics.counter(
    "rota_workflow_mended", "Runs and sagas that waited for what would never come, by what.", labels=("what",)
)
_RUN_STATUS_DECODER = msgspec.msgpack.Decoder(RunStatus)
_unpack = msgspec.msgpack.Decoder().decode


class StuckRun(msgspec.Struct, frozen=True):
    """A run as it was seen, and what it waits for in vain."""

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
        words = {"job": self.jobs, "run": self.runs, "approval": self.approvals, "timer": self.timers}
        return [
            *(word for word, ids in words.items() if ids),
            *(["saga"] if self.undone else []),
            *(["step"] if self.nothing else []),
        ]

    def warn(self) -> None:
        for word in self.missing_kinds:
            _warn(word, run=str(self.run))


class StuckRunRepair:
    def __init__(self, leases: Leases, advancer: RunExecutor) -> None:
        self.leases = leases
        self.advancer = advancer
        self.database = advancer.database
        self._after = START_ID

    async def repair_runs(self, lease: Lease) -> int:
        """Look at the next runs, and mend those that wait in vain; how many."""
        mended = 0
        for _ in range(CHUNKS_MAX):
            suspects, self._after = await self._find_stuck(self._after)
            if suspects:
                mended += await self._repair(lease, suspects)
            if self._after == START_ID:
                break
        return mended

    async def repair_sagas(self, lease: Lease) -> int:
        """Have compensations heard of whose end nobody has; how many."""
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
        """Runs that wait in vain among the next, in one snapshot; and the last of them, or `FIRST` at the end."""
        async with self.database.transaction("repeatable read", readonly=True) as tx:
            rows = await tx.rows(RUNS, after, CHUNK)
            flows = await self.advancer.advancing.definitions.many({row["pk_workflow"] for row in rows}, tx)
            seen = [(row, waits) for row in rows if (waits := _waits(row, flows)) is not None]
            unheard = await tx.rows(
                UNDELIVERED,
                [job for _, waits in seen for job in waits.jobs],
                [run for _, waits in seen for run in waits.runs],
                [approval for _, waits in seen for approval in waits.approvals],
            )
        lost = {row["id"] for row in unheard}
        found = [_stuck_run(row, waits, lost) for row, waits in seen]
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
        told = [(each.run, each.show, job) for each in ours for job in each.jobs]
        if told:
            await tx.run(REDELIVER_JOB_ENDS, *(list(column) for column in zip(*told, strict=True)))

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
        """One that was never begun begins; the others are over."""
        sagas = [(each.show, str(each.run)) for each in undone]
        begun = await self.advancer.advancing.sagas.roll_back(tx, sagas, "Its run waits for it.")
        over = [each for each in undone if str(each.run) not in begun]
        if over:
            await _insert_inbox(tx, [(each.run, each.show, "saga", None, None, "over", None) for each in over])

    async def _recreate_timers(self, tx: Transaction, suspect: StuckRun) -> None:
        if not suspect.timers:
            return
        row = await tx.row(LOCK_ONE, suspect.run)
        assert row is not None, "it is locked"
        turn = RunContext.from_row(row)
        version, flow = (await self.advancer.advancing.definitions.many([suspect.workflow], tx))[suspect.workflow]
        rows = await tx.rows(VALUES, [suspect.run])
        values = {row["place"]: _unpack(row["value"]) for row in rows}
        facts = RunInfo(turn.run, flow.spec.name, version, turn.input)
        timers = [(place, attempt, _due_ms(flow, turn, facts, values, place)) for place, attempt in suspect.timers]
        made = [(suspect.run, place, attempt, due) for place, attempt, due in timers if due is not None]
        if made:
            await tx.run(RECREATE_TIMERS, *(list(column) for column in zip(*made, strict=True)))

    async def _reevaluate_steps(self, lease: Lease, suspect: StuckRun) -> None:
        """A run that is paused and resumed looks at all its steps."""
        async with self._fenced_transaction(lease) as tx:
            row = await tx.row(LOCK_ONE, suspect.run)
            if row is None or row["fence"] != suspect.fence:
                return
            turn = RunContext.from_row(row)
            turn.news = [PauseRun(), ResumeRun()]
            done = await self.advancer.advancing.advance(tx, [turn], alone=True)
        await self.advancer.after_commit(done)

    @asynccontextmanager
    async def _fenced_transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        async with self.advancer.transaction() as tx:
            await self.leases.guard(tx, lease)
            yield tx


InboxRow = tuple[RunId, ShowId, str, UUID | None, str | None, str | None, str | None]


async def _insert_inbox(tx: Transaction, told: Sequence[InboxRow]) -> None:
    await tx.run(INSERT_INBOX, *(list(column) for column in zip(*told, strict=True)))


def _run_end_row(suspect: StuckRun, run: UUID, row: Record | None) -> InboxRow:
    if row is None:
        return suspect.run, suspect.show, "run", run, RunState.FAILED.value, GONE_ERROR, None
    trigger = _RUN_STATUS_DECODER.decode(row["steps"]).trigger
    return suspect.run, suspect.show, "run", run, row["state"], row["error"], trigger


def _waits(row: Record, flows: Mapping[int, tuple[int, CompiledWorkflow]]) -> RunWaits | None:
    """None: its state cannot be read. Others are looked at all the same."""
    try:
        return run_waits(flows[row["pk_workflow"]][1], _RUN_STATUS_DECODER.decode(row["steps"]), RunState(row["state"]))
    except (msgspec.MsgspecError, LookupError, ValueError):
        log.exception("run_cannot_be_read", run=str(row["pk_run"]))
        return None


def _stuck_run(row: Record, waits: RunWaits, lost: Collection[UUID]) -> StuckRun:
    there = set(zip(row["places"] or (), row["attempts"] or (), strict=True))
    return StuckRun(
        run=RunId(row["pk_run"]),
        show=ShowId(row["pk_show"]),
        workflow=row["pk_workflow"],
        fence=row["fence"],
        jobs=tuple(job for job in waits.jobs if job in lost),
        runs=tuple(run for run in waits.runs if run in lost),
        approvals=tuple(each for each in waits.approvals if each in lost),
        timers=tuple(timer for timer in waits.timers if timer not in there),
        undone=row["is_undone"],
        nothing=waits.nothing,
    )


def _due_ms(flow: CompiledWorkflow, turn: RunContext, facts: RunInfo, values: dict[int, Any], place: int) -> int | None:
    """None: it cannot be told any more, and then somebody has to look."""
    try:
        return recompute_due_ms(flow, turn.now, facts, values, place, turn.now_ms)
    except ExpressionError as failed:
        log.warning("timer_cannot_be_told", run=str(turn.run), because=str(failed))
        return None


def _warn(what: str, **facts: str) -> None:
    REPAIRED.labels(what).inc()
    log.warning("waited_in_vain", what=what, **facts)
