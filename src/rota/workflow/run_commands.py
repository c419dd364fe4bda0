"""Commands on runs: start, cancel, pause, resume, rerun, roll back. Each is one transaction and audited.

With a key a run starts once: a repeated start returns the existing run, and is refused for another workflow or input.
Without a key, a retry after a lost reply starts another run. All other commands are idempotent.
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
        """Start a run as `actor`, who therefore cannot approve its jobs; its first steps are submitted."""
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
        """Start a run for each input, all or none."""
        if len(given) > MAX_BATCH:
            raise InvalidInput(f"{len(given)} runs are too many for one call: start at most {MAX_BATCH} at a time.")
        definition = await self.definitions.find(show, name, version)
        new_runs = [
            self._run_to_start(definition, values, key)
            for values, key in zip(given, keys or [""] * len(given), strict=True)
        ]
        done = AdvanceResult()
        async with self.advancer.transaction() as tx:
            contexts = await self._create_runs(tx, definition, new_runs, actor)
            fresh = [context for context in contexts if context is not None]
            if fresh:
                done = await self.advancer.advancing.advance(tx, fresh, alone=len(fresh) == 1)
            known = await self._existing_runs(
                tx, definition, [each for each, context in zip(new_runs, contexts, strict=True) if context is None]
            )
        failpoints.after_send("workflow.start")
        await self.advancer.after_commit(done)
        if done.timers:
            self.advancer.wake()
        return [
            RunStartResult(context.run, definition.version)
            if context is not None
            else RunStartResult(known[str(key)], definition.version, already=True)
            for context, (_, _, _, key) in zip(contexts, new_runs, strict=True)
        ]

    async def _create_runs(
        self,
        tx: Transaction,
        definition: WorkflowVersion,
        new_runs: Sequence[tuple[WorkflowVersion, RunId, dict[str, Any], str | None]],
        actor: str,
    ) -> list[RunContext | None]:
        try:
            return await self.advancer.advancing.create_runs(tx, new_runs, actor)
        except asyncpg.ForeignKeyViolationError:
            name = definition.flow.spec.name
            raise NotFound(
                f"Version {definition.version} of workflow {name} is no longer retained: start the latest."
            ) from None

    def _run_to_start(
        self, definition: WorkflowVersion, given: dict[str, Any], key: str
    ) -> tuple[WorkflowVersion, RunId, dict[str, Any], str | None]:
        if len(key) > KEY_CHARS_MAX or not key.isprintable():
            raise InvalidInput(f"The run key is not valid: use up to {KEY_CHARS_MAX} printable characters.")
        return definition, new_run_id(self._clock.now_ms()), definition.flow.inputs(given), key or None

    async def _existing_runs(
        self,
        tx: Transaction,
        definition: WorkflowVersion,
        repeated: Sequence[tuple[WorkflowVersion, RunId, dict[str, Any], str | None]],
    ) -> dict[str, RunId]:
        if not repeated:
            return {}
        inputs = {str(key): _pack(values) for _, _, values, key in repeated}
        found: dict[str, RunId] = {}
        for row in await tx.rows(RUNS_BY_KEY, definition.show, list(inputs)):
            key = row["key"]
            _, flow = (await self.definitions.many([row["pk_workflow"]], tx))[row["pk_workflow"]]
            if row["input"] != inputs[key] or flow.spec.name != definition.flow.spec.name:
                raise IdempotencyConflict(
                    f"The key {key!r} belongs to another run, {row['pk_run']}: use a new key, or the same workflow and"
                    " input.",
                    run=str(row["pk_run"]),
                )
            found[key] = RunId(row["pk_run"])
        return found

    async def cancel(self, run: RunId, actor: str, reason: str = "") -> bool:
        """Cancel a run: its jobs are stopped, then it ends as CANCELLED. False if it had ended."""
        return await self._apply_command(run, CancelRun(reason or f"Cancelled by {actor}."), actor, "workflow.cancel")

    async def pause(self, run: RunId, actor: str) -> bool:
        """Start no further step until it is resumed; running jobs continue."""
        return await self._apply_command(run, PauseRun(actor), actor, "workflow.pause")

    async def resume(self, run: RunId, actor: str) -> bool:
        return await self._apply_command(run, ResumeRun(), actor, "workflow.resume")

    async def _apply_command(self, run: RunId, message: InboxMessage, actor: str, action: str) -> bool:
        async with self.advancer.transaction() as tx:
            row = await tx.row(LOCK, run)
            if row is None:
                return False
            failpoints.hit("lock.after_run")
            context = RunContext.from_row(row)
            context.inbox = [message]
            done = await self.advancer.advancing.advance(tx, [context], alone=True)
            await audit.append(tx, [AuditEntry(actor, action, f"run:{run}", {"show": str(context.show)})])
        failpoints.after_send("lock.run")
        await self.advancer.after_commit(done)
        self.advancer.wake()
        return True

    async def roll_back(self, run: RunId, actor: str) -> int:
        """Roll back an ended run, or retry compensations that failed; returns their number."""
        async with self.advancer.transaction() as tx:
            row = await tx.row(LOCK_ENDED_RUN, run)
            if row is None:
                raise NotFound(f"There is no ended run {run}: cancel a live run first.")
            entries = await tx.value(RESUME_ROLLBACK, row["pk_show"], str(run), f"Asked for by {actor}.")
            if entries is None:
                raise Refused(
                    f"The run {run} has nothing to undo: it succeeded, or no job that succeeded has a compensation."
                )
            detail = {"show": str(row["pk_show"])}
            await audit.append(tx, [AuditEntry(actor, "workflow.rollback", f"run:{run}", detail)])
            self.advancer.advancing.sagas.notify_after_commit(tx, [(ShowId(row["pk_show"]), str(run))])
        self.advancer.wake()
        return int(entries)

    async def rerun(self, run: RunId, step: str, actor: str, by: str = "") -> RunStartResult:
        """Start a new run of the same version and input from a step on. It takes over the results and compensations of
        earlier steps, except steps that were undone.

        `by` is the principal of its jobs if that differs from `actor`, the name in the audit trail.
        """
        async with self.advancer.transaction() as tx:
            row = await tx.row(LOCK_ENDED_RUN, run)
            if row is None:
                raise NotFound(f"There is no ended run {run}: cancel a live run first.")
            version, flow = (await self.definitions.many([row["pk_workflow"]], tx))[row["pk_workflow"]]
            definition = WorkflowVersion(row["pk_workflow"], row["pk_show"], version, flow)
            prior = msgspec.msgpack.decode(row["steps"], type=RunStatus)
            before = await rerun.lock_compensations(tx, run, prior)
            now, reused = rerun.rerun_from(flow, prior, step, before.undone)
            new_run = new_run_id(self._clock.now_ms())
            given = msgspec.msgpack.decode(row["input"])
            [context] = await self.advancer.advancing.create_runs(tx, [(definition, new_run, given, None)], by or actor)
            assert context is not None
            await tx.run(COPY_STEP_RESULTS, new_run, run, sorted(reused), _pack(now))
            await rerun.transfer_compensations(
                tx, self.advancer.advancing.sagas, definition.show, new_run, before, reused
            )
            context.replace_status(now)
            context.inbox = [RunBegan()]
            done = await self.advancer.advancing.advance(tx, [context], alone=True)
            detail = {"show": str(context.show), "as": str(new_run)}
            await audit.append(tx, [AuditEntry(actor, "workflow.rerun", f"run:{run}", detail)])
        await self.advancer.after_commit(done)
        return RunStartResult(new_run, version)
