"""One acquisition cycle: finds due agents, acquires them in Redis and begins their runs in PostgreSQL.

Permits are taken before Redis is called; each goes to a run or is released here, whatever fails. If the reply of
`acquire` is lost, the agents it may have acquired are moved back by their run number; if that of `begin` is lost, the
runs that may have begun are ended as CANCELLED. Both are no-ops if nothing had happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from rota.agents.completion import RunCompleter
from rota.agents.concurrency_permits import ConcurrencyPermit, PermitPool
from rota.agents.redis_index.index import BATCH_MAX, AgentClaim, AgentIndex, DueAgent, FinishedRun
from rota.agents.registry import AgentRegistry, DeclaredAgent
from rota.agents.repository import AgentBeginRequest, AgentBeginResult, AgentBeginStatus, AgentRepository, AgentRunEnd
from rota.agents.running import START_FAILURES, ActiveRun, AgentRun
from rota.infra import failpoints
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.service.periodic import report_failure
from rota.infra.telemetry import metrics
from rota.model.agents import AgentOutcome, AgentRunResult, NextRun, is_missed, plan_next_run
from rota.model.errors import ScriptFailed
from rota.model.settings.agents import AgentSchedulerSettings, BatchOperationsSettings

ATTEMPTS_MAX: Final = 100
SKIPPED_PAGES_MAX: Final = 5
ATTEMPTS = metrics.counter("rota_agents_acquire_attempts", "Acquisition cycles.")
ACQUIRED = metrics.counter("rota_agents_acquire_acquired", "Agents acquired by this process.")
ACQUIRE_DURATION = metrics.histogram(
    "rota_agents_acquire_time_seconds", "Duration of acquiring agents and starting their runs.", labels=("mode",)
)
REFUSED = metrics.counter("rota_agents_acquire_refused", "Acquired agents whose run was refused.", labels=("reason",))


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
        repository: AgentRepository,
        index_of: Callable[[str], AgentIndex],
        completer: RunCompleter,
        options: AgentSchedulerSettings,
        clock: Clock,
        start: Callable[[ActiveRun, DeclaredAgent], None],
    ) -> None:
        self._registry = registry
        self._permits = permits
        self._repository = repository
        self._index_of = index_of
        self._completer = completer
        self._options = options
        self._clock = clock
        self._start = start
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
        batch = batch_size_of(self._options.batch_operations, self._permits.free)
        attempts = attempts_of(self._options.batch_operations, self._permits.free, batch)
        tried: set[str] = set()
        since_us, offset = self._passed.pop(group, (0, 0))
        attempt = skipped_pages = 0
        while attempt < attempts:
            page = await self._index_of(group).ready(batch, offset, since_us)
            _note_times(result, page.now_ms, page.next_ms, self._clock.now_ms())
            if attempt + skipped_pages == 0:
                result.ready += page.count
            mine = self._eligible(page.candidates, page.now_ms, result)
            chosen = [each for each in mine if each.name not in tried]
            tried |= {each.name for each in chosen}
            begun = await self._acquire_and_begin(group, lease, chosen) if chosen else 0
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

    async def _acquire_and_begin(self, group: str, lease: Lease, chosen: Sequence[DueAgent]) -> int:
        """Returns how many runs were begun."""
        permits = self._permits.take(len(chosen))
        began_at = self._clock.monotonic()
        mode, size = ("batch", BATCH_MAX) if self._options.batch_operations.enabled else ("individual", 1)
        try:
            due = chosen[: len(permits)]
            begun = 0
            for at in range(0, len(due), size):
                begun += await self._acquire_batch(group, lease, due[at : at + size], permits)
            return begun
        finally:
            # Permits that a run took over were removed from the list.
            for permit in permits:
                permit.release()
            ACQUIRE_DURATION.labels(mode).observe(self._clock.monotonic() - began_at)

    async def _acquire_batch(
        self, group: str, lease: Lease, due: Sequence[DueAgent], permits: list[ConcurrencyPermit]
    ) -> int:
        # Look up before the first await: the registry may change meanwhile.
        declared = {each.name: self._registry.agents[each.name] for each in due}
        numbers = await self._repository.allocate_run_numbers(len(due))
        claims = [
            AgentClaim(each, number, declared[each.name].spec.deadline_ms)
            for each, number in zip(due, numbers, strict=True)
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
        return sum([self._try_start(each, declared[each.name], now_ms, acquired_at, permits) for each in begun])

    async def _begin_runs(
        self, group: str, lease: Lease, now_ms: int, ours: Sequence[AgentClaim]
    ) -> list[AgentBeginResult]:
        requests = [AgentBeginRequest(each.candidate.name, each.run, each.timeout_ms) for each in ours]
        try:
            return await self._repository.begin(lease, now_ms, requests)
        except BaseException:
            for each in ours:
                self._completer.add_end(
                    _cancelled_end(each.candidate.name, each.run, each.candidate.due_us // 1000), group
                )
            raise

    def _try_start(
        self,
        begin: AgentBeginResult,
        declared: DeclaredAgent,
        now_ms: int,
        acquired_at: float,
        permits: list[ConcurrencyPermit],
    ) -> bool:
        """Whether a run has begun. A run that cannot start here does not block the others."""
        try:
            return self._start_or_skip(begin, declared, now_ms, acquired_at, permits)
        except Exception as error:  # noqa: BLE001 - begun in PostgreSQL, so it must be ended there
            report_failure(f"agent {begin.name!r}", error)
            START_FAILURES.labels(type(error).__name__).inc()
            self._completer.add_end(_cancelled_end(begin.name, begin.run, now_ms), declared.spec.group)
            return False

    def _start_or_skip(
        self,
        begin: AgentBeginResult,
        declared: DeclaredAgent,
        now_ms: int,
        acquired_at: float,
        permits: list[ConcurrencyPermit],
    ) -> bool:
        spec = declared.spec
        if begin.verdict is not AgentBeginStatus.BEGUN:
            REFUSED.labels(begin.verdict).inc()
            due_ms = begin.due_ms if begin.verdict is AgentBeginStatus.EARLY else None
            self._completer.add_finished(FinishedRun(begin.name, begin.run, due_ms), spec.group)
            return False
        if not begin.backfill and is_missed(spec, begin.slot_ms, now_ms):
            self._skip(declared, begin, now_ms)
            return False
        until_ms = now_ms + spec.deadline_ms
        agent_run = AgentRun(begin.name, begin.run, begin.slot_ms, now_ms, until_ms, begin.backfill, begin.token)
        self._start(ActiveRun(spec, agent_run, begin.streak, permits[-1], acquired_at), declared)
        permits.pop()  # now owned by the run
        return True

    def _skip(self, declared: DeclaredAgent, begin: AgentBeginResult, now_ms: int) -> None:
        skipped = AgentRunResult(
            outcome=AgentOutcome.SKIPPED, acquired_ms=now_ms, now_ms=now_ms, slot_ms=begin.slot_ms, streak=begin.streak
        )
        plan = plan_next_run(declared.spec, skipped, self._options.failure_backoff, 0.0, 0.0)
        plan = NextRun(plan.due_ms, plan.slot_ms, begin.streak)
        end = AgentRunEnd(name=begin.name, run=begin.run, outcome=AgentOutcome.SKIPPED, took_ms=0, plan=plan)
        self._completer.add_end(end, declared.spec.group)


def _cancelled_end(name: str, run: int, due_ms: int) -> AgentRunEnd:
    """The end of a run for which it is unknown whether PostgreSQL began it; it did not start here."""
    return AgentRunEnd(name=name, run=run, outcome=AgentOutcome.CANCELLED, took_ms=0, plan=NextRun(due_ms, None, None))


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
