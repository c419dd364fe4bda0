"""The worker registry and planner of one replica. In memory: after a restart heartbeats rebuild it.

    plan = registry.plan(requirements, 512)
    reservation = registry.reserve(plan)                     # immediately, without an await in between
    ...                                                      # claim and book
    registry.record_allocations(worker, ranges, plan.need)   # booked frames, before they are published
    registry.unreserve(reservation)                          # in any case, once

Invariants and what enforces them:
- A plan never exceeds the free slots, cores, GPUs and memory of a worker, as far as this replica booked them or looked
  them up in PostgreSQL; `WorkerInfo.fitting_frames` counts, and nothing counts twice, since tokens name attempts.
- Reserved capacity is in no other plan until it is released. Nothing here awaits, so a plan that is reserved
  immediately is reserved as planned.
- A worker is in no plan when it was silent for longer than `ttl_s` and than the heartbeat interval of its session
  allows. A late older heartbeat changes nothing, nor does one of a worker that was declared lost.
- A worker whose heartbeat lists frames that were not booked here (another replica did, or this one restarted) gets no
  more frames until `resolve_unknown_frames` has applied what PostgreSQL knows of them.

Another replica may briefly dispatch to the same worker: the worker itself rejects what does not fit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Final
from uuid import UUID

from rota.infra.clock import Clock, SystemClock
from rota.model.ids import PoolId
from rota.model.protocol import Heartbeat
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import RoutingSettings
from rota.model.token_ranges import TokenRange
from rota.placement import metrics
from rota.placement.explain import eligible_pools, explain
from rota.placement.plan import CapacityReservation, PlacementExplanation, PlacementPlan, WorkerShare
from rota.placement.ranking import WorkerRanking, pick_workers
from rota.placement.requirements import PlacementRequirements, Resources
from rota.placement.topic_routes import Pool, Routes
from rota.placement.workers import BookedRange, WorkerInfo, validate_heartbeat

SWEEP_INTERVAL_S: Final = 1.0
RANKINGS_MAX: Final = 10_000
RANKED_WORKERS_MAX: Final = 400_000
"""Workers in all rankings together; the least recently used rankings are evicted."""
COUNT_RANKED_EVERY: Final = 16
"""New rankings after which those workers are counted."""
LOST_WORKERS_MAX: Final = 10_000
USABLE_POOLS_MAX: Final = 10_000
NO_LIMITS: Final[Mapping[PoolId, int]] = {}


class HeartbeatOutcome(StrEnum):
    """How a heartbeat was handled."""

    NEW = "new"
    KNOWN = "known"
    LATE = "late"
    LOST = "lost"


class WorkerRegistry:
    def __init__(
        self,
        clock: Clock | None = None,
        limits: RoutingSettings | None = None,
        *,
        ttl_s: float = 30.0,
        seed: int | None = None,
    ) -> None:
        self.workers: dict[UUID, WorkerInfo] = {}
        self.routes = Routes()
        self._pool_names: dict[PoolId, str] = {}
        self.ttl_s = ttl_s
        self.capacity_listeners: list[Callable[[], None]] = []
        """Called whenever more frames may fit than before, so that the dispatcher tries again."""
        self._clock = clock or SystemClock()
        self._limits = limits or RoutingSettings()
        self._ties = random.Random(seed)  # noqa: S311 - not a secret; tests may set the seed
        self._owned: Callable[[UUID], bool] = _owns_all
        self._lost: dict[UUID, None] = {}
        self._lost_heard: set[UUID] = set()
        self._refusals = 0
        """Plans that found no capacity at all."""
        self._unclaimed: set[CapacityReservation] = set()
        """Those of rounds that do not know yet how many frames they get, so most of them may be free."""
        self._rankings: dict[PlacementRequirements, list[WorkerRanking]] = {}
        self._rankings_made = 0
        self._changes: dict[WorkerInfo, int] = {}
        self._change = 0
        self._uses = 0
        self._shapes = 0
        self._removals = 0
        self._usable: dict[PlacementRequirements, tuple[PoolId, ...]] = {}
        self._usable_at = (0, 0)
        self._free: dict[WorkerInfo, str] = {}
        self._free_by_pool: Counter[str] = Counter()
        """Owned workers with a free slot that get frames."""
        self._populated: set[str] = set()
        """Names of pools with workers."""
        self._sweep_at = 0.0

    def set_routes(self, routes: Routes) -> None:
        """Route by these pools and topics from now on."""
        if routes != self.routes:
            self.routes = routes
            self._pool_names = {pool.id: name for name, pool in routes.pools.items()}
            self._shapes += 1
            self._rankings.clear()
            self._usable.clear()
            self._announce_capacity()

    def set_ownership(self, owned: Callable[[UUID], bool] | None) -> None:
        """Plan only for workers that `owned` accepts (see `worker_ownership.owns_worker`); for all with None."""
        self._owned = owned or _owns_all
        for worker in self.workers.values():
            if worker.owned != self._owned(worker.id):
                worker.owned = not worker.owned
                self._mark_changed(worker)
        self._announce_capacity()

    def take_lost_heard(self) -> set[UUID]:
        """Lost workers that have sent a heartbeat since the last call: they do not know yet that they are lost."""
        heard, self._lost_heard = self._lost_heard, set()
        return heard

    def _announce_capacity(self) -> None:
        for listener in self.capacity_listeners:
            listener()

    def record_heartbeat(self, beat: Heartbeat) -> HeartbeatOutcome:
        """Apply a heartbeat. Raises InvalidInput for impossible values."""
        validate_heartbeat(beat)
        if beat.worker in self._lost:
            self._lost_heard.add(beat.worker)
            return HeartbeatOutcome.LOST
        worker = self.workers.get(beat.worker)
        outcome = HeartbeatOutcome.NEW if worker is None else HeartbeatOutcome.KNOWN
        if worker is None:
            worker = self._add_worker(WorkerInfo(beat.worker, beat.name, beat.pool, self._ties.random()))
        elif worker.confirmed and beat.number <= worker.number:
            return HeartbeatOutcome.LATE
        worker.last_heartbeat_at = self._clock.monotonic()
        frames, blocked, ranked_by = worker.frames, worker.blocked, worker.ranked_by
        reshaped = worker.apply_heartbeat(beat, self._limits)
        worker.ttl_s = self._ttl_s_of(worker)
        if reshaped:
            self._shapes += 1
            worker.shape = self._shapes
        if reshaped or worker.ranked_by != ranked_by:
            self._mark_changed(worker)
        if reshaped or worker.frames < frames or (blocked and not worker.blocked):
            self._announce_capacity()
        return outcome

    def hydrate(self, worker: WorkerInfo, age_s: float) -> bool:
        """Add a worker from the snapshot, before its first heartbeat; a known or outdated one is skipped."""
        worker.ttl_s = self._ttl_s_of(worker)
        if age_s >= worker.ttl_s or worker.id in self.workers or worker.id in self._lost:
            return False
        worker.last_heartbeat_at = self._clock.monotonic() - age_s
        worker.tie = self._ties.random()
        self._shapes += 1
        worker.shape = self._shapes
        self._mark_changed(self._add_worker(worker))
        self._announce_capacity()
        return True

    def remove(self, worker: UUID, *, lost: bool = False) -> None:
        """Remove a worker. One declared `lost` is never added again, even if it sends heartbeats."""
        if lost:
            self._lost[worker] = None
            if len(self._lost) > LOST_WORKERS_MAX:
                del self._lost[next(iter(self._lost))]
        info = self.workers.pop(worker, None)
        if info is not None:
            self._removals += 1
            self._changes.pop(info, None)
            self._count_free(info, known=False)
            for rankings in self._rankings.values():
                for ranking in rankings:
                    ranking.remove(info)

    def sweep(self) -> int:
        """Remove workers that have been silent for too long."""
        now = self._clock.monotonic()
        silent = [worker.id for worker in self.workers.values() if worker.is_expired(now)]
        for worker in silent:
            self.remove(worker)
        return len(silent)

    def _ttl_s_of(self, worker: WorkerInfo) -> float:
        return max(self.ttl_s, worker.silent_after_s)

    def age_s(self, worker: WorkerInfo) -> float:
        """Seconds since its last heartbeat."""
        return self._clock.monotonic() - worker.last_heartbeat_at

    def record_allocations(
        self,
        worker: UUID,
        tokens: Iterable[TokenRange],
        need: Resources,
        *,
        series: Iterable[Sequence[TokenRange]] = (),
    ) -> None:
        """Record frames booked on the worker: single ones, and the ranges of each series. Idempotent."""
        info = self.workers.get(worker)
        if info is not None:
            info.add(tokens, need)
            for each in series:
                info.add(each, need, series=True)
            self._mark_changed(info)

    def release_allocations(self, worker: UUID, tokens: Iterable[TokenRange]) -> int:
        """Release the capacity of these frames; returns how many were allocated there."""
        info = self.workers.get(worker)
        if info is None:
            return 0
        removed = info.remove(tokens)
        self._mark_changed(info)
        self._announce_capacity()
        return removed

    def unknown_frames(self) -> dict[UUID, list[TokenRange]]:
        """Owned workers that list frames which only PostgreSQL can explain, and those frames."""
        return {
            worker.id: list(worker.unknown) for worker in self.workers.values() if worker.unsettled and worker.owned
        }

    def resolve_unknown_frames(self, worker: UUID, asked: Sequence[TokenRange], booked: Iterable[BookedRange]) -> None:
        """Apply what PostgreSQL knows of the frames from `unknown_frames`; the others count as unbooked."""
        info = self.workers.get(worker)
        if info is None:
            return
        info.resolve_unknown_frames(asked, booked)
        self._mark_changed(info)
        self._announce_capacity()

    def plan(
        self,
        requirements: PlacementRequirements,
        n: int,
        workers: Collection[UUID] | None = None,
        *,
        at_most: Mapping[PoolId, int] = NO_LIMITS,
    ) -> PlacementPlan:
        """Where `n` frames would go now: only on these workers, if given, and `at_most` so many in some pools.

        Passing workers costs a check of each: to plan for owned workers, use `set_ownership` once instead.
        """
        assert n > 0, "a plan is for one frame at least"
        now = self._clock.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_INTERVAL_S
            self.sweep()
        rankings = self._current_rankings(requirements)
        if at_most:
            rankings = [ranking for ranking in rankings if at_most.get(ranking.pool.id, n) > 0]
            n = max(1, min(n, sum(at_most.get(ranking.pool.id, n) for ranking in rankings)))
        plan = self._make_plan(requirements, n, rankings, self._select_workers(workers), now, at_most)
        metrics.count_planned(plan.planned, n - plan.planned, plan.refusal)
        if not plan.planned:
            self._refusals += 1
        return plan

    def preview_plan(
        self, requirements: PlacementRequirements, n: int, *, without: Collection[PoolId] = ()
    ) -> PlacementPlan:
        """The plan that all replicas together would make now, regardless of ownership; for explanations. What rounds
        have reserved that are still claiming is not told as full: it may be much more than they get.

        Costs a check of every worker, and is not counted in the metrics.
        """
        assert n > 0, "a plan is for one frame at least"
        self.sweep()
        pools = [pool for pool in eligible_pools(requirements, self.routes).pools if pool.id not in without]
        rankings = [WorkerRanking(requirements, pool, ignore_ownership=True) for pool in pools]
        with self._without_unclaimed():
            for ranking in rankings:
                ranking.update(self.workers.values())
            return self._make_plan(requirements, n, rankings, None, self._clock.monotonic())

    def _make_plan(
        self,
        requirements: PlacementRequirements,
        n: int,
        rankings: list[WorkerRanking],
        only: list[WorkerInfo] | None,
        now: float,
        at_most: Mapping[PoolId, int] = NO_LIMITS,
    ) -> PlacementPlan:
        preferred = self._workers_named(requirements.preferred_worker)
        shares, room = pick_workers(rankings, n, preferred, only, now, at_most)
        portions = [WorkerShare(worker.id, pool.name, pool.id, k) for pool, worker, k in shares]
        unplaced = n - sum(portion.n for portion in portions)
        refusal = self._refusal_reason(requirements, rankings) if unplaced else None
        chosen = [worker for _, worker, _ in shares]
        return PlacementPlan(n, requirements.need, portions, chosen, room, refusal, partial(self.explain, requirements))

    def reserve(self, plan: PlacementPlan) -> CapacityReservation:
        """Reserve the capacity of a plan made just now."""
        shares = plan.shares()
        for worker, n in shares:
            worker.reserve(plan.need, n)
            self._uses += 1
            worker.used = self._uses
            self._mark_changed(worker)
        reservation = CapacityReservation(plan.need, shares, self._refusals)
        self._unclaimed.add(reservation)
        return reservation

    @contextmanager
    def _without_unclaimed(self) -> Iterator[None]:
        """As if rounds that are still claiming got nothing."""
        unclaimed = [(each.need, each.shares) for each in self._unclaimed]
        for need, shares in unclaimed:
            for worker, n in shares:
                worker.reserve(need, -n)
        try:
            yield
        finally:
            for need, shares in unclaimed:
                for worker, n in shares:
                    worker.reserve(need, n)

    def spread_again(
        self, requirements: PlacementRequirements, plan: PlacementPlan, reservation: CapacityReservation, frames: int
    ) -> PlacementPlan:
        """The plan for fewer frames than it was made for, spread anew: the workers that it fills first would get them
        all. `reservation` is changed with it."""
        self._unclaimed.discard(reservation)
        if frames >= plan.planned or len(plan.portions) < 2 or not frames:
            self.shrink(reservation, frames)
            return plan
        before = reservation.shares
        for worker, n in before:
            worker.reserve(plan.need, -n)
            self._mark_changed(worker)
        at_most: Counter[PoolId] = Counter()
        for portion in plan.portions:
            at_most[portion.pool_id] += portion.n
        rankings = [ranking for ranking in self._current_rankings(requirements) if at_most[ranking.pool.id]]
        spread = self._make_plan(requirements, frames, rankings, None, self._clock.monotonic(), at_most)
        fits = spread.planned == frames
        reservation.shares = spread.shares() if fits else before
        for worker, n in reservation.shares:
            worker.reserve(plan.need, n)
            self._mark_changed(worker)
        if fits:
            self._announce_if_missed(reservation)
            return spread
        self.shrink(reservation, frames)  # workers have left meanwhile
        return plan

    def shrink(self, reservation: CapacityReservation, frames: int) -> None:
        """Keep the reservation for the first `frames` of the plan, and release the rest."""
        self._unclaimed.discard(reservation)
        kept: list[tuple[WorkerInfo, int]] = []
        released: list[tuple[WorkerInfo, int]] = []
        for worker, n in reservation.shares:
            keep = min(n, frames)
            frames -= keep
            if keep:
                kept.append((worker, keep))
            if keep < n:
                released.append((worker, n - keep))
        reservation.shares = kept
        self._release(reservation.need, released)
        if released:
            self._announce_if_missed(reservation)

    def unreserve(self, reservation: CapacityReservation, *, allocated: int = 0) -> None:
        """Release the reservation, of which so many frames were just allocated. Calling it again has no effect."""
        self._unclaimed.discard(reservation)
        shares, reservation.shares = reservation.shares, []
        self._release(reservation.need, shares)
        if sum(n for _, n in shares) > allocated:
            self._announce_if_missed(reservation)

    def _announce_if_missed(self, reservation: CapacityReservation) -> None:
        """Some of a reservation was released: plans that found no capacity since it was made may have missed that."""
        if self._refusals != reservation.refusals:
            self._announce_capacity()

    def _release(self, need: Resources, shares: Iterable[tuple[WorkerInfo, int]]) -> None:
        for worker, n in shares:
            worker.reserve(need, -n)
            self._mark_changed(worker)

    def usable_pools(self, requirements: PlacementRequirements) -> tuple[PoolId, ...]:
        """Pools that may run such frames and have workers."""
        if self._usable_at != (self._shapes, self._removals):
            self._usable_at = (self._shapes, self._removals)
            self._usable.clear()
            self._populated = {worker.pool for worker in self.workers.values()}
        pools = self._usable.get(requirements)
        if pools is None:
            if len(self._usable) >= USABLE_POOLS_MAX:
                self._usable.clear()
            found = eligible_pools(requirements, self.routes).pools
            pools = self._usable[requirements] = tuple(pool.id for pool in found if pool.name in self._populated)
        return pools

    @property
    def shape_version(self) -> tuple[int, int]:
        """Changes whenever the answers of `usable_pools` may have."""
        return self._shapes, self._removals

    def is_full(self, pools: Collection[PoolId]) -> bool:
        """Whether none of these pools has a worker with a free slot; false if there are no pools."""
        return bool(pools) and not any(self._free_by_pool[self._pool_names.get(pool, "")] for pool in pools)

    def refuses_all(self, pools: Collection[PoolId]) -> bool:
        """As `is_full`, and like a plan that found no capacity: what is released from a reservation is announced."""
        full = self.is_full(pools)
        self._refusals += full
        return full

    def fitting_frames(self, requirements: PlacementRequirements) -> int:
        """How many such frames fit now on owned workers."""
        return sum(ranking.room for ranking in self._current_rankings(requirements))

    def explain(
        self, requirements: PlacementRequirements, pools: Collection[Pool] | None = None
    ) -> PlacementExplanation:
        """Why frames are not placed, checking every worker of the eligible pools, or of these pools."""
        self.sweep()
        return explain(requirements, self.routes, self.workers.values(), pools)

    def _add_worker(self, worker: WorkerInfo) -> WorkerInfo:
        worker.owned = self._owned(worker.id)
        self.workers[worker.id] = worker
        return worker

    def _mark_changed(self, worker: WorkerInfo) -> None:
        self._change += 1
        self._changes.pop(worker, None)
        known = self.workers.get(worker.id) is worker
        if known:
            self._changes[worker] = self._change
        self._count_free(worker, known=known)

    def _count_free(self, worker: WorkerInfo, *, known: bool) -> None:
        if (before := self._free.pop(worker, None)) is not None:
            self._free_by_pool[before] -= 1
        if known and worker.owned and not worker.blocked and (worker.slots <= 0 or worker.frames < worker.slots):
            self._free[worker] = worker.pool
            self._free_by_pool[worker.pool] += 1

    def _current_rankings(self, requirements: PlacementRequirements) -> list[WorkerRanking]:
        """The ranking of each eligible pool, in order, brought up to date."""
        rankings = self._rankings.pop(requirements, None)
        if rankings is None:
            rankings = self._new_rankings(requirements)
        # Moved to the end: the first rankings are the least recently used.
        self._rankings[requirements] = rankings
        for ranking in rankings:
            changed = []
            for worker, change in reversed(self._changes.items()):
                if change <= ranking.last_change:
                    break
                changed.append(worker)
            ranking.update(changed)
            ranking.last_change = self._change
        return rankings

    def _new_rankings(self, requirements: PlacementRequirements) -> list[WorkerRanking]:
        self._rankings_made += 1
        if len(self._rankings) >= RANKINGS_MAX or self._rankings_made % COUNT_RANKED_EVERY == 0:
            self._evict_rankings()
        return [WorkerRanking(requirements, pool) for pool in eligible_pools(requirements, self.routes).pools]

    def _evict_rankings(self) -> None:
        """The least recently used ones, if there are too many. More than needed: it counts all of them."""
        ranked = sum(len(ranking) for rankings in self._rankings.values() for ranking in rankings)
        if ranked <= RANKED_WORKERS_MAX and len(self._rankings) < RANKINGS_MAX:
            return
        while self._rankings and (ranked > RANKED_WORKERS_MAX * 0.9 or len(self._rankings) >= RANKINGS_MAX * 0.9):
            ranked -= sum(len(ranking) for ranking in self._rankings.pop(next(iter(self._rankings))))

    def _workers_named(self, preferred: str | None) -> list[WorkerInfo]:
        """Workers with this name or id."""
        if preferred is None:
            return []
        return [worker for worker in self.workers.values() if preferred in (worker.name, str(worker.id))]

    def _select_workers(self, workers: Collection[UUID] | None) -> list[WorkerInfo] | None:
        if workers is None:
            return None
        return [self.workers[worker] for worker in workers if worker in self.workers]

    def _refusal_reason(self, requirements: PlacementRequirements, rankings: list[WorkerRanking]) -> Reason:
        if any(ranking.matching for ranking in rankings):
            return Reason.POOL_OVERLOADED
        return eligible_pools(requirements, self.routes).reason or Reason.NO_WORKERS


def _owns_all(_worker: UUID) -> bool:
    return True
