"""What this replica has, brought in line with what there is: its agents, its shard, and what Redis should hold.

PostgreSQL has the due times, so an emptied Redis is filled as it was: nobody runs at once that was due in a day, and
nobody is added while its run lives. Within its budget a pass does what it can; the next goes on where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from rota.agents.redis_index import AgentIndex, batched
from rota.agents.registry import AgentRegistry, DeclaredAgent
from rota.agents.repository import MEMBER_LEASE_PREFIX, AgentRepository
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.redis import RedisServerTime
from rota.infra.service.periodic import report_failure
from rota.infra.telemetry import metrics
from rota.model.agents import validate_agent
from rota.model.errors import RotaError, ScriptFailed
from rota.model.settings.agents import AgentSchedulerSettings

CHUNK: Final = 1000
REPOPULATE_DURATION = metrics.histogram(
    "rota_agents_repopulate_time_seconds", "Duration of telling Redis who should wait there."
)
REPOPULATE_ERRORS = metrics.counter("rota_agents_repopulate_errors", "Parts of it that failed.", labels=("reason",))
ADDED = metrics.counter("rota_agents_repopulate_added", "Agents that Redis did not know, or knew too late.")


class AgentReconciler:
    def __init__(
        self,
        records: AgentRepository,
        registry: AgentRegistry,
        sets: Callable[[str], AgentIndex],
        declared: Callable[[], Awaitable[Iterable[DeclaredAgent]]],
        time: RedisServerTime,
        wanted: AgentSchedulerSettings,
        clock: Clock,
    ) -> None:
        self._records = records
        self._registry = registry
        self._sets = sets
        self._declared = declared
        self._time = time
        self._wanted = wanted
        self._clock = clock
        self._announced: dict[str, DeclaredAgent] = {}
        self._left: list[str] = []

    async def load_agents(self) -> None:
        """Which agents there are now, as far as the patterns let them be."""
        self._registry.replace(await self._declared())

    async def declare_new(self) -> None:
        """Make those that are new known to PostgreSQL, and to Redis."""
        new = [each for name, each in self._registry.agents.items() if self._announced.get(name) != each]
        if not new:
            return
        now_ms, changed = await self._time.now_ms(), 0
        window_ms = self._wanted.jitter.initial_registration_seconds * 1000
        for part in batched(new, CHUNK):
            spread = [round(window_ms * random.random()) for _ in part]  # noqa: S311 - spreads load, keeps no secret
            specs = [validate_agent(each.spec) for each in part]
            before = await self._records.groups_of([spec.name for spec in specs])
            changed += await self._records.declare(specs, now_ms, spread)
            for spec in specs:
                if before.get(spec.name, spec.group) != spec.group:
                    await self._sets(before[spec.name]).forget([spec.name])
            await self._repopulate([spec.name for spec in specs])
        self._announced = dict(self._registry.agents)
        if changed:
            await self._records.wake()

    async def refresh(self, lease: Lease) -> None:
        """One pass: agents, members, then those of ours that Redis lacks."""
        until = self._clock.monotonic() + self._wanted.reconcile.run_budget_ms / 1000
        await self.load_agents()
        await self.declare_new()
        crowd = lease.name.removeprefix(MEMBER_LEASE_PREFIX).partition(":")[0]
        self._registry.set_members(list(await self._records.members(crowd)), lease.name)
        if not self._left:
            self._left = [name for name in self._registry.agents if self._registry.owns(name)]
        while self._left:
            part, self._left = self._left[:CHUNK], self._left[CHUNK:]
            with REPOPULATE_DURATION.time():
                await self._repopulate(part)
            if self._wanted.reconcile.run_budget_ms and self._clock.monotonic() >= until:
                return

    async def _repopulate(self, names: list[str]) -> None:
        by_group: dict[str, list[tuple[str, int]]] = {}
        for name, due_ms in await self._records.idle(names):
            declared = self._registry.agents.get(name)
            if declared is not None:
                by_group.setdefault(declared.spec.group, []).append((name, due_ms))
        for group, idle in by_group.items():
            try:
                told = await self._sets(group).repopulate(idle)
            except RotaError as failed:
                REPOPULATE_ERRORS.labels(failed.code).inc()
                if not isinstance(failed, ScriptFailed):
                    raise
                report_failure(f"group {group!r}", failed)
            else:
                ADDED.inc(told.added + told.lowered)
