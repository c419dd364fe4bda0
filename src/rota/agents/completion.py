"""How runs end: PostgreSQL first, which decides whether it is still ours and what comes next, then Redis.

Both steps are repeated until they are done, in order, for as long as this process lives; nothing is dropped. What
PostgreSQL has ended and Redis has not heard of waits here through any outage of Redis. A member whose lease is lost
gives up what PostgreSQL has not ended: others have it, or will.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Final

import structlog

from rota.agents.redis_index import BATCH_MAX, AgentIndex, FinishedRun
from rota.agents.repository import AgentRepository, AgentRunEnd
from rota.agents.running import ActiveRun
from rota.infra import failpoints
from rota.infra.clock import Clock
from rota.infra.lease import Lease
from rota.infra.telemetry import metrics
from rota.model.agents import AgentOutcome, AgentRunResult, NextRun, plan_next_run
from rota.model.errors import RotaError, ScriptFailed
from rota.model.settings.agents import AgentSchedulerSettings

log = structlog.get_logger(__name__)

EXHAUSTED = metrics.counter("rota_agents_schedule_retry_exhausted", "Moves of agents that Redis did not take at once.")
RECOVERED = metrics.counter("rota_agents_schedule_recovery", "Moves that were tried again.", labels=("success",))
MISMATCHES = metrics.counter("rota_agents_cas_contention", "Ends of runs that were not ours.", labels=("location",))
FLUSH_DELAY_S: Final = 0.2
"""How long ends wait for others, to be written together."""
FLUSH_THRESHOLD: Final = 50


class RunCompleter:
    """`sets` are those of a shard group, `chance` a random number in [0, 1) for jitter.

    `moved` hears of due times that Redis knows, `ended` of runs that PostgreSQL has ended.
    """

    def __init__(
        self,
        records: AgentRepository,
        sets: Callable[[str], AgentIndex],
        wanted: AgentSchedulerSettings,
        clock: Clock,
        chance: Callable[[], float],
        moved: Callable[[int], None] = lambda _due_ms: None,
        ended: Callable[[Iterable[AgentRunEnd]], None] = lambda _ends: None,
    ) -> None:
        self._records = records
        self._sets = sets
        self._wanted = wanted
        self._clock = clock
        self._chance = chance
        self._moved = moved
        self._ended = ended
        self._unended: deque[tuple[AgentRunEnd, str]] = deque()
        self._unmoved: dict[str, deque[FinishedRun]] = {}
        self._retried = 0
        self._turn = asyncio.Lock()
        self.some = asyncio.Event()
        self.hurry = asyncio.Event()
        """Some of them are due again so soon that they cannot wait for others."""

    @property
    def pending_count(self) -> int:
        """Ends that not everybody knows of yet."""
        return len(self._unended) + sum(map(len, self._unmoved.values()))

    def add(self, run: ActiveRun) -> None:
        """A run that is over here."""
        took_ms = max(0, round((self._clock.monotonic() - run.began_at) * 1000))
        now_ms = run.about.acquired_ms + took_ms
        ended = AgentRunResult(
            outcome=run.outcome,
            acquired_ms=run.about.acquired_ms,
            now_ms=now_ms,
            slot_ms=run.about.slot_ms,
            streak=run.streak,
            failure=run.failure,
            backfill=run.about.backfill,
        )
        plan = plan_next_run(
            run.spec,
            ended,
            self._wanted.failure_backoff,
            self._wanted.jitter.failure_backoff_ratio,
            self._chance(),
        )
        if run.outcome is AgentOutcome.CANCELLED:
            spread_ms = round(self._wanted.jitter.shutdown_seconds * 1000 * self._chance())
            plan = NextRun(now_ms + spread_ms, plan.slot_ms, plan.streak)
        self.add_end(
            AgentRunEnd(
                name=run.name,
                run=run.number,
                outcome=run.outcome,
                took_ms=took_ms,
                plan=plan,
                failure=run.failure,
                error=run.error,
            ),
            run.spec.group,
            soon=plan.due_ms is not None and plan.due_ms - now_ms < FLUSH_DELAY_S * 1000,
        )

    def add_end(self, end: AgentRunEnd, group: str, *, soon: bool = False) -> None:
        self._unended.append((end, group))
        self.some.set()
        if soon or len(self._unended) >= FLUSH_THRESHOLD:
            self.hurry.set()

    def add_finished(self, over: FinishedRun, group: str) -> None:
        """A move in Redis, of what PostgreSQL knows to be over or never knew."""
        self._unmoved.setdefault(group, deque()).append(over)
        self.some.set()

    async def flush_to_postgres(self, lease: Lease) -> None:
        """Tell PostgreSQL all there is by now. What raises is not lost: the next call goes on."""
        async with self._turn:
            while self._unended:
                batch = list(islice(self._unended, BATCH_MAX))
                await self._record_ends(lease, batch)
                for _ in batch:
                    self._unended.popleft()
            self._clear_signals()

    async def flush_to_redis(self) -> None:
        """Tell Redis what PostgreSQL knows already. What raises is not lost here, either."""
        async with self._turn:
            failures = []
            for group, waiting in list(self._unmoved.items()):
                try:
                    while waiting:
                        await self._flush_group_to_redis(group, waiting)
                except ScriptFailed as failed:
                    failures.append(failed)  # keys of this group are damaged; the others are moved all the same
            self._clear_signals()
            if failures:
                raise failures[0]

    async def _flush_group_to_redis(self, group: str, waiting: deque[FinishedRun]) -> None:
        batch = list(islice(waiting, BATCH_MAX))
        try:
            await self._sets(group).finish(batch)
        except (RotaError, OSError):
            self._note_failure(len(batch))
            raise
        for each in batch:
            waiting.popleft()
            if each.due_ms is not None:
                self._moved(each.due_ms)
        self._note_success(len(batch))

    def _clear_signals(self) -> None:
        if not self.pending_count:
            self.some.clear()
        if not self._unended:
            self.hurry.clear()

    def discard_unrecorded(self) -> int:
        """The lease is lost: what PostgreSQL has not ended is not ours any more."""
        lost = len(self._unended)
        self._unended.clear()
        return lost

    async def _record_ends(self, lease: Lease, batch: list[tuple[AgentRunEnd, str]]) -> None:
        groups = {end.name: group for end, group in batch}
        planned = await self._records.end(lease, [end for end, _ in batch])
        failpoints.hit("agents.after_end")
        for each in planned:
            self.add_finished(FinishedRun(each.name, each.run, each.due_ms, add=True), groups[each.name])
        known = {(each.name, each.run) for each in planned}
        self._ended(end for end, _ in batch if (end.name, end.run) in known)
        missing = [end for end, _ in batch if (end.name, end.run) not in known]
        if missing:
            await self._resync_missing(missing, groups)

    async def _resync_missing(self, missing: list[AgentRunEnd], groups: Mapping[str, str]) -> None:
        """Ended before, with the reply lost, or taken from us: Redis is told what PostgreSQL has now."""
        MISMATCHES.labels("end").inc(len(missing))
        standing = await self._records.run_status([end.name for end in missing])
        for end in missing:
            found = standing.get(end.name)
            due_ms = found.due_ms if found is not None and found.run is None else None
            self.add_finished(FinishedRun(end.name, end.run, due_ms), groups[end.name])

    def _note_failure(self, count: int) -> None:
        (RECOVERED.labels("false") if self._retried else EXHAUSTED).inc(count)
        self._retried = max(self._retried, count)

    def _note_success(self, count: int) -> None:
        if self._retried:
            RECOVERED.labels("true").inc(count)
            self._retried = 0
