"""Claims due agents: a permit, then the agent in Redis, then its run in PostgreSQL, which decides.

Permits are taken before Redis is called; each goes to a run or is released here, whatever fails. If the reply of
`acquire` is lost, the agents it may have acquired are moved back by their run number; if that of `begin` is lost, the
runs that may have begun are ended as CANCELLED. Both are no-ops if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rota.agents.completion import RunCompleter
from rota.agents.concurrency_permits import ConcurrencyPermit, PermitPool
from rota.agents.redis_index.index import BATCH_MAX, AgentClaim, AgentIndex, DueAgent, FinishedRun
from rota.agents.registry import DeclaredAgent
from rota.agents.repository import AgentBeginRequest, AgentBeginResult, AgentRepository
from rota.agents.run_starter import RunStarter, cancelled_end
from rota.infra import failpoints
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.telemetry import metrics

ACQUIRED = metrics.counter("rota_agents_acquire_acquired", "Agents acquired by this process.")
ACQUIRE_DURATION = metrics.histogram(
    "rota_agents_acquire_time_seconds", "Duration of acquiring agents and starting their runs.", labels=("mode",)
)


class RunClaimer:
    """`in_batches`: many agents per call of Redis and PostgreSQL; otherwise one."""

    def __init__(
        self,
        permits: PermitPool,
        repository: AgentRepository,
        index_of: Callable[[str], AgentIndex],
        completer: RunCompleter,
        starter: RunStarter,
        clock: Clock,
        *,
        in_batches: bool,
    ) -> None:
        self._permits = permits
        self._repository = repository
        self._index_of = index_of
        self._completer = completer
        self._starter = starter
        self._clock = clock
        self._in_batches = in_batches

    async def claim(self, group: str, lease: Lease, chosen: Sequence[tuple[DueAgent, DeclaredAgent]]) -> int:
        """Claim due agents of a group, as many as there are permits for. Returns how many runs were begun."""
        permits = self._permits.take(len(chosen))
        began_at = self._clock.monotonic()
        mode, size = ("batch", BATCH_MAX) if self._in_batches else ("individual", 1)
        try:
            due = chosen[: len(permits)]
            begun = 0
            for at in range(0, len(due), size):
                begun += await self._claim_batch(group, lease, due[at : at + size], permits)
            return begun
        finally:
            # Permits that a run took over were removed from the list.
            for permit in permits:
                permit.release()
            ACQUIRE_DURATION.labels(mode).observe(self._clock.monotonic() - began_at)

    async def _claim_batch(
        self,
        group: str,
        lease: Lease,
        due: Sequence[tuple[DueAgent, DeclaredAgent]],
        permits: list[ConcurrencyPermit],
    ) -> int:
        declared = {each.name: agent for each, agent in due}
        numbers = await self._repository.allocate_run_numbers(len(due))
        claims = [
            AgentClaim(each, number, agent.spec.deadline_ms) for (each, agent), number in zip(due, numbers, strict=True)
        ]
        acquired_at = self._clock.monotonic()
        try:
            now_ms, ours = await self._index_of(group).acquire(lease.fence, claims)
        except BaseException:
            for each in claims:
                self._completer.add_finished(
                    FinishedRun(each.candidate.name, each.run, each.candidate.due_us // 1000), group
                )
            raise
        if not ours:
            return 0
        ACQUIRED.inc(len(ours))
        failpoints.hit("agents.after_acquire")
        begun = await self._begin_runs(group, lease, now_ms, ours)
        return sum([self._starter.try_start(each, declared[each.name], now_ms, acquired_at, permits) for each in begun])

    async def _begin_runs(
        self, group: str, lease: Lease, now_ms: int, ours: Sequence[AgentClaim]
    ) -> list[AgentBeginResult]:
        requests = [AgentBeginRequest(each.candidate.name, each.run, each.timeout_ms) for each in ours]
        try:
            return await self._repository.begin(lease, now_ms, requests)
        except BaseException:
            for each in ours:
                self._completer.add_end(
                    cancelled_end(each.candidate.name, each.run, each.candidate.due_us // 1000), group
                )
            raise
