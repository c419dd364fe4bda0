"""One acquisition cycle: finds due agents in Redis, group by group, and has `RunClaimer` claim those it may run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from rota.agents.concurrency_permits import PermitPool
from rota.agents.redis_index.index import BATCH_MAX, AgentIndex, DueAgent
from rota.agents.registry import AgentRegistry
from rota.agents.run_claims import RunClaimer
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.service.periodic import report_failure
from rota.infra.telemetry import metrics
from rota.model.errors import ScriptFailed
from rota.model.settings.agents import BatchOperationsSettings

ATTEMPTS_MAX: Final = 100
SKIPPED_PAGES_MAX: Final = 5
ATTEMPTS = metrics.counter("rota_agents_acquire_attempts", "Acquisition cycles.")


class CycleResult(msgspec.Struct):
    """Counts and times of one cycle."""

    ready: int = 0
    """Due agents, including those of other members."""
    mine: int = 0
    """Of the due agents examined, those that this member may acquire."""
    unseen: bool = False
    """Whether more agents are due than were examined."""
    passed: int = 0
    acquired: int = 0
    oldest_overdue_ms: int = 0
    """Among the agents that this member may acquire."""
    now_ms: int = 0
    next_ms: int = 0
    """The next due time over all groups; 0: none."""
    offset_ms: int = 0
    """How far the clock of Redis is ahead of ours."""


class Acquisition:
    def __init__(
        self,
        registry: AgentRegistry,
        permits: PermitPool,
        index_of: Callable[[str], AgentIndex],
        claimer: RunClaimer,
        options: BatchOperationsSettings,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._permits = permits
        self._index_of = index_of
        self._claimer = claimer
        self._options = options
        self._clock = clock
        self._rotation = 0
        self._passed: dict[str, tuple[int, int]] = {}
        """By group: the score, and the number of entries with it, up to which all agents belong to other members."""

    async def run_cycle(self, lease: Lease) -> CycleResult:
        """Examine every group and begin runs. Without a free permit it only examines."""
        ATTEMPTS.inc()
        result = CycleResult()
        # Rotate: the first group may take all permits.
        self._rotation += 1
        groups = self._registry.groups
        first = self._rotation % max(1, len(groups))
        for group in [*groups[first:], *groups[:first]]:
            try:
                await self._acquire_group(group, lease, result)
            except ScriptFailed as failed:
                # The keys of this group are corrupt; the other groups are unaffected.
                report_failure(f"group {group!r}", failed)
        return result

    async def _acquire_group(self, group: str, lease: Lease, result: CycleResult) -> None:
        batch = batch_size_of(self._options, self._permits.free)
        attempts = attempts_of(self._options, self._permits.free, batch)
        tried: set[str] = set()
        since_us, offset = self._passed.pop(group, (0, 0))
        attempt = skipped_pages = 0
        while attempt < attempts:
            page = await self._index_of(group).ready(batch, offset, since_us)
            _note_times(result, page.now_ms, page.next_ms, self._clock.now_ms())
            if attempt + skipped_pages == 0:
                result.ready += page.count
            mine = self._eligible(page.candidates, page.now_ms, result)
            # Look the agents up before the next await: the registry may change meanwhile.
            chosen = [(each, self._registry.agents[each.name]) for each in mine if each.name not in tried]
            tried |= {each.name for each, _ in chosen}
            begun = await self._claimer.claim(group, lease, chosen) if chosen else 0
            result.acquired += begun
            offset = 0 if begun else offset + len(page.candidates)
            if len(page.candidates) < batch:
                return
            if not self._permits.free:
                break
            if mine:
                attempt += 1
                continue
            # Only agents of other members: ours come after them. The next cycles continue from here.
            since_us, offset, batch = *_last_score(page.candidates), BATCH_MAX
            skipped_pages += 1
            if skipped_pages > SKIPPED_PAGES_MAX:
                self._passed[group] = since_us, offset
                break
        result.unseen = True

    def _eligible(self, candidates: Sequence[DueAgent], now_ms: int, result: CycleResult) -> list[DueAgent]:
        mine = [each for each in candidates if self._registry.may_take(each.name, now_ms - each.due_us // 1000)]
        result.mine += len(mine)
        result.passed += len(candidates) - len(mine)
        for each in mine[:1]:
            result.oldest_overdue_ms = max(result.oldest_overdue_ms, now_ms - each.due_us // 1000)
        return mine


def batch_size_of(options: BatchOperationsSettings, slots: int) -> int:
    """Agents to examine per call; at least one, so that a full pool still examines."""
    size = options.batch_size if options.batch_size > 0 else slots
    return max(1, min(size, slots, BATCH_MAX))


def attempts_of(options: BatchOperationsSettings, slots: int, batch: int) -> int:
    """Calls needed to fill the slots, times the multiplier for interleaved agents of other members."""
    needed = max(1, math.ceil(slots / batch))
    if options.chunk_attempt_multiplier > 0:
        needed = max(1, math.ceil(needed * options.chunk_attempt_multiplier))
    return min(ATTEMPTS_MAX, needed)


def _last_score(candidates: Sequence[DueAgent]) -> tuple[int, int]:
    """The last score of a page, and how many of its entries have it."""
    last_us = candidates[-1].due_us
    return last_us, sum(each.due_us == last_us for each in candidates)


def _note_times(result: CycleResult, now_ms: int, next_ms: int, ours_ms: int) -> None:
    result.now_ms = now_ms
    result.offset_ms = now_ms - ours_ms
    if next_ms:
        result.next_ms = min(result.next_ms or next_ms, next_ms)
