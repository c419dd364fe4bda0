"""Who is left behind: zombies of this replica, runs of replicas that are gone, entries nobody knows.

Whatever is moved, is moved by the run number it was found with, after PostgreSQL was asked, so that two who clean at
once, or one that was paused in between, do no harm. Nobody judges by what it has registered itself: an agent of another
replica is known to PostgreSQL. If we die anywhere in between, the next pass, of whoever, goes on.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from rota.agents.redis_index import BATCH_MAX, AgentIndex, FinishedRun, WorkingEntry
from rota.agents.registry import AgentRegistry
from rota.agents.repository import AgentRepository, RescheduledAgent
from rota.agents.running import ActiveRun, ActiveRuns
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.telemetry import metrics
from rota.model.agents import AgentOutcome, AgentSpec
from rota.model.settings.agents import OrphanCleanupSettings, ZombieCleanupSettings

CLEANED = metrics.counter("rota_agents_cleanup_cleaned", "Agents that were stopped or given back.", labels=("type",))
INVALID_MEMBERS = metrics.counter(
    "rota_agents_validation_invalid_member", "Entries that name no agent and were removed, by set.", labels=("where",)
)
TAKEOVER_GRACE_S: Final = 2.0
"""How long after a member's lease its runs are taken: time for its bodies to end."""
_NUMERIC = re.compile(rb"[0-9]{9,11}(?:\.[0-9]*)?")


class Zombies:
    """Agents of this process that run past their deadline and threshold."""

    def __init__(self, runs: ActiveRuns, wanted: ZombieCleanupSettings, clock: Clock) -> None:
        self._runs = runs
        self._wanted = wanted
        self._clock = clock
        self._exceptional = re.compile(wanted.exceptional_agents.pattern) if wanted.exceptional_agents.pattern else None

    def stop_after_s(self, spec: AgentSpec) -> float | None:
        """When after its acquisition a run is stopped; None: never."""
        if not self._wanted.enabled:
            return None
        return (spec.deadline_ms + self._threshold_ms(spec.name)) / 1000

    def sweep(self) -> list[ActiveRun]:
        """Stop those that no timer has stopped, then once more those that ignored it, within the budget."""
        now = self._clock.monotonic()
        budget_s = self._wanted.run_budget_ms / 1000
        found = []
        for run in sorted(self._runs.by_name.values(), key=lambda run: (run.stopped_as is not None, run.stopped_at)):
            if budget_s and self._clock.monotonic() - now >= budget_s:
                break  # those that were stopped now come last in the next pass
            limit_s = self.stop_after_s(run.spec)
            if limit_s is not None and now - run.began_at > limit_s:
                self._runs.stop(run, AgentOutcome.TIMEOUT)
                found.append(run)
        CLEANED.labels("zombie").inc(len(found))
        return found

    def _threshold_ms(self, name: str) -> int:
        if self._exceptional is not None and self._exceptional.fullmatch(name):
            return self._wanted.exceptional_agents.threshold_ms
        return self._wanted.threshold_ms


class Successors:
    """Takes over from members that are gone. Every member does it; PostgreSQL lets one succeed."""

    def __init__(
        self,
        records: AgentRepository,
        sets: Callable[[str], AgentIndex],
        registry: AgentRegistry,
        lost: Callable[[Iterable[RescheduledAgent]], None] = lambda _seized: None,
    ) -> None:
        self._records = records
        self._sets = sets
        self._registry = registry
        self._lost = lost
        self._living: frozenset[int] | None = None

    async def take_over(self, lease: Lease) -> int:
        """How many agents were given back. Their members died, or are paused past their lease."""
        # Forgotten until the end: what a pass that fails has not told Redis, the next one finds by its stamp.
        before, self._living = self._living, None
        given_back = 0
        while seized := await self._records.seize(lease, TAKEOVER_GRACE_S, BATCH_MAX):
            self._lost(seized)
            for group in {each.group for each in seized}:
                of_group = [each for each in seized if each.group == group]
                await self._sets(group).finish(
                    [FinishedRun(each.name, each.run, each.due_ms, add=True) for each in of_group]
                )
            given_back += len(seized)
        living = await self._live_fences()
        if before is None or before - living:
            given_back += await self._release_entries_of_dead_members()
        self._living = living
        CLEANED.labels("orphan").inc(given_back)
        return given_back

    async def _release_entries_of_dead_members(self) -> int:
        """Acquired in Redis by a member that died before PostgreSQL heard of it."""
        given_back = 0
        for group in self._registry.groups:
            async for _, entries in working_pages(self._sets(group)):
                # Asked after they were read: whoever has come since is among the living.
                living = await self._live_fences()
                dead = [each for each in entries if each.owner not in living]
                given_back += await release_entries(self._records, self._sets(group), dead)
        return given_back

    async def _live_fences(self) -> frozenset[int]:
        return frozenset((await self._records.members()).values())


class StaleWorkingEntries:
    """Entries in `working` of runs that PostgreSQL does not know, whose owner lives: it cannot reach Redis to say so.

    Moved are those that were found twice, a pass apart: a run is begun a moment after it was acquired.
    """

    def __init__(self, records: AgentRepository, sets: Callable[[str], AgentIndex], registry: AgentRegistry) -> None:
        self._records = records
        self._sets = sets
        self._registry = registry
        self._seen: set[tuple[str, WorkingEntry]] = set()

    async def sweep(self) -> int:
        found = {(group, each) for group in self._registry.groups for each in await self._find_stale(group)}
        again = found & self._seen
        self._seen = found - again
        moved = 0
        for group in {group for group, _ in again}:
            of_group = [each for of, each in again if of == group]
            moved += await release_entries(self._records, self._sets(group), of_group)
        CLEANED.labels("orphan").inc(moved)
        return moved

    async def _find_stale(self, group: str) -> list[WorkingEntry]:
        found: list[WorkingEntry] = []
        async for _, entries in working_pages(self._sets(group)):
            known = await self._records.run_status([each.name for each in entries])
            found += [each for each in entries if each.name in known and known[each.name].run != each.run]
        return found


class Orphans:
    """What only one replica needs to look for: entries long past their deadline, and names that are no agents."""

    def __init__(
        self,
        records: AgentRepository,
        sets: Callable[[str], AgentIndex],
        registry: AgentRegistry,
        wanted: OrphanCleanupSettings,
        clock: Clock,
    ) -> None:
        self._records = records
        self._sets = sets
        self._registry = registry
        self._wanted = wanted
        self._clock = clock

    async def sweep(self, lease: Lease, mine: Callable[[str], bool] = lambda _name: True) -> int:
        """One pass within its budget; how many entries were moved or removed. `mine` gates by shard.

        StaleFence when somebody else leads by now: a leader that was paused goes no further than the page it was at,
        and what it moves of that it names by the runs that it saw.
        """
        until = self._clock.monotonic() + self._wanted.run_budget_ms / 1000 if self._wanted.run_budget_ms else None
        cleaned = 0
        for group in self._registry.groups:
            cleaned += await self._sweep_working(self._sets(group), lease, mine, until)
            cleaned += await self._sweep_waiting(self._sets(group), lease, mine, until)
        CLEANED.labels("orphan").inc(cleaned)
        return cleaned

    async def _sweep_working(
        self, sets: AgentIndex, lease: Lease, mine: Callable[[str], bool], until: float | None
    ) -> int:
        cleaned = 0
        async for now_ms, entries in working_pages(sets):
            await self._records.assert_fence(lease)
            late = [each for each in entries if each.deadline_ms + self._wanted.threshold_ms < now_ms]
            cleaned += await release_entries(self._records, sets, [each for each in late if mine(each.name)])
            if len(late) < len(entries) or self._is_out_of_budget(until):
                break  # the rest has later deadlines
        return cleaned

    async def _sweep_waiting(
        self, sets: AgentIndex, lease: Lease, mine: Callable[[str], bool], until: float | None
    ) -> int:
        """Agents that PostgreSQL knows stay, however long they wait."""
        cleaned = offset = 0
        while not self._is_out_of_budget(until):
            await self._records.assert_fence(lease)
            look = await sets.ready(BATCH_MAX, offset)
            before_ms = look.now_ms - self._wanted.threshold_ms
            late = [each.name for each in look.candidates if each.due_us // 1000 < before_ms]
            known = await self._records.run_status(late)
            strangers = [name for name in late if name not in known and mine(name) and self._is_removable(name)]
            removed = await sets.forget(strangers)
            INVALID_MEMBERS.labels("waiting").inc(removed)
            cleaned += removed
            offset += len(look.candidates) - removed
            if len(late) < BATCH_MAX:
                break
        return cleaned

    def _is_removable(self, name: str) -> bool:
        numeric = _NUMERIC.fullmatch(name.encode(errors="surrogateescape"))
        return self._wanted.remove_numeric_only_agents or not numeric

    def _is_out_of_budget(self, until: float | None) -> bool:
        return until is not None and self._clock.monotonic() >= until


async def release_entries(records: AgentRepository, sets: AgentIndex, found: Iterable[WorkingEntry]) -> int:
    """Move entries that PostgreSQL knows no such run of to where it has their agents; how many were moved."""
    entries = {each.name: each for each in found}
    if not entries:
        return 0
    known = await records.run_status(entries)
    over = [
        FinishedRun(name, each.run, known[name].due_ms if known[name].run is None else None)
        for name, each in entries.items()
        if name in known and known[name].run != each.run
    ]
    strangers = [name for name in entries if name not in known]
    removed = await sets.forget(strangers, everywhere=True)
    INVALID_MEMBERS.labels("working").inc(removed)
    return (await sets.finish(over)).moved + removed


async def working_pages(sets: AgentIndex) -> AsyncIterator[tuple[int, list[WorkingEntry]]]:
    """All that run, with the server's time. What is removed meanwhile may hide others until the next pass."""
    offset = 0
    while True:
        now_ms, entries = await sets.running(offset)
        yield now_ms, entries
        offset += len(entries)
        if len(entries) < BATCH_MAX:
            return
