"""The workers this replica knows, and where frames go. In memory: what is lost with the process is told again.

    plan = registry.plan(wanted, 512)
    held = registry.reserve(plan)              # at once, with no await in between
    ...                                        # claim and book
    registry.assigned(worker, runs, plan.need) # what was booked, before it is published
    registry.unreserve(held)                   # in any case, once

What holds, and who sees to it:
- A plan never goes beyond the free places, cores, GPUs and memory of a worker as far as they are booked by this replica
  or were settled from the books; `Worker.room` counts, and nothing is counted twice, since tokens name attempts.
- Room that was reserved is in no other plan until it is given back. Nothing here awaits, so a plan that is reserved at
  once is reserved as planned.
- A worker that has been silent for `ttl_s` is in no plan. An older heartbeat that comes late changes nothing, and one
  of a worker that was declared lost neither.
- Frames that a heartbeat lists and nobody here booked (another replica did, or we were started anew) leave the worker
  without further frames until `settle` has told what the books know of them.

Another replica may feed a worker at the same time, for a moment: the worker itself refuses what does not fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Final
from uuid import UUID

from rota.infra.clock import Clock, SystemClock
from rota.model.ids import PoolId
from rota.model.protocol import Heartbeat, TokenRange
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import RoutingSettings
from rota.placement import metrics
from rota.placement.explain import eligible_pools, explain
from rota.placement.plan import CapacityReservation, PlacementExplanation, PlacementPlan, WorkerShare
from rota.placement.ranking import WorkerRanking, pick_workers
from rota.placement.requirements import PlacementRequirements, Resources
from rota.placement.topic_routes import Pool, Routes
from rota.placement.workers import WorkerInfo, validate_heartbeat

SWEEP_INTERVAL_S: Final = 1.0
RANKINGS_MAX: Final = 512
RANKED_WORKERS_MAX: Final = 400_000
"""Workers in all views together; views that were not used for longest go first."""
LOST_WORKERS_MAX: Final = 10_000


class HeartbeatOutcome(StrEnum):
    """What became of a heartbeat."""

    NEW = "new"
    KNOWN = "known"
    LATE = "late"
    LOST = "lost"


class WorkerRegistry:
    """`on_room` is called whenever frames may fit that did not before: the dispatcher looks again."""

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
        self.ttl_s = ttl_s
        self.on_room: Callable[[], None] = _noop
        self._clock = clock or SystemClock()
        self._limits = limits or RoutingSettings()
        self._ties = random.Random(seed)  # noqa: S311 - keeps no secret, and a test may choose it
        self._fed: Callable[[UUID], bool] = _owns_all
        self._lost: dict[UUID, None] = {}
        self._views: dict[PlacementRequirements, list[WorkerRanking]] = {}
        self._changes: dict[WorkerInfo, int] = {}
        self._change = 0
        self._uses = 0
        self._shapes = 0
        self._sweep_at = 0.0

    def set_routes(self, routes: Routes) -> None:
        """From now on, by these pools and topics."""
        if routes != self.routes:
            self.routes = routes
            self._views.clear()
            self.on_room()

    def set_ownership(self, fed: Callable[[UUID], bool] | None) -> None:
        """Plan only for workers of which `fed` is true, as `feeding.feeds` tells; for all with None."""
        self._fed = fed or _owns_all
        for worker in self.workers.values():
            if worker.fed != self._fed(worker.id):
                worker.fed = not worker.fed
                self._mark_changed(worker)
        self.on_room()

    def record_heartbeat(self, beat: Heartbeat) -> HeartbeatOutcome:
        """Take over what a worker says. InvalidInput when it says what cannot be."""
        validate_heartbeat(beat)
        if beat.worker in self._lost:
            return HeartbeatOutcome.LOST
        worker = self.workers.get(beat.worker)
        came = HeartbeatOutcome.NEW if worker is None else HeartbeatOutcome.KNOWN
        if worker is None:
            worker = self._add_worker(WorkerInfo(beat.worker, beat.name, beat.pool, self._ties.random()))
        elif worker.confirmed and beat.number <= worker.number:
            return HeartbeatOutcome.LATE
        worker.seen_at = self._clock.monotonic()
        frames, blocked = worker.frames, worker.blocked
        reshaped = worker.apply_heartbeat(beat, self._limits)
        if reshaped:
            self._shapes += 1
            worker.shape = self._shapes
        self._mark_changed(worker)
        if reshaped or worker.frames < frames or (blocked and not worker.blocked):
            self.on_room()
        return came

    def hydrate(self, worker: WorkerInfo, age_s: float) -> bool:
        """Enter a worker that was read of and not heard; one that is known or too old is passed over."""
        if age_s >= self.ttl_s or worker.id in self.workers or worker.id in self._lost:
            return False
        worker.seen_at = self._clock.monotonic() - age_s
        worker.tie = self._ties.random()
        self._shapes += 1
        worker.shape = self._shapes
        self._mark_changed(self._add_worker(worker))
        self.on_room()
        return True

    def remove(self, worker: UUID, *, lost: bool = False) -> None:
        """It is gone. One that was declared `lost` is not taken up again, whatever it says."""
        if lost:
            self._lost[worker] = None
            if len(self._lost) > LOST_WORKERS_MAX:
                del self._lost[next(iter(self._lost))]
        known = self.workers.pop(worker, None)
        if known is not None:
            self._changes.pop(known, None)
            for views in self._views.values():
                for view in views:
                    view.remove(known)

    def sweep(self) -> int:
        """Forget workers that have been silent for too long."""
        horizon = self._clock.monotonic() - self.ttl_s
        silent = [worker.id for worker in self.workers.values() if worker.seen_at < horizon]
        for worker in silent:
            self.remove(worker)
        return len(silent)

    def age_s(self, worker: WorkerInfo) -> float:
        """How long ago it was heard."""
        return self._clock.monotonic() - worker.seen_at

    def record_allocations(self, worker: UUID, tokens: Iterable[TokenRange], need: Resources) -> None:
        """These were booked on the worker. Saying it again changes nothing."""
        known = self.workers.get(worker)
        if known is not None:
            known.add(tokens, need)
            self._mark_changed(known)

    def release_allocations(self, worker: UUID, tokens: Iterable[TokenRange]) -> int:
        """These no longer take room on the worker; how many were counted there."""
        known = self.workers.get(worker)
        if known is None:
            return 0
        removed = known.remove(tokens)
        self._mark_changed(known)
        self.on_room()
        return removed

    def unknown_frames(self) -> dict[UUID, list[TokenRange]]:
        """Workers we feed that list frames of which only the books know, and those frames."""
        return {worker.id: list(worker.unknown) for worker in self.workers.values() if worker.unsettled and worker.fed}

    def resolve_unknown_frames(
        self, worker: UUID, asked: Sequence[TokenRange], booked: Iterable[tuple[TokenRange, Resources]]
    ) -> None:
        """What the books know of the frames that `unsettled` told; the others count as strangers there."""
        known = self.workers.get(worker)
        if known is None:
            return
        known.resolve_unknown_frames(asked, booked)
        self._mark_changed(known)
        self.on_room()

    def plan(
        self,
        wanted: PlacementRequirements,
        n: int,
        workers: Collection[UUID] | None = None,
        *,
        without: Collection[PoolId] = (),
    ) -> PlacementPlan:
        """Where `n` frames of a class would go now: on these workers alone, if any are named, `without` these pools.

        Naming workers costs a look at each of them: for whom a replica feeds, `feed_by` is told once.
        """
        assert n > 0, "a plan is for one frame at least"
        now = self._clock.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_INTERVAL_S
            self.sweep()
        views = [view for view in self._current_rankings(wanted) if view.pool.id not in without]
        plan = self._make_plan(wanted, n, views, self._select_workers(workers), now)
        metrics.count_planned(plan.planned, n - plan.planned, plan.refusal)
        return plan

    def preview_plan(self, wanted: PlacementRequirements, n: int, *, without: Collection[PoolId] = ()) -> PlacementPlan:
        """The plan that all replicas together would come to now, for whoever only wants to know: whoever feeds them.

        Costs a look at every worker, and is not counted as a place that was looked for.
        """
        assert n > 0, "a plan is for one frame at least"
        self.sweep()
        pools = [pool for pool in eligible_pools(wanted, self.routes).pools if pool.id not in without]
        views = [WorkerRanking(wanted, pool, everyone=True) for pool in pools]
        for view in views:
            view.update(self.workers.values())
        return self._make_plan(wanted, n, views, None, self._clock.monotonic())

    def _make_plan(
        self,
        wanted: PlacementRequirements,
        n: int,
        views: list[WorkerRanking],
        only: list[WorkerInfo] | None,
        now: float,
    ) -> PlacementPlan:
        shares, room = pick_workers(views, n, self._workers_named(wanted.preferred_worker), only, now - self.ttl_s)
        portions = [WorkerShare(worker.id, pool.name, pool.id, k) for pool, worker, k in shares]
        left = n - sum(portion.n for portion in portions)
        refusal = self._refusal_reason(wanted, views) if left else None
        chosen = [worker for _, worker, _ in shares]
        return PlacementPlan(n, wanted.need, portions, chosen, room, refusal, partial(self.explain, wanted))

    def reserve(self, plan: PlacementPlan) -> CapacityReservation:
        """Take the room of a plan that was made just now."""
        shares = plan.shares()
        for worker, n in shares:
            worker.reserve(plan.need, n)
            self._uses += 1
            worker.used = self._uses
            self._mark_changed(worker)
        return CapacityReservation(plan.need, shares)

    def unreserve(self, held: CapacityReservation) -> None:
        """Give it back. The second time there is nothing to give back."""
        shares, held.shares = held.shares, []
        for worker, n in shares:
            worker.reserve(held.need, -n)
            self._mark_changed(worker)

    def fitting_frames(self, wanted: PlacementRequirements) -> int:
        """How many frames of the class fit now on the workers we feed."""
        return sum(view.room for view in self._current_rankings(wanted))

    def explain(self, wanted: PlacementRequirements, pools: Collection[Pool] | None = None) -> PlacementExplanation:
        """Why frames of the class are not placed, looking at every worker; of those that may run it, in these pools."""
        self.sweep()
        return explain(wanted, self.routes, self.workers.values(), pools)

    def _add_worker(self, worker: WorkerInfo) -> WorkerInfo:
        worker.fed = self._fed(worker.id)
        self.workers[worker.id] = worker
        return worker

    def _mark_changed(self, worker: WorkerInfo) -> None:
        self._change += 1
        self._changes.pop(worker, None)
        if self.workers.get(worker.id) is worker:
            self._changes[worker] = self._change

    def _current_rankings(self, wanted: PlacementRequirements) -> list[WorkerRanking]:
        """A view for each pool that may run the class now, in order."""
        views = self._views.pop(wanted, None)
        if views is None:
            views = self._new_rankings(wanted)
        # Pushed to the end: the first in line were not used for longest.
        self._views[wanted] = views
        for view in views:
            changed = []
            for worker, change in reversed(self._changes.items()):
                if change <= view.seen:
                    break
                changed.append(worker)
            view.update(changed)
            view.seen = self._change
        return views

    def _new_rankings(self, wanted: PlacementRequirements) -> list[WorkerRanking]:
        viewed = sum(len(view) for views in self._views.values() for view in views)
        while self._views and (viewed > RANKED_WORKERS_MAX or len(self._views) >= RANKINGS_MAX):
            viewed -= sum(len(view) for view in self._views.pop(next(iter(self._views))))
        return [WorkerRanking(wanted, pool) for pool in eligible_pools(wanted, self.routes).pools]

    def _workers_named(self, preferred: str | None) -> list[WorkerInfo]:
        """Workers that are so called or have this id."""
        if preferred is None:
            return []
        return [worker for worker in self.workers.values() if preferred in (worker.name, str(worker.id))]

    def _select_workers(self, workers: Collection[UUID] | None) -> list[WorkerInfo] | None:
        if workers is None:
            return None
        return [self.workers[worker] for worker in workers if worker in self.workers]

    def _refusal_reason(self, wanted: PlacementRequirements, views: list[WorkerRanking]) -> Reason:
        if any(view.matching for view in views):
            return Reason.POOL_OVERLOADED
        return eligible_pools(wanted, self.routes).reason or Reason.NO_WORKERS


def _owns_all(_worker: UUID) -> bool:
    return True


def _noop() -> None:
    return None
