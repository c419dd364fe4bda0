"""Ends runs: first in PostgreSQL, which decides whether the run is still ours and when the next is due, then in Redis.

Both steps are retried in order for as long as the process lives; nothing is dropped. Ends that PostgreSQL has recorded
wait here through any Redis outage. A member that loses its lease drops ends that PostgreSQL has not recorded: other
members take those runs over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Final

import structlog

from rota.agents.redis_index.index import BATCH_MAX, AgentIndex, FinishedRun
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

EXHAUSTED = metrics.counter("rota_agents_schedule_retry_exhausted", "Agent updates that failed in Redis at first.")
RECOVERED = metrics.counter(
    "rota_agents_schedule_recovery", "Agent updates in Redis that were retried.", labels=("success",)
)
MISMATCHES = metrics.counter(
    "rota_agents_cas_contention", "Ends of runs that this member no longer owned.", labels=("location",)
)
FLUSH_DELAY_S: Final = 0.2
"""How long ends wait for others, to share a batch."""
FLUSH_THRESHOLD: Final = 50


class RunCompleter:
    """`index_of` returns the index of a shard group, `random` a number in [0, 1) for jitter.

    `on_moved` is called with due times written to Redis, `on_ended` with runs that PostgreSQL has ended.
    """

    def __init__(
        self,
        repository: AgentRepository,
        index_of: Callable[[str], AgentIndex],
        options: AgentSchedulerSettings,
        clock: Clock,
        random: Callable[[], float],
        on_moved: Callable[[int], None],
        on_ended: Callable[[Iterable[AgentRunEnd]], None],
    ) -> None:
        self._repository = repository
        self._index_of = index_of
        self._options = options
        self._clock = clock
        self._random = random
        self._on_moved = on_moved
        self._on_ended = on_ended
        self._unended: deque[tuple[AgentRunEnd, str]] = deque()
        self._unmoved: dict[str, deque[FinishedRun]] = {}
        self._retried = 0
        self._flush_lock = asyncio.Lock()
        self.has_pending = asyncio.Event()
        self.urgent = asyncio.Event()
        """Some agents are due again too soon to wait for a batch."""

    @property
    def pending_count(self) -> int:
        """Ends not yet recorded in both stores."""
        return len(self._unended) + sum(map(len, self._unmoved.values()))

    def add(self, run: ActiveRun) -> None:
        """Add a run that has ended here."""
        took_ms = max(0, round((self._clock.monotonic() - run.began_at) * 1000))
        now_ms = run.about.acquired_ms + took_ms
        result = AgentRunResult(
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
            result,
            self._options.failure_backoff,
            self._options.jitter.failure_backoff_ratio,
            self._random(),
        )
        if run.outcome is AgentOutcome.CANCELLED:
            spread_ms = round(self._options.jitter.shutdown_seconds * 1000 * self._random())
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
        self.has_pending.set()
        if soon or len(self._unended) >= FLUSH_THRESHOLD:
            self.urgent.set()

    def add_finished(self, run: FinishedRun, group: str) -> None:
        """Add a Redis transition of a run that has ended in PostgreSQL or never existed there."""
        self._unmoved.setdefault(group, deque()).append(run)
        self.has_pending.set()

    async def flush_to_postgres(self, lease: Lease) -> None:
        """Write all pending ends to PostgreSQL. After an exception the next call continues."""
        async with self._flush_lock:
            while self._unended:
                batch = list(islice(self._unended, BATCH_MAX))
                await self._record_ends(lease, batch)
                for _ in batch:
                    self._unended.popleft()
            self._clear_signals()

    async def flush_to_redis(self) -> None:
        """Write ends recorded in PostgreSQL to Redis. After an exception the next call continues."""
        async with self._flush_lock:
            failures = []
            for group, waiting in list(self._unmoved.items()):
                try:
                    while waiting:
                        await self._flush_group_to_redis(group, waiting)
                except ScriptFailed as failed:
                    failures.append(failed)  # the keys of this group are corrupt; continue with the others
            self._clear_signals()
            if failures:
                raise failures[0]

    async def _flush_group_to_redis(self, group: str, waiting: deque[FinishedRun]) -> None:
        batch = list(islice(waiting, BATCH_MAX))
        try:
            await self._index_of(group).finish(batch)
        except (RotaError, OSError):
            self._note_failure(len(batch))
            raise
        for each in batch:
            waiting.popleft()
            if each.due_ms is not None:
                self._on_moved(each.due_ms)
        self._note_success(len(batch))

    def _clear_signals(self) -> None:
        if not self.pending_count:
            self.has_pending.clear()
        if not self._unended:
            self.urgent.clear()

    def discard_unrecorded(self) -> int:
        """The lease is lost: runs that PostgreSQL has not ended are no longer ours."""
        lost = len(self._unended)
        self._unended.clear()
        return lost

    async def _record_ends(self, lease: Lease, batch: list[tuple[AgentRunEnd, str]]) -> None:
        groups = {end.name: group for end, group in batch}
        planned = await self._repository.end(lease, [end for end, _ in batch])
        failpoints.hit("agents.after_end")
        for each in planned:
            self.add_finished(FinishedRun(each.name, each.run, each.due_ms, add=True), groups[each.name])
        recorded = {(each.name, each.run) for each in planned}
        self._on_ended(end for end, _ in batch if (end.name, end.run) in recorded)
        missing = [end for end, _ in batch if (end.name, end.run) not in recorded]
        if missing:
            await self._resync_missing(missing, groups)

    async def _resync_missing(self, missing: list[AgentRunEnd], groups: Mapping[str, str]) -> None:
        """Ended before with a lost reply, or taken over: write the current state of PostgreSQL to Redis."""
        MISMATCHES.labels("end").inc(len(missing))
        statuses = await self._repository.run_status([end.name for end in missing])
        for end in missing:
            found = statuses.get(end.name)
            due_ms = found.due_ms if found is not None and found.run is None else None
            self.add_finished(FinishedRun(end.name, end.run, due_ms), groups[end.name])

    def _note_failure(self, count: int) -> None:
        (RECOVERED.labels("false") if self._retried else EXHAUSTED).inc(count)
        self._retried = max(self._retried, count)

    def _note_success(self, count: int) -> None:
        if self._retried:
            RECOVERED.labels("true").inc(count)
            self._retried = 0
