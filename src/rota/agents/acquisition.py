"""One cycle of the loop: who is due, who may run here, and who PostgreSQL lets begin.

Permits are taken before Redis is asked. Each ends up in a run, or is given back here, whatever happens on the way. If
the reply of `acquire` is lost, what it may have taken is moved back by its stamp; if that of `begin` is, what may have
begun is ended as cancelled. Either changes nothing where nothing had happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from rota.agents.completion import RunCompleter
from rota.agents.concurrency_permits import ConcurrencyPermit, PermitPool
from rota.agents.redis_index import BATCH_MAX, AgentClaim, AgentIndex, DueAgent, FinishedRun
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
ATTEMPTS = metrics.counter("rota_agents_acquire_attempts", "Cycles that looked for agents that are due.")
ACQUIRED = metrics.counter("rota_agents_acquire_acquired", "Agents acquired by this process.")
ACQUIRE_DURATION = metrics.histogram(
    "rota_agents_acquire_time_seconds", "Duration of acquiring agents and beginning their runs.", labels=("mode",)
)
REFUSED = metrics.counter("rota_agents_acquire_refused", "Acquired agents that may not begin.", labels=("reason",))


class CycleResult(msgspec.Struct):
    """What a cycle saw and did."""

    ready: int = 0
    """Agents that are due, whoever may take them."""
    mine: int = 0
    """Those of them that were looked at and may be taken here."""
    unseen: bool = False
    """Whether more are due than were looked at."""
    passed: int = 0
    acquired: int = 0
    oldest_overdue_ms: int = 0
    """Of those that may be taken here."""
    now_ms: int = 0
    next_ms: int = 0
    """When the next is due, of all groups; 0: none."""
    offset_ms: int = 0
    """How far the clock of Redis is ahead of ours."""


class Acquisition:
    def __init__(
        self,
        registry: AgentRegistry,
        permits: PermitPool,
        records: AgentRepository,
        sets: Callable[[str], AgentIndex],
        endings: RunCompleter,
        wanted: AgentSchedulerSettings,
        clock: Clock,
        start: Callable[[ActiveRun, DeclaredAgent], None],
    ) -> None:
        self._registry = registry
        self._permits = permits
        self._records = records
        self._sets = sets
        self._endings = endings
        self._wanted = wanted
        self._clock = clock
        self._start = start
        self._turn = 0
        self._passed: dict[str, tuple[int, int]] = {}
        """Up to where a group holds nothing but agents of others: a score, and how many have it."""

    async def run_cycle(self, lease: Lease) -> CycleResult:
        """Look in every group, and begin what can begin. With no place free it only looks."""
        ATTEMPTS.inc()
        seen = CycleResult()
        # By turns, since the first may take every place there is.
        self._turn += 1
        groups = self._registry.groups
        first = self._turn % max(1, len(groups))
        for group in [*groups[first:], *groups[:first]]:
            try:
                await self._acquire_group(group, lease, seen)
            except ScriptFailed as failed:
                # Keys of this group are damaged; the others are none the worse for it.
                report_failure(f"group {group!r}", failed)
        return seen

    async def _acquire_group(self, group: str, lease: Lease, seen: CycleResult) -> None:
        batch = batch_size_of(self._wanted.batch_operations, self._permits.free)
        attempts = attempts_of(self._wanted.batch_operations, self._permits.free, batch)
        tried: set[str] = set()
        since_us, offset = self._passed.pop(group, (0, 0))
        attempt = further = 0
        while attempt < attempts:
            look = await self._sets(group).ready(batch, offset, since_us)
            _note_times(seen, look.now_ms, look.next_ms, self._clock.now_ms())
            if attempt + further == 0:
                seen.ready += look.count
            mine = self._eligible(look.candidates, look.now_ms, seen)
            chosen = [each for each in mine if each.name not in tried]
            tried |= {each.name for each in chosen}
            begun = await self._acquire_and_begin(group, lease, chosen) if chosen else 0
            seen.acquired += begun
            offset = 0 if begun else offset + len(look.candidates)
            if len(look.candidates) < batch:
                return
            if not self._permits.free:
                break
            if mine:
                attempt += 1
                continue
            # Agents of others alone: ours are behind them. What a cycle does not come to, the next ones do.
            since_us, offset, batch = *_last_score(look.candidates), BATCH_MAX
            further += 1
            if further > SKIPPED_PAGES_MAX:
                self._passed[group] = since_us, offset
                break
        seen.unseen = True

    def _eligible(self, candidates: Sequence[DueAgent], now_ms: int, seen: CycleResult) -> list[DueAgent]:
        mine = [each for each in candidates if self._registry.may_take(each.name, now_ms - each.due_us // 1000)]
        seen.mine += len(mine)
        seen.passed += len(candidates) - len(mine)
        for each in mine[:1]:
            seen.oldest_overdue_ms = max(seen.oldest_overdue_ms, now_ms - each.due_us // 1000)
        return mine

    async def _acquire_and_begin(self, group: str, lease: Lease, chosen: Sequence[DueAgent]) -> int:
        """How many runs were begun."""
        permits = self._permits.take(len(chosen))
        began_at = self._clock.monotonic()
        mode, size = ("batch", BATCH_MAX) if self._wanted.batch_operations.enabled else ("individual", 1)
        try:
            wanted = chosen[: len(permits)]
            begun = 0
            for at in range(0, len(wanted), size):
                begun += await self._acquire_batch(group, lease, wanted[at : at + size], permits)
            return begun
        finally:
            # Those that a run has taken over are not in the list any more.
            for permit in permits:
                permit.release()
            ACQUIRE_DURATION.labels(mode).observe(self._clock.monotonic() - began_at)

    async def _acquire_batch(
        self, group: str, lease: Lease, wanted: Sequence[DueAgent], permits: list[ConcurrencyPermit]
    ) -> int:
        # Looked up before anything is awaited: the registry may change meanwhile.
        declared = {each.name: self._registry.agents[each.name] for each in wanted}
        numbers = await self._records.allocate_run_numbers(len(wanted))
        claims = [
            AgentClaim(each, number, declared[each.name].spec.deadline_ms)
            for each, number in zip(wanted, numbers, strict=True)
        ]
        asked_at = self._clock.monotonic()
        try:
            now_ms, ours = await self._sets(group).acquire(lease.fence, claims)
        except BaseException:
            for each in claims:
                self._endings.add_finished(
                    FinishedRun(each.candidate.name, each.run, each.candidate.due_us // 1000), group
                )
            raise
        if not ours:
            return 0
        ACQUIRED.inc(len(ours))
        failpoints.hit("agents.after_acquire")
        told = await self._begin_runs(group, lease, now_ms, ours)
        return sum([self._try_start(each, declared[each.name], now_ms, asked_at, permits) for each in told])

    async def _begin_runs(
        self, group: str, lease: Lease, now_ms: int, ours: Sequence[AgentClaim]
    ) -> list[AgentBeginResult]:
        asked = [AgentBeginRequest(each.candidate.name, each.run, each.timeout_ms) for each in ours]
        try:
            return await self._records.begin(lease, now_ms, asked)
        except BaseException:
            for each in ours:
                self._endings.add_end(
                    _cancelled_end(each.candidate.name, each.run, each.candidate.due_us // 1000), group
                )
            raise

    def _try_start(
        self,
        told: AgentBeginResult,
        declared: DeclaredAgent,
        now_ms: int,
        asked_at: float,
        permits: list[ConcurrencyPermit],
    ) -> bool:
        """Whether a run has begun. One that cannot be started here does not keep the others from it."""
        try:
            return self._start_or_skip(told, declared, now_ms, asked_at, permits)
        except Exception as error:  # noqa: BLE001 - PostgreSQL has begun it: it must be ended there
            report_failure(f"agent {told.name!r}", error)
            START_FAILURES.labels(type(error).__name__).inc()
            self._endings.add_end(_cancelled_end(told.name, told.run, now_ms), declared.spec.group)
            return False

    def _start_or_skip(
        self,
        told: AgentBeginResult,
        declared: DeclaredAgent,
        now_ms: int,
        asked_at: float,
        permits: list[ConcurrencyPermit],
    ) -> bool:
        spec = declared.spec
        if told.verdict is not AgentBeginStatus.BEGUN:
            REFUSED.labels(told.verdict).inc()
            due_ms = told.due_ms if told.verdict is AgentBeginStatus.EARLY else None
            self._endings.add_finished(FinishedRun(told.name, told.run, due_ms), spec.group)
            return False
        if not told.backfill and is_missed(spec, told.slot_ms, now_ms):
            self._skip(declared, told, now_ms)
            return False
        until_ms = now_ms + spec.deadline_ms
        about = AgentRun(told.name, told.run, told.slot_ms, now_ms, until_ms, told.backfill, told.token)
        self._start(ActiveRun(spec, about, told.streak, permits[-1], asked_at), declared)
        permits.pop()  # it is the run's from here on
        return True

    def _skip(self, declared: DeclaredAgent, told: AgentBeginResult, now_ms: int) -> None:
        skipped = AgentRunResult(
            outcome=AgentOutcome.SKIPPED, acquired_ms=now_ms, now_ms=now_ms, slot_ms=told.slot_ms, streak=told.streak
        )
        plan = plan_next_run(declared.spec, skipped, self._wanted.failure_backoff, 0.0, 0.0)
        plan = NextRun(plan.due_ms, plan.slot_ms, told.streak)
        end = AgentRunEnd(name=told.name, run=told.run, outcome=AgentOutcome.SKIPPED, took_ms=0, plan=plan)
        self._endings.add_end(end, declared.spec.group)


def _cancelled_end(name: str, run: int, due_ms: int) -> AgentRunEnd:
    """Nobody knows whether PostgreSQL began it; we do not."""
    return AgentRunEnd(name=name, run=run, outcome=AgentOutcome.CANCELLED, took_ms=0, plan=NextRun(due_ms, None, None))


def batch_size_of(wanted: BatchOperationsSettings, slots: int) -> int:
    """How many are looked at in one go; at least one, so that a full pool still looks."""
    size = wanted.batch_size if wanted.batch_size > 0 else slots
    return max(1, min(size, slots, BATCH_MAX))


def attempts_of(wanted: BatchOperationsSettings, slots: int, batch: int) -> int:
    """How often: as often as it takes to fill the slots, times the multiplier where others' agents are in between."""
    needed = max(1, math.ceil(slots / batch))
    if wanted.chunk_attempt_multiplier > 0:
        needed = max(1, math.ceil(needed * wanted.chunk_attempt_multiplier))
    return min(ATTEMPTS_MAX, needed)


def _last_score(candidates: Sequence[DueAgent]) -> tuple[int, int]:
    """The last score of a page, and how many of it have that."""
    last_us = candidates[-1].due_us
    return last_us, sum(each.due_us == last_us for each in candidates)


def _note_times(seen: CycleResult, now_ms: int, next_ms: int, ours_ms: int) -> None:
    seen.now_ms = now_ms
    seen.offset_ms = now_ms - ours_ms
    if next_ms:
        seen.next_ms = min(seen.next_ms or next_ms, next_ms)
