"""What the next round takes: queues in scheduling order, frames of each, and where they would run. No I/O.

A round serves one queue, or several small ones of a show that may run in the same pools: what follows (claim, booking,
messages) costs about as much for many queues as for one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, takewhile
from typing import Final

from rota.engine.dispatch.ordering import SchedulingOrder
from rota.engine.dispatch.pending_queues import PendingQueue, PendingQueues
from rota.engine.dispatch.share_rooms import ShareReservation
from rota.model.ids import PoolId, ShowId
from rota.model.reasons import Reason
from rota.placement import CapacityReservation, PlacementPlan, WorkerRegistry
from rota.queue import LANES_MAX

QUEUES_MAX: Final = 64
"""Queues in one round."""
MISSES_MAX: Final = 4
"""Queues of which nothing fits, after which a round takes no more: the turn, which may be cut, goes on with them."""


class RoundPart:
    """The frames of one queue, and what is reserved for them."""

    __slots__ = ("arrivals", "pending", "plan", "reservation", "share")

    def __init__(
        self, pending: PendingQueue, plan: PlacementPlan, reservation: CapacityReservation, share: ShareReservation
    ) -> None:
        self.pending = pending
        self.plan = plan
        self.reservation = reservation
        self.share = share
        self.arrivals = pending.arrivals


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

    @property
    def frames(self) -> int:
        return sum(part.plan.planned for part in self.parts)

    def uses(self, pools: Collection[PoolId]) -> bool:
        """Whether some of its frames are to run in these pools."""
        return any(portion.pool_id in pools for part in self.parts for portion in part.plan.portions)


class RoundPlanner:
    def __init__(self, pending_queues: PendingQueues, registry: WorkerRegistry) -> None:
        self.pending_queues = pending_queues
        self.registry = registry

    def plan_round(
        self, pending: PendingQueue, order: SchedulingOrder[PendingQueue], under_way: Iterable[Round] = ()
    ) -> Round | None:
        """A round for this queue, which is the current one in the order, and for small ones behind it.

        None: no frame of it can be placed now, and its reason says why; or it is worth waiting for the rounds that are
        `under_way`. The queues of a round are busy from now on.
        """
        room = self.registry.fitting_frames(pending.key.cls)
        most = self.pending_queues.frames_max(pending, room)
        if room < pending.frames_claimable(most) and self._is_small(room, order, under_way):
            order.hold_pools()
            return None
        parts = self._plan_parts(pending, most, min(most, room), order)
        for each in parts:
            each.pending.busy = True
        return Round(parts) if parts else None

    def _plan_parts(
        self, pending: PendingQueue, most: int, room: int, order: SchedulingOrder[PendingQueue]
    ) -> list[RoundPart]:
        """Empty: nothing of the first queue fits."""
        parts: list[RoundPart] = []
        planned = lanes = misses = portion = 0
        for each, dividing in self._queues_of_round(pending, order):
            lanes += len(each.lanes)
            if parts and (planned >= most or lanes > LANES_MAX or misses == MISSES_MAX):
                break
            left = most - planned
            if dividing:
                portion = portion or max(1, (room - planned) // dividing)
                left = min(left, portion)
            part = self._plan_part(each, each.frames_claimable(left))
            if part is not None:
                parts.append(part)
                planned += part.plan.planned
            elif not parts:
                break
            else:
                misses += 1
        return parts

    def _queues_of_round(
        self, pending: PendingQueue, order: SchedulingOrder[PendingQueue]
    ) -> Iterator[tuple[PendingQueue, int]]:
        """Queues that a round may serve, in their order; and, if they divide what is left, their number.

        A queue that is not counted may have any number of frames, and a lower rank must not be served before them. So
        it and those that came together with it divide what is left, and are the last ones.
        """
        followers = () if pending.alone else (each for each in order.followers() if not each.alone)
        queues = islice(chain([pending], followers), QUEUES_MAX)
        for each in queues:
            if each.counted:
                yield each, 0
                continue
            together = [each, *takewhile(partial(self.pending_queues.came_together, each), queues)]
            yield from ((member, len(together)) for member in together)
            return

    @staticmethod
    def _is_small(room: int, order: SchedulingOrder[PendingQueue], under_way: Iterable[Round]) -> bool:
        """Whether a round that fills all room would be smaller than those that are under way in its pools.

        They end within milliseconds, and what workers release meanwhile is added to the room. Otherwise rounds of a
        full farm would be as small as what happens to be free at a moment, and each costs about as much as a large one.
        """
        return room < sum(each.frames for each in under_way if each.uses(order.group.pools))

    def _plan_part(self, pending: PendingQueue, most: int) -> RoundPart | None:
        queues, cls = self.pending_queues, pending.key.cls
        limits = queues.share_limits(pending)
        plan = self.registry.plan(cls, min(most, queues.budget_of(pending)), at_most=limits)
        if plan.portions:
            return RoundPart(pending, plan, self.registry.reserve(plan), queues.reserve_share(pending, plan))
        if plan.refusal is Reason.NO_POOL_MAPPING:
            pending.reason = plan.refusal  # waiting would not help
        else:
            queues.no_capacity(pending, plan.refusal or Reason.NO_WORKERS, limits)
        return None
