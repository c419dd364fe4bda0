"""What the next round takes: queues in scheduling order, frames of each, and where they would run. No I/O.

A round serves one queue, or several small ones of a show that may run in the same pools: what follows (claim, booking,
messages) costs about as much for many queues as for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, takewhile
from typing import Final, NamedTuple

from rota.engine.dispatch.ordering import SchedulingOrder
from rota.engine.dispatch.pending_queues import BATCH_FRAMES_MAX, PendingQueue, PendingQueues
from rota.engine.dispatch.series import ALONE, ROUND_FRAMES_MAX, frames_to_claim
from rota.engine.dispatch.share_rooms import ShareReservation
from rota.model.ids import ShowId
from rota.model.reasons import Reason
from rota.placement import CapacityReservation, PlacementPlan, WorkerRegistry
from rota.queue import LANES_MAX

QUEUES_MAX: Final = 128
"""Queues in one round."""
MISSES_MAX: Final = 4
"""Queues of which nothing fits, after which a round takes no more: the turn, which may be cut, goes on with them."""


class RoundPart:
    """The frames of one queue, and what is reserved for them."""

    __slots__ = ("arrivals", "frames", "pending", "plan", "reservation", "runs_series", "series_length", "share")

    def __init__(
        self,
        pending: PendingQueue,
        plan: PlacementPlan,
        reservation: CapacityReservation,
        share: ShareReservation,
        frames_max: int,
        *,
        runs_series: bool,
    ) -> None:
        """`frames_max`: what the other parts of its round have left for frames in series; `runs_series`: all servers
        and the workers of the plan know them."""
        self.pending = pending
        self.plan = plan
        self.reservation = reservation
        self.share = share
        self.arrivals = pending.arrivals
        self.runs_series = runs_series
        self.series_length = pending.series_length if runs_series else ALONE
        """How many frames each slot may get."""
        waiting = pending.claimable if pending.counted else None
        self.frames = frames_to_claim(plan.planned, self.series_length, waiting, frames_max)
        """To be claimed: one for each slot of the plan, or a series."""


class Round:
    """Frames of one show that are claimed and booked together."""

    __slots__ = ("begun", "parts")

    def __init__(self, parts: Sequence[RoundPart]) -> None:
        self.parts = parts
        self.begun = False
        """A task that is cancelled before it runs does not release what the round has reserved."""

    @property
    def show(self) -> ShowId:
        return self.parts[0].pending.key.show


class Candidate(NamedTuple):
    """A queue that a round may serve."""

    pending: PendingQueue
    dividing: int
    """So many, this one and those behind it, divide what is left; 0: it takes what waits in it."""
    room: int
    """The most frames of one of those that fit: a smaller number would leave room to lower ranks."""


class RoundPlanner:
    def __init__(
        self, pending_queues: PendingQueues, registry: WorkerRegistry, may_run_series: Callable[[], bool]
    ) -> None:
        """`may_run_series`: whether every server knows frames in series."""
        self.pending_queues = pending_queues
        self.registry = registry
        self._may_run_series = may_run_series

    def plan_round(self, pending: PendingQueue, order: SchedulingOrder[PendingQueue]) -> Round | None:
        """A round for this queue, which is the current one in the order, and for small ones behind it.

        None: no frame of it can be placed now, and its reason says why. The queues of a round are busy from now on.
        """
        most = self.pending_queues.frames_max(pending, self.registry.fitting_frames(pending.key.cls))
        parts: list[RoundPart] = []
        planned = divided = lanes = misses = frames = 0
        for each, dividing, room in self._queues_of_round(pending, order):
            lanes += len(each.lanes)
            if parts and (planned >= most or lanes > LANES_MAX or misses == MISSES_MAX):
                break
            left = most - planned
            if dividing:
                left = min(left, max(1, math.ceil((room - divided) / dividing)))
            part = self._plan_part(each, each.frames_claimable(left), max(0, ROUND_FRAMES_MAX - frames))
            if part is not None:
                parts.append(part)
                frames += part.frames
                planned += part.plan.planned
                divided += part.plan.planned if dividing else 0
            elif not parts:
                return None
            else:
                misses += 1
        for part in parts:
            part.pending.busy = True
        return Round(parts)

    def _queues_of_round(self, pending: PendingQueue, order: SchedulingOrder[PendingQueue]) -> Iterator[Candidate]:
        """Queues that a round may serve, in their order.

        A queue that is not counted may have any number of frames, and a lower rank must not be served before them. So
        it takes all that is left, or divides it with those that came together with it; they are the last ones.
        """
        followers = () if pending.alone else (each for each in order.followers() if not each.alone)
        queues = islice(chain([pending], followers), QUEUES_MAX)
        for each in queues:
            if each.counted:
                yield Candidate(each, 0, 0)
                continue
            together = takewhile(partial(self.pending_queues.came_together, each), queues)
            members = [each, *filter(self._is_unrefused, together)]
            room = max(map(self.room, members))
            yield from (Candidate(member, len(members) - at, room) for at, member in enumerate(members))
            return

    def _is_unrefused(self, pending: PendingQueue) -> bool:
        """Whether no quota of its own has refused frames: it might leave a part of what it gets to lower ranks."""
        return self.pending_queues.budget_of(pending) >= BATCH_FRAMES_MAX

    def room(self, pending: PendingQueue) -> int:
        """How many of its frames workers and the shares of its show have room for."""
        fitting, limits = self.registry.fitting_frames(pending.key.cls), self.pending_queues.share_limits(pending)
        if not limits:
            return fitting
        pools = self.registry.usable_pools(pending.key.cls)
        return min(fitting, sum(limits.get(pool, fitting) for pool in pools))

    def _plan_part(self, pending: PendingQueue, most: int, frames_max: int) -> RoundPart | None:
        queues, cls = self.pending_queues, pending.key.cls
        limits = queues.share_limits(pending)
        plan = self.registry.plan(cls, min(most, queues.budget_of(pending)), at_most=limits)
        if plan.portions:
            reservation, share = self.registry.reserve(plan), queues.reserve_share(pending, plan)
            runs_series = plan.runs_series and self._may_run_series()
            return RoundPart(pending, plan, reservation, share, frames_max, runs_series=runs_series)
        if plan.refusal is Reason.NO_POOL_MAPPING:
            pending.reason = plan.refusal  # waiting would not help
        else:
            queues.no_capacity(pending, plan.refusal or Reason.NO_WORKERS, limits)
        return None
