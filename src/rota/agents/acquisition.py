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

from rota.agents.endings import Endings
from rota.agents.periodic import tell_failure
from rota.agents.permits import Permit, Permits
from rota.agents.records import Begin, Begun, End, Records, Verdict
from rota.agents.registry import Declared, Registry
from rota.agents.runs import UNSTARTED, AgentRun, Run
from rota.agents.sets import BATCH_MAX, Candidate, Claim, Over, Sets
from rota.infra import faults
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.telemetry import metrics
from rota.model.agent import Ended, Outcome, Plan, is_missed, plan_after
from rota.model.errors import ScriptFailed
from rota.model.settings.agents import AgentScheduler, BatchOperations

ATTEMPTS_MAX: Final = 100
FURTHER_MAX: Final = 5
ATTEMPTS = metrics.counter("rota_agents_acquire_attempts", "Cycles that looked for agents that are due.")
ACQUIRED = metrics.counter("rota_agents_acquire_acquired", "Agents acquired by this process.")
TOOK = metrics.histogram(
    "rota_agents_acquire_time_seconds", "Duration of acquiring agents and beginning their runs.", labels=("mode",)
)
REFUSED = metrics.counter("rota_agents_acquire_refused", "Acquired agents that may not begin.", labels=("reason",))


class Seen(msgspec.Struct):
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
        registry: Registry,
        permits: Permits,
        records: Records,
        sets: Callable[[str], Sets],
        endings: Endings,
        wanted: AgentScheduler,
        clock: Clock,
        start: Callable[[Run, Declared], None],
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

    async def cycle(self, lease: Lease) -> Seen:
        """Look in every group, and begin what can begin. With no place free it only looks."""
        ATTEMPTS.inc()
        seen = Seen()
        # By turns, since the first may take every place there is.
        self._turn += 1
        groups = self._registry.groups
        first = self._turn % max(1, len(groups))
        for group in [*groups[first:], *groups[:first]]:
            try:
                await self._group(group, lease, seen)
            except ScriptFailed as failed:
                # Keys of this group are damaged; the others are none the worse for it.
                tell_failure(f"group {group!r}", failed)
        return seen

    async def _group(self, group: str, lease: Lease, seen: Seen) -> None:
        batch = batch_of(self._wanted.batch_operations, self._permits.free)
        attempts = attempts_of(self._wanted.batch_operations, self._permits.free, batch)
        tried: set[str] = set()
        since_us, offset = self._passed.pop(group, (0, 0))
        attempt = further = 0
        while attempt < attempts:
            look = await self._sets(group).ready(batch, offset, since_us)
            _note(seen, look.now_ms, look.next_ms, self._clock.now_ms())
            if attempt + further == 0:
                seen.ready += look.count
            mine = self._mine(look.candidates, look.now_ms, seen)
            chosen = [each for each in mine if each.name not in tried]
            tried |= {each.name for each in chosen}
            begun = await self._take(group, lease, chosen) if chosen else 0
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
            since_us, offset, batch = *_last(look.candidates), BATCH_MAX
            further += 1
            if further > FURTHER_MAX:
                self._passed[group] = since_us, offset
                break
        seen.unseen = True

    def _mine(self, candidates: Sequence[Candidate], now_ms: int, seen: Seen) -> list[Candidate]:
        mine = [each for each in candidates if self._registry.may_take(each.name, now_ms - each.due_us // 1000)]
        seen.mine += len(mine)
        seen.passed += len(candidates) - len(mine)
        for each in mine[:1]:
            seen.oldest_overdue_ms = max(seen.oldest_overdue_ms, now_ms - each.due_us // 1000)
        return mine

    async def _take(self, group: str, lease: Lease, chosen: Sequence[Candidate]) -> int:
        """How many runs were begun."""
        permits = self._permits.take(len(chosen))
        began_at = self._clock.monotonic()
        mode, size = ("batch", BATCH_MAX) if self._wanted.batch_operations.enabled else ("individual", 1)
        try:
            wanted = chosen[: len(permits)]
            begun = 0
            for at in range(0, len(wanted), size):
                begun += await self._begin_some(group, lease, wanted[at : at + size], permits)
            return begun
        finally:
            # Those that a run has taken over are not in the list any more.
            for permit in permits:
                permit.release()
            TOOK.labels(mode).observe(self._clock.monotonic() - began_at)

    async def _begin_some(self, group: str, lease: Lease, wanted: Sequence[Candidate], permits: list[Permit]) -> int:
        # Looked up before anything is awaited: the registry may change meanwhile.
        declared = {each.name: self._registry.agents[each.name] for each in wanted}
        numbers = await self._records.numbers(len(wanted))
        claims = [
            Claim(each, number, declared[each.name].spec.deadline_ms)
            for each, number in zip(wanted, numbers, strict=True)
        ]
        asked_at = self._clock.monotonic()
        try:
            now_ms, ours = await self._sets(group).acquire(lease.fence, claims)
        except BaseException:
            for each in claims:
                self._endings.add_over(Over(each.candidate.name, each.run, each.candidate.due_us // 1000), group)
            raise
        if not ours:
            return 0
        ACQUIRED.inc(len(ours))
        faults.at("agents.after_acquire")
        told = await self._begun(group, lease, now_ms, ours)
        return sum([self._carried_out(each, declared[each.name], now_ms, asked_at, permits) for each in told])

    async def _begun(self, group: str, lease: Lease, now_ms: int, ours: Sequence[Claim]) -> list[Begun]:
        asked = [Begin(each.candidate.name, each.run, each.timeout_ms) for each in ours]
        try:
            return await self._records.begin(lease, now_ms, asked)
        except BaseException:
            for each in ours:
                self._endings.add_end(_never_begun(each.candidate.name, each.run, each.candidate.due_us // 1000), group)
            raise

    def _carried_out(
        self, told: Begun, declared: Declared, now_ms: int, asked_at: float, permits: list[Permit]
    ) -> bool:
        """Whether a run has begun. One that cannot be started here does not keep the others from it."""
        try:
            return self._carry_out(told, declared, now_ms, asked_at, permits)
        except Exception as error:  # noqa: BLE001 - PostgreSQL has begun it: it must be ended there
            tell_failure(f"agent {told.name!r}", error)
            UNSTARTED.labels(type(error).__name__).inc()
            self._endings.add_end(_never_begun(told.name, told.run, now_ms), declared.spec.group)
            return False

    def _carry_out(self, told: Begun, declared: Declared, now_ms: int, asked_at: float, permits: list[Permit]) -> bool:
        spec = declared.spec
        if told.verdict is not Verdict.BEGUN:
            REFUSED.labels(told.verdict).inc()
            due_ms = told.due_ms if told.verdict is Verdict.EARLY else None
            self._endings.add_over(Over(told.name, told.run, due_ms), spec.group)
            return False
        if not told.backfill and is_missed(spec, told.slot_ms, now_ms):
            self._skip(declared, told, now_ms)
            return False
        until_ms = now_ms + spec.deadline_ms
        about = AgentRun(told.name, told.run, told.slot_ms, now_ms, until_ms, told.backfill, told.token)
        self._start(Run(spec, about, told.streak, permits[-1], asked_at), declared)
        permits.pop()  # it is the run's from here on
        return True

    def _skip(self, declared: Declared, told: Begun, now_ms: int) -> None:
        skipped = Ended(
            outcome=Outcome.SKIPPED, acquired_ms=now_ms, now_ms=now_ms, slot_ms=told.slot_ms, streak=told.streak
        )
        plan = plan_after(declared.spec, skipped, self._wanted.failure_backoff, 0.0, 0.0)
        plan = Plan(plan.due_ms, plan.slot_ms, told.streak)
        end = End(name=told.name, run=told.run, outcome=Outcome.SKIPPED, took_ms=0, plan=plan)
        self._endings.add_end(end, declared.spec.group)


def _never_begun(name: str, run: int, due_ms: int) -> End:
    """Nobody knows whether PostgreSQL began it; we do not."""
    return End(name=name, run=run, outcome=Outcome.CANCELLED, took_ms=0, plan=Plan(due_ms, None, None))


def batch_of(wanted: BatchOperations, slots: int) -> int:
    """How many are looked at in one go; at least one, so that a full pool still looks."""
    size = wanted.batch_size if wanted.batch_size > 0 else slots
    return max(1, min(size, slots, BATCH_MAX))


def attempts_of(wanted: BatchOperations, slots: int, batch: int) -> int:
    """How often: as often as it takes to fill the slots, times the multiplier where others' agents are in between."""
    needed = max(1, math.ceil(slots / batch))
    if wanted.chunk_attempt_multiplier > 0:
        needed = max(1, math.ceil(needed * wanted.chunk_attempt_multiplier))
    return min(ATTEMPTS_MAX, needed)


def _last(candidates: Sequence[Candidate]) -> tuple[int, int]:
    """The last score of a page, and how many of it have that."""
    last_us = candidates[-1].due_us
    return last_us, sum(each.due_us == last_us for each in candidates)


def _note(seen: Seen, now_ms: int, next_ms: int, ours_ms: int) -> None:
    seen.now_ms = now_ms
    seen.offset_ms = now_ms - ours_ms
    if next_ms:
        seen.next_ms = min(seen.next_ms or next_ms, next_ms)
