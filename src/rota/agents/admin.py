"""Administration of agents: list, pause, resume, trigger, backfill, remove.

Every change is one transaction with its audit entry, on the locked row; after it Redis is updated and the schedulers
are woken. If the process dies in between, or Redis is unavailable, the next repopulation repairs it: a trigger or
resume takes effect within `refresh-period-seconds`, and a paused agent that is still in `waiting` is refused when it
comes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis

from rota.agents.recovery.zombies_and_orphans import TAKEOVER_GRACE_S
from rota.agents.redis_index.index import AgentIndex
from rota.agents.repository import MEMBER_LEASE_PREFIX, AgentRepository
from rota.api.agents import HISTORY_MAX, AgentRunView, AgentView, Backfill
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.clock import SystemClock
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.redis import RedisKeys, RedisServerTime
from rota.model.agents import AgentSpec, NextRun, plan_run_after_resume
from rota.model.errors import InvalidInput, NotFound, RedisUnavailable, Refused
from rota.model.schedules import slots_between
from rota.model.settings.agents import AgentKeySettings

LIST = query(__package__, "list")
HISTORY = query(__package__, "history")
BACKFILL = query(__package__, "backfill")
LOCK = query(__package__, "lock")
CHANGE = query(__package__, "change")
REMOVE = query(__package__, "remove")
WAKE = query(__package__, "wake")

BACKFILL_MAX: Final = 1000
"""Runs per backfill, counted before it begins."""
log = structlog.get_logger(__name__)
_SPEC_DECODER = msgspec.json.Decoder(AgentSpec)


class _LockedAgent(msgspec.Struct, frozen=True):
    spec: AgentSpec
    paused: bool
    queued: bool
    plan: NextRun
    replica: str | None
    backfilling: bool


class AgentAdmin:
    def __init__(self, database: Database, redis: Redis, keys: AgentKeySettings, actor: str) -> None:
        self.database = database
        self.redis = redis
        self.actor = actor
        self._names = keys
        self._keys = RedisKeys(keys.prefix, keys.hash_tag)
        self._time = RedisServerTime(redis, SystemClock())

    async def list(
        self, names: Sequence[str] | None = None, *, after: str = "", most: int | None = None
    ) -> list[AgentView]:
        """By name: these or all, after `after`, at most `most`."""
        return [_view(row) for row in await self.database.rows(LIST, names, after, most)]

    async def show(self, name: str) -> AgentView:
        found = await self.list([name])
        if not found:
            raise _agent_not_found(name)
        return found[0]

    async def history(self, name: str, most: int = HISTORY_MAX) -> Sequence[AgentRunView]:
        """Latest first."""
        await self.show(name)
        return [
            AgentRunView(
                run=row["run"],
                replica=row["replica"],
                outcome=row["outcome"],
                failure=row["failure"],
                error=row["error"],
                took_ms=row["took_ms"],
                backfill=row["backfill"],
                slot=row["ts_slot"],
                due=row["ts_due"],
                started=row["ts_started"],
            )
            for row in await self.database.rows(HISTORY, name, most)
        ]

    async def members(self) -> Sequence[str]:
        """Replicas that run agents now."""
        names = await AgentRepository(self.database, self.actor).members()
        return sorted({name.removeprefix(MEMBER_LEASE_PREFIX).partition(":")[2].rpartition(":")[0] for name in names})

    async def pause(self, name: str) -> bool:
        """Begin no further run; a current run completes. False: already paused."""
        async with self.database.transaction() as tx:
            found = await _lock_agent(tx, name)
            if found.paused:
                return False
            await self._change(tx, name, found.plan, action="pause", paused=True)
        failpoints.hit("agents.after_change")
        await self._update_redis(found.spec, None)
        return True

    async def resume(self, name: str) -> bool:
        """Run again; missed runs are handled by the agent's own catch-up policy. False: not paused."""
        now_ms = await self._time.now_ms()
        async with self.database.transaction() as tx:
            found = await _lock_agent(tx, name)
            if not found.paused:
                return False
            plan = plan_run_after_resume(found.spec, found.plan, now_ms)
            next_ms = await self._change(tx, name, plan, action="resume")
        await self._update_redis(found.spec, next_ms if found.replica is None else None, waits=True)
        return True

    async def trigger(self, name: str) -> bool:
        """Run now. True: due now; False: it is running, and runs once more afterwards."""
        now_ms = await self._time.now_ms()
        async with self.database.transaction() as tx:
            found = await _lock_agent(tx, name)
            _check_can_trigger(name, found)
            if found.replica is not None:
                await self._change(tx, name, found.plan, action="trigger", queued=True)
                return False
            due_ms = now_ms if found.plan.due_ms is None else min(now_ms, found.plan.due_ms)
            # A separate slot: the scheduled one is still to come.
            next_ms = await self._change(tx, name, NextRun(due_ms, now_ms), action="trigger")
        await self._update_redis(found.spec, next_ms, waits=True)
        return True

    async def backfill(self, name: str, since: datetime, until: datetime) -> Backfill:
        """Run for the slots in [`since`, `until`), one at a time, whenever the schedule leaves the agent idle."""
        now_ms = await self._time.now_ms()
        async with self.database.transaction() as tx:
            found = await _lock_agent(tx, name)
            if found.backfilling:
                raise Refused(f"Agent {name!r} already has a backfill: wait for its end, or stop it first.", agent=name)
            slots = _past_slots(found.spec, since, until, now_ms)
            backfill = Backfill(runs=len(slots), first=_utc_datetime(slots[0]), last=_utc_datetime(slots[-1]))
            next_ms = await tx.value(BACKFILL, name, now_ms, slots[0], slots[-1])
            await audit.append(tx, [AuditEntry(self.actor, "agent.backfill", f"agent:{name}", _audit_detail(backfill))])
        await self._update_redis(
            found.spec, next_ms if found.replica is None and not found.paused else None, waits=True
        )
        return backfill

    async def stop_backfill(self, name: str) -> bool:
        """Begin no more backfill runs; a current one completes. False: there was none."""
        async with self.database.transaction() as tx:
            found = await _lock_agent(tx, name)
            if not found.backfilling:
                return False
            await tx.run(BACKFILL, name, None, None, None)
            await audit.append(tx, [AuditEntry(self.actor, "agent.backfill_stop", f"agent:{name}", {})])
        # Redis may have too early a due time, which `begin` corrects.
        return True

    async def remove(self, name: str) -> None:
        """Delete it unless it is running. A replica that still declares it declares it again at its next start."""
        async with self.database.transaction() as tx:
            found = await _lock_agent(tx, name)
            if not await tx.run(REMOVE, name, TAKEOVER_GRACE_S):
                raise Refused(
                    f"Agent {name!r} runs on {found.replica}: `rota agents pause {name}`, and remove it when the run"
                    " has ended.",
                    agent=name,
                )
            await audit.append(tx, [AuditEntry(self.actor, "agent.remove", f"agent:{name}", {})])
        await self._update_redis(found.spec, None)

    async def _change(
        self, tx: Transaction, name: str, plan: NextRun, *, action: str, paused: bool = False, queued: bool = False
    ) -> int | None:
        """Returns the next due time in ms, if any."""
        next_ms: int | None = await tx.value(CHANGE, name, paused, queued, plan.due_ms, plan.slot_ms)
        await audit.append(tx, [AuditEntry(self.actor, f"agent.{action}", f"agent:{name}", {})])
        return next_ms

    async def _update_redis(self, spec: AgentSpec, due_ms: int | None, *, waits: bool = False) -> None:
        """Best effort: if Redis is unavailable, the next repopulation corrects it."""
        names = self._names
        index = AgentIndex(self.redis, self._keys.agent_keys(spec.group, names.waiting_set, names.working_set))
        try:
            if due_ms is not None:
                await index.repopulate([(spec.name, due_ms)])
            elif not waits:
                await index.forget([spec.name])
        except RedisUnavailable as error:
            log.warning("agent_redis_update_failed", agent=spec.name, because=error.sentence)
        # After the transaction and Redis: a woken scheduler reads Redis, which must be current by then.
        await self.database.run(WAKE, spec.name)


async def _lock_agent(tx: Transaction, name: str) -> _LockedAgent:
    row = await tx.row(LOCK, name)
    if row is None:
        raise _agent_not_found(name)
    return _LockedAgent(
        _SPEC_DECODER.decode(row["spec"]),
        row["paused"],
        row["queued"],
        NextRun(row["due_ms"], row["slot_ms"]),
        row["replica"],
        row["backfilling"],
    )


def _past_slots(spec: AgentSpec, since: datetime, until: datetime, now_ms: int) -> Sequence[int]:
    if since.tzinfo is None or until.tzinfo is None:
        raise InvalidInput("The backfill times need a time zone: write them as 2026-01-31T00:00Z.")
    from_ms, to_ms = (round(each.timestamp() * 1000) for each in (since, until))
    if from_ms < 0:
        raise InvalidInput("The backfill begins before 1970: choose a later time.")
    if to_ms > now_ms:
        raise InvalidInput("The backfill ends in the future: end it now at the latest; the schedule runs later slots.")
    slots = slots_between(spec.schedule, from_ms, to_ms, BACKFILL_MAX + 1)
    if not slots:
        raise InvalidInput(
            f"Agent {spec.name!r} runs {spec.schedule}, which has no slot in that time: choose another time."
        )
    if len(slots) > BACKFILL_MAX:
        raise InvalidInput(
            f"That would be more than {BACKFILL_MAX} runs: backfill a shorter time first, then the rest."
        )
    return slots


def _utc_datetime(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def _audit_detail(backfill: Backfill) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(backfill)
    return plain


def _check_can_trigger(name: str, found: _LockedAgent) -> None:
    if found.paused:
        raise Refused(f"Agent {name!r} is paused: `rota agents resume {name}` first.", agent=name)
    if found.replica is not None and found.spec.overlap == "skip":
        raise Refused(
            f"Agent {name!r} runs on {found.replica} and does not queue a second run: wait for its end, or declare it"
            ' with overlap="queue".',
            agent=name,
        )


def _agent_not_found(name: str) -> NotFound:
    return NotFound(f"There is no agent {name[:60]!r}: `rota agents list` shows all agents.", agent=name[:200])


def _view(row: Record) -> AgentView:
    spec = _SPEC_DECODER.decode(row["spec"])
    return AgentView(
        name=row["name"],
        state=_state(row),
        schedule=str(spec.schedule),
        group=row["shard_group"],
        due=row["ts_next"],
        run=row["run"],
        replica=row["replica"],
        since=row["ts_acquired"],
        deadline=row["ts_deadline"],
        streak=row["streak"],
        failure=row["failure"],
        error=row["error"],
        runs=row["runs"],
        last_outcome=row["last_outcome"],
        last_took_ms=row["last_took_ms"],
        last_started=row["last_started"],
        backfill=row["ts_backfill_slot"],
        backfill_until=row["ts_backfill_until"] if row["ts_backfill_slot"] else None,
        spec=spec,
    )


def _state(row: Record) -> str:
    if row["paused"]:
        return "PAUSED"
    if row["run"] is not None:
        return "QUARANTINED" if row["quarantined"] else "RUNNING"
    return "DONE" if row["ts_next"] is None else "WAITING"
