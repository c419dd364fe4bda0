"""What people ask of runs: start, cancel, pause, resume, rerun, rollback. Each is one transaction and audited.

A run that is started under a key is started once: asking again finds it, with another workflow or input it is refused.
Starting without one may be repeated after a lost reply, and then starts another. The others may always be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import asyncpg
import msgspec

from rota.infra import audit, faults
from rota.infra.audit import AuditEntry
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Transaction, query
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, Refused
from rota.model.ids import RunId, ShowId
from rota.model.workflow import WorkflowSpec
from rota.model.workflow_run import Began, Cancel, News, Pause, Resume, RunNow
from rota.model.workflow_views import Started
from rota.workflow import rerunning
from rota.workflow.advancer import Advancer
from rota.workflow.advancing import Done, new_run
from rota.workflow.definitions import Definitions, Version
from rota.workflow.turns import Turn

LOCK = query(__package__, "lock")
KEYED = query(__package__, "keyed")
ENDED = query(__package__, "ended")
COPY = query(__package__, "copy")
RESUME = query(__package__, "saga_resume")

MOST: Final = 500
KEY_CHARS_MAX: Final = 200
_pack = msgspec.msgpack.Encoder().encode


class Desk:
    def __init__(self, advancer: Advancer, clock: Clock | None = None) -> None:
        self.advancer = advancer
        self.database = advancer.database
        self._clock = clock or SystemClock()

    @property
    def definitions(self) -> Definitions:
        return self.advancer.advancing.definitions

    async def declare(self, spec: WorkflowSpec, actor: str) -> Version:
        return await self.definitions.declare(spec, actor)

    async def start(
        self, show: str, name: str, given: dict[str, Any] | None = None, *, actor: str, version: int = 0, key: str = ""
    ) -> Started:
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
    ) -> list[Started]:
        """A run for each input, all of them or none."""
        if len(given) > MOST:
            raise InvalidInput(f"{len(given)} runs are too many for one call: start {MOST} at a time.")
        of = await self.definitions.find(show, name, version)
        wanted = [self._wanted(of, values, key) for values, key in zip(given, keys or [""] * len(given), strict=True)]
        done = Done()
        async with self.advancer.transaction() as tx:
            turns = await self._begun(tx, of, wanted, actor)
            fresh = [turn for turn in turns if turn is not None]
            if fresh:
                done = await self.advancer.advancing.advance(tx, fresh, alone=len(fresh) == 1)
            known = await self._known(tx, of, [each for each, turn in zip(wanted, turns, strict=True) if turn is None])
        faults.reply("workflow.start")
        await self.advancer.after(done)
        if done.timers:
            self.advancer.wake()
        return [
            Started(turn.run, of.version) if turn is not None else Started(known[str(key)], of.version, already=True)
            for turn, (_, _, _, key) in zip(turns, wanted, strict=True)
        ]

    async def _begun(
        self,
        tx: Transaction,
        of: Version,
        wanted: Sequence[tuple[Version, RunId, dict[str, Any], str | None]],
        actor: str,
    ) -> list[Turn | None]:
        try:
            return await self.advancer.advancing.begun(tx, wanted, actor)
        except asyncpg.ForeignKeyViolationError:
            name = of.flow.spec.name
            raise NotFound(f"Version {of.version} of workflow {name} is not kept any more: start the latest.") from None

    def _wanted(
        self, of: Version, given: dict[str, Any], key: str
    ) -> tuple[Version, RunId, dict[str, Any], str | None]:
        if len(key) > KEY_CHARS_MAX or not key.isprintable():
            raise InvalidInput(f"A key of {len(key)} characters cannot name a run: use up to {KEY_CHARS_MAX}.")
        return of, new_run(self._clock.now_ms()), of.flow.inputs(given), key or None

    async def _known(
        self, tx: Transaction, of: Version, asked: Sequence[tuple[Version, RunId, dict[str, Any], str | None]]
    ) -> dict[str, RunId]:
        if not asked:
            return {}
        inputs = {str(key): _pack(values) for _, _, values, key in asked}
        found: dict[str, RunId] = {}
        for row in await tx.rows(KEYED, of.show, list(inputs)):
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
        return await self._tell(run, Cancel(reason or f"Cancelled by {actor}."), actor, "workflow.cancel")

    async def pause(self, run: RunId, actor: str) -> bool:
        """No step begins until it is resumed; what runs goes on."""
        return await self._tell(run, Pause(actor), actor, "workflow.pause")

    async def resume(self, run: RunId, actor: str) -> bool:
        return await self._tell(run, Resume(), actor, "workflow.resume")

    async def _tell(self, run: RunId, news: News, actor: str, action: str) -> bool:
        async with self.advancer.transaction() as tx:
            row = await tx.row(LOCK, run)
            if row is None:
                return False
            faults.at("lock.after_run")
            turn = Turn.of(row)
            turn.news = [news]
            done = await self.advancer.advancing.advance(tx, [turn], alone=True)
            await audit.append(tx, [AuditEntry(actor, action, f"run:{run}", {"show": str(turn.show)})])
        faults.reply("lock.run")
        await self.advancer.after(done)
        self.advancer.wake()
        return True

    async def roll_back(self, run: RunId, actor: str) -> int:
        """Undo what a run that has ended did, or go on with what was not undone; how much that is."""
        async with self.advancer.transaction() as tx:
            row = await tx.row(ENDED, run)
            if row is None:
                raise NotFound(f"There is no run {run} that has ended: one that runs is cancelled first.")
            entries = await tx.value(RESUME, row["pk_show"], str(run), f"Asked for by {actor}.")
            if entries is None:
                raise Refused(
                    f"The run {run} has nothing to undo: it succeeded, or no job that did has a compensation."
                )
            detail = {"show": str(row["pk_show"])}
            await audit.append(tx, [AuditEntry(actor, "workflow.rollback", f"run:{run}", detail)])
            self.advancer.advancing.sagas.tell(tx, [(ShowId(row["pk_show"]), str(run))])
        self.advancer.wake()
        return int(entries)

    async def rerun(self, run: RunId, step: str, actor: str, by: str = "") -> Started:
        """A new run of the same version and input, from a step on: what comes before it is taken over as it ended,
        with what undoes it, but for what was undone.

        Its jobs are submitted by `by`, if that is another name of `actor` than the one for the audit trail.
        """
        async with self.advancer.transaction() as tx:
            row = await tx.row(ENDED, run)
            if row is None:
                raise NotFound(f"There is no run {run} that has ended: one that runs is cancelled first.")
            version, flow = (await self.definitions.many([row["pk_workflow"]], tx))[row["pk_workflow"]]
            of = Version(row["pk_workflow"], row["pk_show"], version, flow)
            then = msgspec.msgpack.decode(row["steps"], type=RunNow)
            before = await rerunning.look(tx, run, then)
            now, kept = rerunning.rerun_from(flow, then, step, before.undone)
            again = new_run(self._clock.now_ms())
            given = msgspec.msgpack.decode(row["input"])
            [turn] = await self.advancer.advancing.begun(tx, [(of, again, given, None)], by or actor)
            assert turn is not None
            await tx.run(COPY, again, run, sorted(kept), _pack(now))
            await rerunning.take_over(tx, self.advancer.advancing.sagas, of.show, again, before, kept)
            turn.goes_on_from(now)
            turn.news = [Began()]
            done = await self.advancer.advancing.advance(tx, [turn], alone=True)
            detail = {"show": str(turn.show), "as": str(again)}
            await audit.append(tx, [AuditEntry(actor, "workflow.rerun", f"run:{run}", detail)])
        await self.advancer.after(done)
        return Started(again, version)
