"""Reconciles this replica with PostgreSQL: its agents, its shard, and the content of Redis.

PostgreSQL holds the due times, so an emptied Redis is restored exactly: an agent due tomorrow does not run now, and no
agent is added while its run is active. Each pass is bounded by a budget; the next continues where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from rota.agents.redis_index.index import AgentIndex, batched
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
REPOPULATE_DURATION = metrics.histogram("rota_agents_repopulate_time_seconds", "Duration of repopulating Redis.")
REPOPULATE_ERRORS = metrics.counter(
    "rota_agents_repopulate_errors", "Failed batches of repopulating Redis.", labels=("reason",)
)
ADDED = metrics.counter("rota_agents_repopulate_added", "Agents missing in Redis, or with too late a due time there.")


class AgentReconciler:
    def __init__(
        self,
        repository: AgentRepository,
        registry: AgentRegistry,
        index_of: Callable[[str], AgentIndex],
        declared: Callable[[], Awaitable[Iterable[DeclaredAgent]]],
        time: RedisServerTime,
        options: AgentSchedulerSettings,
        clock: Clock,
    ) -> None:
        self._repository = repository
        self._registry = registry
        self._index_of = index_of
        self._declared = declared
        self._time = time
        self._options = options
        self._clock = clock
        self._announced: dict[str, DeclaredAgent] = {}
        self._remaining: list[str] = []

    async def load_agents(self) -> None:
        """Load the declared agents, filtered by the patterns."""
        self._registry.replace(await self._declared())

    async def declare_new(self) -> None:
        """Write new or changed agents to PostgreSQL and Redis."""
        new = [each for name, each in self._registry.agents.items() if self._announced.get(name) != each]
        if not new:
            return
        now_ms, changed = await self._time.now_ms(), 0
        window_ms = self._options.jitter.initial_registration_seconds * 1000
        for part in batched(new, CHUNK):
            spread = [round(window_ms * random.random()) for _ in part]  # noqa: S311 - spreads load, keeps no secret
            specs = [validate_agent(each.spec) for each in part]
            before = await self._repository.groups_of([spec.name for spec in specs])
            changed += await self._repository.declare(specs, now_ms, spread)
            for spec in specs:
                if before.get(spec.name, spec.group) != spec.group:
                    await self._index_of(before[spec.name]).forget([spec.name])
            await self._repopulate([spec.name for spec in specs])
        self._announced = dict(self._registry.agents)
        if changed:
            await self._repository.wake()

    async def refresh(self, lease: Lease) -> None:
        """One pass: agents, members, then our agents that Redis lacks."""
        until = self._clock.monotonic() + self._options.reconcile.run_budget_ms / 1000
        await self.load_agents()
        await self.declare_new()
        crowd = lease.name.removeprefix(MEMBER_LEASE_PREFIX).partition(":")[0]
        self._registry.set_members(list(await self._repository.members(crowd)), lease.name)
        if not self._remaining:
            self._remaining = [name for name in self._registry.agents if self._registry.owns(name)]
        while self._remaining:
            part, self._remaining = self._remaining[:CHUNK], self._remaining[CHUNK:]
            with REPOPULATE_DURATION.time():
                await self._repopulate(part)
            if self._options.reconcile.run_budget_ms and self._clock.monotonic() >= until:
                return

    async def _repopulate(self, names: list[str]) -> None:
        by_group: dict[str, list[tuple[str, int]]] = {}
        for name, due_ms in await self._repository.idle(names):
            declared = self._registry.agents.get(name)
            if declared is not None:
                by_group.setdefault(declared.spec.group, []).append((name, due_ms))
        for group, idle in by_group.items():
            try:
                reply = await self._index_of(group).repopulate(idle)
            except RotaError as error:
                REPOPULATE_ERRORS.labels(error.code).inc()
                if not isinstance(error, ScriptFailed):
                    raise
                report_failure(f"group {group!r}", error)
            else:
                ADDED.inc(reply.added + reply.lowered)
