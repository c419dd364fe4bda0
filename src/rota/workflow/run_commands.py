"""What people ask of runs: start, cancel, pause, resume, rerun, rollback. Each is one transaction and audited.

A run that is started under a key is started once: asking again finds it, with another workflow or input it is refused.
Starting without one may be repeated after a lost reply, and then starts another. The others may always be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import asyncpg
import msgspec

from rota.api.workflows import RunStartResult
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Transaction, query
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, Refused
from rota.model.ids import RunId, ShowId
from rota.model.workflows.run_state import CancelRun, InboxMessage, PauseRun, ResumeRun, RunBegan, RunStatus
from rota.model.workflows.spec import WorkflowSpec
from rota.workflow import rerun
from rota.workflow.advance_transaction import AdvanceResult, new_run_id
from rota.workflow.definitions import Definitions, WorkflowVersion
from rota.workflow.executor import RunExecutor
from rota.workflow.run_context import RunContext

LOCK = query(__package__, "lock")
RUNS_BY_KEY = query(__package__, "keyed")
LOCK_ENDED_RUN = query(__package__, "ended")
COPY_STEP_RESULTS = query(__package__, "copy")
RESUME_ROLLBACK = query(__package__, "saga_resume")

MAX_BATCH: Final = 500
KEY_CHARS_MAX: Final = 200
_pack = msgspec.msgpack.Encoder().encode


class RunCommands:
    def __init__(self, advancer: RunExecutor, clock: Clock | None = None) -> None:
        self.advancer = advancer
        self.database = advancer.database
        self._clock = clock or SystemClock()

    @property
    def definitions(self) -> Definitions:
        return self.advancer.advancing.definitions

    async def declare(self, spec: WorkflowSpec, actor: str) -> WorkflowVersion:
        return await self.definitions.declare(spec, actor)

    async def start(
        self, show: str, name: str, given: dict[str, Any] | None = None, *, actor: str, version: int = 0, key: str = ""
    ) -> RunStartResult:
        """A run of a workflow, its first steps submitted, by `actor`, who therefore approves none of its jobs."""
        [started] = await self.start_many(show, name, [given or {}], actor=actor, version=version, keys=[key])
        return started

    async def start_many(
        self,
        show: str,
        name: str,
        given: Sequence[dict[str, Any]],
        *,
        actor: str,
        version: int = 0,
        keys: Sequence[str] | None = None,
    ) -> list[RunStartResult]:
        """A run for each input, all of them or none."""
        if len(given) > MAX_BATCH:
            raise InvalidInput(f"{len(given)} runs are too many for one call: start {MAX_BATCH} at a time.")
        of = await self.definitions.find(show, name, version)
        wanted = [
            self._run_to_start(of, values, key) for values, key in zip(given, keys or [""] * len(given), strict=True)
        ]
        done = AdvanceResult()
        async with self.advancer.transaction() as tx:
            turns = await self._create_runs(tx, of, wanted, actor)
            fresh = [turn for turn in turns if turn is not None]
            if fresh:
                done = await self.advancer.advancing.advance(tx, fresh, alone=len(fresh) == 1)
            known = await self._existing_runs(
                tx, of, [each for each, turn in zip(wanted, turns, strict=True) if turn is None]
            )
        failpoints.after_send("workflow.start")
        await self.advancer.after_commit(done)
        if done.timers:
            self.advancer.wake()
        return [
            RunStartResult(turn.run, of.version)
            if turn is not None
            else RunStartResult(known[str(key)], of.version, already=True)
            for turn, (_, _, _, key) in zip(turns, wanted, strict=True)
        ]

    async def _create_runs(
        self,
        tx: Transaction,
        of: WorkflowVersion,
        wanted: Sequence[tuple[WorkflowVersion, RunId, dict[str, Any], str | None]],
        actor: str,
    ) -> list[RunContext | None]:
        try:
            return await self.advancer.advancing.create_runs(tx, wanted, actor)
        except asyncpg.ForeignKeyViolationError:
            name = of.flow.spec.name
            raise NotFound(f"Version {of.version} of workflow {name} is not kept any more: start the latest.") from None

    def _run_to_start(
        self, of: WorkflowVersion, given: dict[str, Any], key: str
    ) -> tuple[WorkflowVersion, RunId, dict[str, Any], str | None]:
        if len(key) > KEY_CHARS_MAX or not key.isprintable():
            raise InvalidInput(f"A key of {len(key)} characters cannot name a run: use up to {KEY_CHARS_MAX}.")
        return of, new_run_id(self._clock.now_ms()), of.flow.inputs(given), key or None

    async def _existing_runs(
        self,
        tx: Transaction,
        of: WorkflowVersion,
        asked: Sequence[tuple[WorkflowVersion, RunId, dict[str, Any], str | None]],
    ) -> dict[str, RunId]:
        if not asked:
            return {}
        inputs = {str(key): _pack(values) for _, _, values, key in asked}
        found: dict[str, RunId] = {}
        for row in await tx.rows(RUNS_BY_KEY, of.show, list(inputs)):
            key = row["key"]
            _, flow = (await self.definitions.many([row["pk_workflow"]], tx))[row["pk_workflow"]]
            if row["input"] != inputs[key] or flow.spec.name != of.flow.spec.name:
                raise IdempotencyConflict(
                    f"The key {key!r} was used for another run, {row['pk_run']}: use a new key, or ask for the same.",
                    run=str(row["pk_run"]),
                )
            found[key] = RunId(row["pk_run"])
        return found

    async def cancel(self, run: RunId, actor: str, reason: str = "") -> bool:
        """Whether it had not ended: what it runs is stopped, and then it ends as CANCELLED."""
        return await self._apply_command(run, CancelRun(reason or f"Cancelled by {actor}."), actor, "workflow.cancel")

    async def pause(self, run: RunId, actor: str) -> bool:
        """No step begins until it is resumed; what runs goes on."""
        return await self._apply_command(run, PauseRun(actor), actor, "workflow.pause")

    async def resume(self, run: RunId, actor: str) -> bool:
        return await self._apply_command(run, ResumeRun(), actor, "workflow.resume")

    async def _apply_command(self, run: RunId, news: InboxMessage, actor: str, action: str) -> bool:
        async with self.advancer.transaction() as tx:
            row = await tx.row(LOCK, run)
            if row is None:
                return False
            failpoints.hit("lock.after_run")
            turn = RunContext.from_row(row)
            turn.news = [news]
            done = await self.advancer.advancing.advance(tx, [turn], alone=True)
            await audit.append(tx, [AuditEntry(actor, action, f"run:{run}", {"show": str(turn.show)})])
        failpoints.after_send("lock.run")
        await self.advancer.after_commit(done)
        self.advancer.wake()
        return True

    async def roll_back(self, run: RunId, actor: str) -> int:
        """Undo what a run that has ended did, or go on with what was not undone; how much that is."""
        async with self.advancer.transaction() as tx:
            row = await tx.row(LOCK_ENDED_RUN, run)
            if row is None:
                raise NotFound(f"There is no run {run} that has ended: one that runs is cancelled first.")
            entries = await tx.value(RESUME_ROLLBACK, row["pk_show"], str(run), f"Asked for by {actor}.")
            if entries is None:
                raise Refused(
                    f"The run {run} has nothing to undo: it succeeded, or no job that did has a compensation."
                )
            detail = {"show": str(row["pk_show"])}
            await audit.append(tx, [AuditEntry(actor, "workflow.rollback", f"run:{run}", detail)])
            self.advancer.advancing.sagas.notify_after_commit(tx, [(ShowId(row["pk_show"]), str(run))])
        self.advancer.wake()
        return int(entries)

    async def rerun(self, run: RunId, step: str, actor: str, by: str = "") -> RunStartResult:
        """A new run of the same version and input, from a step on: what comes before it is taken over as it ended,
        with what undoes it, but for what was undone.

        Its jobs are submitted by `by`, if that is another name of `actor` than the one for the audit trail.
        """
        async with self.advancer.transaction() as tx:
            row = await tx.row(LOCK_ENDED_RUN, run)
            if row is None:
                raise NotFound(f"There is no run {run} that has ended: one that runs is cancelled first.")
            version, flow = (await self.definitions.many([row["pk_workflow"]], tx))[row["pk_workflow"]]
            of = WorkflowVersion(row["pk_workflow"], row["pk_show"], version, flow)
            then = msgspec.msgpack.decode(row["steps"], type=RunStatus)
            before = await rerun.lock_compensations(tx, run, then)
            now, kept = rerun.rerun_from(flow, then, step, before.undone)
            again = new_run_id(self._clock.now_ms())
            given = msgspec.msgpack.decode(row["input"])
            [turn] = await self.advancer.advancing.create_runs(tx, [(of, again, given, None)], by or actor)
            assert turn is not None
            await tx.run(COPY_STEP_RESULTS, again, run, sorted(kept), _pack(now))
            await rerun.transfer_compensations(tx, self.advancer.advancing.sagas, of.show, again, before, kept)
            turn.replace_status(now)
            turn.news = [RunBegan()]
            done = await self.advancer.advancing.advance(tx, [turn], alone=True)
            detail = {"show": str(turn.show), "as": str(again)}
            await audit.append(tx, [AuditEntry(actor, "workflow.rerun", f"run:{run}", detail)])
        await self.advancer.after_commit(done)
        return RunStartResult(again, version)
