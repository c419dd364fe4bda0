"""Cleanup of zombies of this replica, runs of dead replicas, and unknown entries in Redis.

Entries are moved by the run number they were read with, after PostgreSQL was queried, so concurrent cleaners, or one
that was paused in between, do no harm. PostgreSQL, not the local registry, decides whether a name is an agent: other
replicas have agents too. After a crash the next pass of any replica continues.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from rota.agents.redis_index.index import BATCH_MAX, AgentIndex, FinishedRun, WorkingEntry
from rota.agents.registry import AgentRegistry
from rota.agents.repository import AgentRepository, RescheduledAgent
from rota.agents.running import ActiveRun, ActiveRuns
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.telemetry import metrics
from rota.model.agents import AgentOutcome, AgentSpec
from rota.model.settings.agents import OrphanCleanupSettings, ZombieCleanupSettings

CLEANED = metrics.counter("rota_agents_cleanup_cleaned", "Agents that were stopped or released.", labels=("type",))
INVALID_MEMBERS = metrics.counter(
    "rota_agents_validation_invalid_member", "Removed entries that name no agent, by set.", labels=("where",)
)
TAKEOVER_GRACE_S: Final = 2.0
"""How long after lease expiry a member's runs are taken over: time for its bodies to end."""
_NUMERIC = re.compile(rb"[0-9]{9,11}(?:\.[0-9]*)?")


class Zombies:
    """Agents of this process that run past their deadline and threshold."""

    def __init__(self, runs: ActiveRuns, options: ZombieCleanupSettings, clock: Clock) -> None:
        self._runs = runs
        self._options = options
        self._clock = clock
        self._exceptional = (
            re.compile(options.exceptional_agents.pattern) if options.exceptional_agents.pattern else None
        )

    def stop_after_s(self, spec: AgentSpec) -> float | None:
        """How long after the start of its time limit a run is stopped; None: never."""
        if not self._options.enabled:
            return None
        return (spec.deadline_ms + self._threshold_ms(spec.name)) / 1000

    def sweep(self) -> list[ActiveRun]:
        """Stop runs that no timer stopped, then again those that ignored it, within the budget."""
        now = self._clock.monotonic()
        budget_s = self._options.run_budget_ms / 1000
        found = []
        for run in sorted(self._runs.by_name.values(), key=lambda run: (run.stopped_as is not None, run.stopped_at)):
            if budget_s and self._clock.monotonic() - now >= budget_s:
                break  # runs stopped in this pass come last in the next one
            limit_s = self.stop_after_s(run.spec)
            if limit_s is not None and run.limited_since is not None and now - run.limited_since > limit_s:
                self._runs.stop(run, AgentOutcome.TIMEOUT)
                found.append(run)
        CLEANED.labels("zombie").inc(len(found))
        return found

    def _threshold_ms(self, name: str) -> int:
        if self._exceptional is not None and self._exceptional.fullmatch(name):
            return self._options.exceptional_agents.threshold_ms
        return self._options.threshold_ms


class Successors:
    """Takes over runs of dead members. Every member tries; PostgreSQL lets one succeed."""

    def __init__(
        self,
        repository: AgentRepository,
        index_of: Callable[[str], AgentIndex],
        registry: AgentRegistry,
        on_lost: Callable[[Iterable[RescheduledAgent]], None],
    ) -> None:
        self._repository = repository
        self._index_of = index_of
        self._registry = registry
        self._on_lost = on_lost
        self._live: frozenset[int] | None = None

    async def take_over(self, lease: Lease) -> int:
        """Returns how many agents were released. Their members died, or are paused past their lease."""
        # Reset until the end: if this pass fails before it updates Redis, the next one finds the entries by stamp.
        before, self._live = self._live, None
        released = 0
        while seized := await self._repository.seize(lease, TAKEOVER_GRACE_S, BATCH_MAX):
            self._on_lost(seized)
            for group in {each.group for each in seized}:
                of_group = [each for each in seized if each.group == group]
                await self._index_of(group).finish(
                    [FinishedRun(each.name, each.run, each.due_ms, add=True) for each in of_group]
                )
            released += len(seized)
        live = await self._live_fences()
        if before is None or before - live:
            released += await self._release_entries_of_dead_members()
        self._live = live
        CLEANED.labels("orphan").inc(released)
        return released

    async def _release_entries_of_dead_members(self) -> int:
        """Release entries acquired in Redis by a member that died before it began the run in PostgreSQL."""
        released = 0
        for group in self._registry.groups:
            async for _, entries in working_pages(self._index_of(group)):
                # Query members after reading the entries, so that members which joined since are included.
                live = await self._live_fences()
                dead = [each for each in entries if each.owner not in live]
                released += await release_entries(self._repository, self._index_of(group), dead)
        return released

    async def _live_fences(self) -> frozenset[int]:
        return frozenset((await self._repository.members()).values())


class StaleWorkingEntries:
    """Entries in `working` without a run in PostgreSQL whose owner is alive: it cannot reach Redis to remove them.

    Only entries found in two consecutive passes are moved: a run begins shortly after it was acquired.
    """

    def __init__(
        self, repository: AgentRepository, index_of: Callable[[str], AgentIndex], registry: AgentRegistry
    ) -> None:
        self._repository = repository
        self._index_of = index_of
        self._registry = registry
        self._previous: set[tuple[str, WorkingEntry]] = set()

    async def sweep(self) -> int:
        found = {(group, each) for group in self._registry.groups for each in await self._find_stale(group)}
        repeated = found & self._previous
        self._previous = found - repeated
        moved = 0
        for group in {group for group, _ in repeated}:
            of_group = [each for of, each in repeated if of == group]
            moved += await release_entries(self._repository, self._index_of(group), of_group)
        CLEANED.labels("orphan").inc(moved)
        return moved

    async def _find_stale(self, group: str) -> list[WorkingEntry]:
        found: list[WorkingEntry] = []
        async for _, entries in working_pages(self._index_of(group)):
            statuses = await self._repository.run_status([each.name for each in entries])
            found += [each for each in entries if each.name in statuses and statuses[each.name].run != each.run]
        return found


class Orphans:
    """Cleanup by one replica: entries long past their deadline, and names that are not agents."""

    def __init__(
        self,
        repository: AgentRepository,
        index_of: Callable[[str], AgentIndex],
        registry: AgentRegistry,
        options: OrphanCleanupSettings,
        clock: Clock,
    ) -> None:
        self._repository = repository
        self._index_of = index_of
        self._registry = registry
        self._options = options
        self._clock = clock

    async def sweep(self, lease: Lease, mine: Callable[[str], bool] = lambda _name: True) -> int:
        """One pass within its budget; returns how many entries were moved or removed. `mine` filters by shard.

        Raises StaleFence if another member leads by now: a leader that was paused goes no further than its current
        page, and moves entries of it only by the run numbers that it read.
        """
        until = self._clock.monotonic() + self._options.run_budget_ms / 1000 if self._options.run_budget_ms else None
        cleaned = 0
        for group in self._registry.groups:
            cleaned += await self._sweep_working(self._index_of(group), lease, mine, until)
            cleaned += await self._sweep_waiting(self._index_of(group), lease, mine, until)
        CLEANED.labels("orphan").inc(cleaned)
        return cleaned

    async def _sweep_working(
        self, index: AgentIndex, lease: Lease, mine: Callable[[str], bool], until: float | None
    ) -> int:
        cleaned = 0
        async for now_ms, entries in working_pages(index):
            await self._repository.assert_fence(lease)
            late = [each for each in entries if each.deadline_ms + self._options.threshold_ms < now_ms]
            cleaned += await release_entries(self._repository, index, [each for each in late if mine(each.name)])
            if len(late) < len(entries) or self._is_out_of_budget(until):
                break  # the remaining entries have later deadlines
        return cleaned

    async def _sweep_waiting(
        self, index: AgentIndex, lease: Lease, mine: Callable[[str], bool], until: float | None
    ) -> int:
        """Agents that PostgreSQL knows remain, however long they wait."""
        cleaned = offset = 0
        while not self._is_out_of_budget(until):
            await self._repository.assert_fence(lease)
            page = await index.ready(BATCH_MAX, offset)
            before_ms = page.now_ms - self._options.threshold_ms
            late = [each.name for each in page.candidates if each.due_us // 1000 < before_ms]
            statuses = await self._repository.run_status(late)
            unknown = [name for name in late if name not in statuses and mine(name) and self._is_removable(name)]
            removed = await index.forget(unknown)
            INVALID_MEMBERS.labels("waiting").inc(removed)
            cleaned += removed
            offset += len(page.candidates) - removed
            if len(late) < BATCH_MAX:
                break
        return cleaned

    def _is_removable(self, name: str) -> bool:
        numeric = _NUMERIC.fullmatch(name.encode(errors="surrogateescape"))
        return self._options.remove_numeric_only_agents or not numeric

    def _is_out_of_budget(self, until: float | None) -> bool:
        return until is not None and self._clock.monotonic() >= until


async def release_entries(repository: AgentRepository, index: AgentIndex, found: Iterable[WorkingEntry]) -> int:
    """Move entries whose run PostgreSQL does not know to the state it has for their agents; returns how many."""
    entries = {each.name: each for each in found}
    if not entries:
        return 0
    statuses = await repository.run_status(entries)
    finished = [
        FinishedRun(name, each.run, statuses[name].due_ms if statuses[name].run is None else None)
        for name, each in entries.items()
        if name in statuses and statuses[name].run != each.run
    ]
    unknown = [name for name in entries if name not in statuses]
    removed = await index.forget(unknown, everywhere=True)
    INVALID_MEMBERS.labels("working").inc(removed)
    return (await index.finish(finished)).moved + removed


async def working_pages(index: AgentIndex) -> AsyncIterator[tuple[int, list[WorkingEntry]]]:
    """All running agents, with the server's time. Concurrent removals may hide some until the next pass."""
    offset = 0
    while True:
        now_ms, entries = await index.running(offset)
        yield now_ms, entries
        offset += len(entries)
        if len(entries) < BATCH_MAX:
            return
