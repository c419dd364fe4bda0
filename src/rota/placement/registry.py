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
from rota.model.messages import Heartbeat, Run
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import Routing
from rota.placement import measures
from rota.placement.classes import Need, PlacementClass
from rota.placement.explaining import eligible, explain
from rota.placement.plans import Explanation, Plan, Portion, Reservation
from rota.placement.routes import Pool, Routes
from rota.placement.views import View, pick
from rota.placement.workers import Worker, checked

SWEEP_S: Final = 1.0
VIEWS_MAX: Final = 512
VIEWED_MAX: Final = 400_000
"""Workers in all views together; views that were not used for longest go first."""
LOST_MAX: Final = 10_000


class Beat(StrEnum):
    """What became of a heartbeat."""

    NEW = "new"
    KNOWN = "known"
    LATE = "late"
    LOST = "lost"


class Registry:
    """`on_room` is called whenever frames may fit that did not before: the dispatcher looks again."""

    def __init__(
        self, clock: Clock | None = None, limits: Routing | None = None, *, ttl_s: float = 30.0, seed: int | None = None
    ) -> None:
        self.workers: dict[UUID, Worker] = {}
        self.routes = Routes()
        self.ttl_s = ttl_s
        self.on_room: Callable[[], None] = _ignore
        self._clock = clock or SystemClock()
        self._limits = limits or Routing()
        self._ties = random.Random(seed)  # noqa: S311 - keeps no secret, and a test may choose it
        self._fed: Callable[[UUID], bool] = _everyone
        self._lost: dict[UUID, None] = {}
        self._views: dict[PlacementClass, list[View]] = {}
        self._changes: dict[Worker, int] = {}
        self._change = 0
        self._uses = 0
        self._shapes = 0
        self._sweep_at = 0.0

    def route(self, routes: Routes) -> None:
        """From now on, by these pools and topics."""
        if routes != self.routes:
            self.routes = routes
            self._views.clear()
            self.on_room()

    def feed_by(self, fed: Callable[[UUID], bool] | None) -> None:
        """Plan only for workers of which `fed` is true, as `feeding.feeds` tells; for all with None."""
        self._fed = fed or _everyone
        for worker in self.workers.values():
            if worker.fed != self._fed(worker.id):
                worker.fed = not worker.fed
                self._changed(worker)
        self.on_room()

    def heartbeat(self, beat: Heartbeat) -> Beat:
        """Take over what a worker says. InvalidInput when it says what cannot be."""
        checked(beat)
        if beat.worker in self._lost:
            return Beat.LOST
        worker = self.workers.get(beat.worker)
        came = Beat.NEW if worker is None else Beat.KNOWN
        if worker is None:
            worker = self._enter(Worker(beat.worker, beat.name, beat.pool, self._ties.random()))
        elif worker.confirmed and beat.number <= worker.number:
            return Beat.LATE
        worker.seen_at = self._clock.monotonic()
        frames, blocked = worker.frames, worker.blocked
        reshaped = worker.told(beat, self._limits)
        if reshaped:
            self._shapes += 1
            worker.shape = self._shapes
        self._changed(worker)
        if reshaped or worker.frames < frames or (blocked and not worker.blocked):
            self.on_room()
        return came

    def hydrate(self, worker: Worker, age_s: float) -> bool:
        """Enter a worker that was read of and not heard; one that is known or too old is passed over."""
        if age_s >= self.ttl_s or worker.id in self.workers or worker.id in self._lost:
            return False
        worker.seen_at = self._clock.monotonic() - age_s
        worker.tie = self._ties.random()
        self._shapes += 1
        worker.shape = self._shapes
        self._changed(self._enter(worker))
        self.on_room()
        return True

    def forget(self, worker: UUID, *, lost: bool = False) -> None:
        """It is gone. One that was declared `lost` is not taken up again, whatever it says."""
        if lost:
            self._lost[worker] = None
            if len(self._lost) > LOST_MAX:
                del self._lost[next(iter(self._lost))]
        known = self.workers.pop(worker, None)
        if known is not None:
            self._changes.pop(known, None)
            for views in self._views.values():
                for view in views:
                    view.drop(known)

    def sweep(self) -> int:
        """Forget workers that have been silent for too long."""
        horizon = self._clock.monotonic() - self.ttl_s
        silent = [worker.id for worker in self.workers.values() if worker.seen_at < horizon]
        for worker in silent:
            self.forget(worker)
        return len(silent)

    def age_s(self, worker: Worker) -> float:
        """How long ago it was heard."""
        return self._clock.monotonic() - worker.seen_at

    def assigned(self, worker: UUID, tokens: Iterable[Run], need: Need) -> None:
        """These were booked on the worker. Saying it again changes nothing."""
        known = self.workers.get(worker)
        if known is not None:
            known.add(tokens, need)
            self._changed(known)

    def freed(self, worker: UUID, tokens: Iterable[Run]) -> int:
        """These no longer take room on the worker; how many were counted there."""
        known = self.workers.get(worker)
        if known is None:
            return 0
        removed = known.remove(tokens)
        self._changed(known)
        self.on_room()
        return removed

    def unsettled(self) -> dict[UUID, list[Run]]:
        """Workers we feed that list frames of which only the books know, and those frames."""
        return {worker.id: list(worker.unknown) for worker in self.workers.values() if worker.unsettled and worker.fed}

    def settle(self, worker: UUID, asked: Sequence[Run], booked: Iterable[tuple[Run, Need]]) -> None:
        """What the books know of the frames that `unsettled` told; the others count as strangers there."""
        known = self.workers.get(worker)
        if known is None:
            return
        known.settle(asked, booked)
        self._changed(known)
        self.on_room()

    def plan(
        self,
        wanted: PlacementClass,
        n: int,
        workers: Collection[UUID] | None = None,
        *,
        without: Collection[PoolId] = (),
    ) -> Plan:
        """Where `n` frames of a class would go now: on these workers alone, if any are named, `without` these pools.

        Naming workers costs a look at each of them: for whom a replica feeds, `feed_by` is told once.
        """
        assert n > 0, "a plan is for one frame at least"
        now = self._clock.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self.sweep()
        views = [view for view in self._refreshed(wanted) if view.pool.id not in without]
        plan = self._planned(wanted, n, views, self._only(workers), now)
        measures.planned(plan.planned, n - plan.planned, plan.refusal)
        return plan

    def look(self, wanted: PlacementClass, n: int, *, without: Collection[PoolId] = ()) -> Plan:
        """The plan that all replicas together would come to now, for whoever only wants to know: whoever feeds them.

        Costs a look at every worker, and is not counted as a place that was looked for.
        """
        assert n > 0, "a plan is for one frame at least"
        self.sweep()
        pools = [pool for pool in eligible(wanted, self.routes).pools if pool.id not in without]
        views = [View(wanted, pool, everyone=True) for pool in pools]
        for view in views:
            view.update(self.workers.values())
        return self._planned(wanted, n, views, None, self._clock.monotonic())

    def _planned(
        self, wanted: PlacementClass, n: int, views: list[View], only: list[Worker] | None, now: float
    ) -> Plan:
        shares, room = pick(views, n, self._called(wanted.preferred_worker), only, now - self.ttl_s)
        portions = [Portion(worker.id, pool.name, pool.id, k) for pool, worker, k in shares]
        left = n - sum(portion.n for portion in portions)
        refusal = self._refusal(wanted, views) if left else None
        chosen = [worker for _, worker, _ in shares]
        return Plan(n, wanted.need, portions, chosen, room, refusal, partial(self.explain, wanted))

    def reserve(self, plan: Plan) -> Reservation:
        """Take the room of a plan that was made just now."""
        shares = plan.shares()
        for worker, n in shares:
            worker.reserve(plan.need, n)
            self._uses += 1
            worker.used = self._uses
            self._changed(worker)
        return Reservation(plan.need, shares)

    def unreserve(self, held: Reservation) -> None:
        """Give it back. The second time there is nothing to give back."""
        shares, held.shares = held.shares, []
        for worker, n in shares:
            worker.reserve(held.need, -n)
            self._changed(worker)

    def room(self, wanted: PlacementClass) -> int:
        """How many frames of the class fit now on the workers we feed."""
        return sum(view.room for view in self._refreshed(wanted))

    def explain(self, wanted: PlacementClass, pools: Collection[Pool] | None = None) -> Explanation:
        """Why frames of the class are not placed, looking at every worker; of those that may run it, in these pools."""
        self.sweep()
        return explain(wanted, self.routes, self.workers.values(), pools)

    def _enter(self, worker: Worker) -> Worker:
        worker.fed = self._fed(worker.id)
        self.workers[worker.id] = worker
        return worker

    def _changed(self, worker: Worker) -> None:
        self._change += 1
        self._changes.pop(worker, None)
        if self.workers.get(worker.id) is worker:
            self._changes[worker] = self._change

    def _refreshed(self, wanted: PlacementClass) -> list[View]:
        """A view for each pool that may run the class now, in order."""
        views = self._views.pop(wanted, None)
        if views is None:
            views = self._opened(wanted)
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

    def _opened(self, wanted: PlacementClass) -> list[View]:
        viewed = sum(len(view) for views in self._views.values() for view in views)
        while self._views and (viewed > VIEWED_MAX or len(self._views) >= VIEWS_MAX):
            viewed -= sum(len(view) for view in self._views.pop(next(iter(self._views))))
        return [View(wanted, pool) for pool in eligible(wanted, self.routes).pools]

    def _called(self, preferred: str | None) -> list[Worker]:
        """Workers that are so called or have this id."""
        if preferred is None:
            return []
        return [worker for worker in self.workers.values() if preferred in (worker.name, str(worker.id))]

    def _only(self, workers: Collection[UUID] | None) -> list[Worker] | None:
        if workers is None:
            return None
        return [self.workers[worker] for worker in workers if worker in self.workers]

    def _refusal(self, wanted: PlacementClass, views: list[View]) -> Reason:
        if any(view.matching for view in views):
            return Reason.POOL_OVERLOADED
        return eligible(wanted, self.routes).reason or Reason.NO_WORKERS


def _everyone(_worker: UUID) -> bool:
    return True


def _ignore() -> None:
    return None
