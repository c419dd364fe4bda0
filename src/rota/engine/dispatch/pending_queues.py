"""Queues with waiting frames, in scheduling order, as one dispatcher knows them. No I/O: `pending_reader` reads them.

A `PendingQueue` is a queue at one priority: lanes whose frames have the same placement and quota requirements, so one
refused frame stands for all behind it. Order: the show furthest below its size in the pool, then what is below a
minimum, then priority with ageing, then age (`ordering`). The age is that of the first waiting frame as PostgreSQL
stores it, so it is the same on every replica and starts anew when a queue was empty. A refused queue is skipped until a
relevant change or until `BACKOFF_S` has passed.

Entries may be stale: an empty one costs a claim that returns nothing; one whose notification was missed waits for the
next full poll.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from rota.accounting.ledger import BookingBatch
from rota.engine.dispatch.minimums import MinimumKey, Minimums, minimum_keys
from rota.engine.dispatch.ordering import (
    FairBalances,
    QueueRank,
    ReleaseRate,
    SchedulingOrder,
    ShareGroup,
    ShareKey,
    ShareUsage,
    UseAverage,
    fair_frames_max,
    queue_rank,
    share_usage,
)
from rota.engine.dispatch.queue_groups import QueueGroups
from rota.engine.dispatch.series import ALONE, SeriesLength
from rota.engine.dispatch.share_rooms import ShareMoment, ShareReservation, ShareRooms
from rota.infra.clock import Clock
from rota.model.ids import DeptId, FolderId, PoolId, ShowId
from rota.model.quota import Ask, Refusal, Usage
from rota.model.reasons import Reason
from rota.placement import PlacementPlan, PlacementRequirements
from rota.queue import ClaimableLane

BACKOFF_S: Final = 1.0
UNSERVED_BACKOFF_S: Final = 60.0
"""While no worker can run the frames at all: a worker that comes ends the wait at once."""
ORDER_MAX_AGE_S: Final = 10.0
"""Queues are looked at again after this although all of them are held and nothing has changed."""
SAME_ARRIVAL_S: Final = 0.001
"""Times of arrival that differ by less are the same: they are computed from ages."""
BATCH_FRAMES_MAX: Final = 512
PROBE_FRAMES: Final = 16
TOGETHER_S: Final = 1.0
"""Queues of one priority whose first frames came within this time may be served in any order."""
ENTRIES_MAX: Final = 10_000

NOTHING: Final[Mapping[PoolId, Usage]] = {}
_CAPACITY_REASONS: Final = frozenset({Reason.NO_WORKERS, Reason.POOL_OVERLOADED})


class QueueKey(msgspec.Struct, frozen=True):
    """The requirements shared by all frames of a queue."""

    queue: str
    show: ShowId
    folder: FolderId
    dept: DeptId
    cls: PlacementRequirements


class PendingQueue(msgspec.Struct, eq=False):
    key: QueueKey
    priority: int
    lanes: list[int]
    waiting: int = 0
    parked: int = 0
    since_s: float = 0.0
    """Arrival of its first frame, by the monotonic clock."""
    notified: bool = False
    """A notification named its queue since the last claim."""
    counted: bool = False
    """`waiting` was read since the last notification."""
    busy: bool = False
    """One of our rounds is claiming from it."""
    claimed: bool = False
    """The claim has ended: what is read from now on does not include its frames."""
    held_until_s: float = 0.0
    held_at_change: int = 0
    """How often workers had got room when it was held."""
    held_for_pools: object = None
    """No pool that may run it had a worker: the version of the pools at that time."""
    reason: Reason | None = None
    """Why it was skipped last."""
    unsettled: bool = False
    """Accounting was unavailable at the last attempt."""
    budget: int | None = None
    """After a quota refusal: frames released since, which may be tried. None: no limit is known."""
    released: int = 0
    """Frames that its show has released so far."""
    arrivals: int = 0
    """Counts notifications and returned frames: what arrives during a claim may not be in its result."""
    resets: int = 0
    """How often limits, workers or routes have changed so far."""
    series_length: SeriesLength = ALONE
    """How many frames of those that were claimed last share a slot."""
    alone: bool = False
    """Its last round failed, perhaps because of one of its frames: until a round succeeds it shares none."""

    @property
    def claimable(self) -> int:
        return self.waiting - self.parked

    def frames_claimable(self, most: int) -> int:
        """How many frames it may have, if it gets `most`: until it is counted it may have any number."""
        return min(most, self.claimable) if self.counted else most


class BookingMoment(NamedTuple):
    """What had been released when a booking was asked for."""

    released: int
    resets: int
    shares: ShareMoment


class PendingPosition(msgspec.Struct, frozen=True):
    """Queues that are scheduled before a given one, and how many of their frames."""

    queues: int = 0
    frames: int = 0
    by_share: int = 0
    """Those of the frames that come first because their show uses less of its size."""


class PendingQueues:
    def __init__(
        self,
        clock: Clock,
        pools_of: Callable[[PlacementRequirements], Sequence[PoolId]],
        pools_version: Callable[[], object] = lambda: None,
    ) -> None:
        """`pools_of`: the pools in which frames can run now, by their requirements; without any, all count. The answers
        are asked for again when `pools_version` has changed."""
        self.entries: dict[tuple[str, int], PendingQueue] = {}
        self.share_rooms = ShareRooms()
        self._minimums = Minimums()
        self._clock = clock
        self._pools_of = pools_of
        self._pools_version = pools_version
        self._by_queue: dict[str, list[PendingQueue]] = defaultdict(list)
        self._by_show: dict[ShowId, list[PendingQueue]] = defaultdict(list)
        self._shares: dict[ShareKey, tuple[int, int]] = {}
        """Size and use, in hundredths of cores."""
        self._reserved: Counter[ShareKey] = Counter()
        """Cores of rounds under way, which are not booked yet."""
        self._balances = FairBalances()
        self._contending: set[ShareKey] = set()
        """Shares of shows with frames that would start in the pool if it had room, when the order was last made."""
        self.changes = 0
        """Of what waits, other than by a count of all queues."""
        self._usage_version = 0
        self._release_rates: dict[ShareKey, ReleaseRate] = defaultdict(ReleaseRate)
        """In hundredths of cores."""
        self._use_averages: dict[ShareKey, UseAverage] = defaultdict(UseAverage)
        """In hundredths of cores, without rounds under way."""
        self._capacity_changes = 0
        self._hold_changes = 0
        """Of what makes a queue eligible, other than by time, workers and pools."""
        self._all_held: tuple[int, int, object] | None = None
        """No queue was eligible as of these changes."""
        self._all_held_until_s = 0.0
        self._groups: QueueGroups[PendingQueue] = QueueGroups(
            lambda pending: (pending.key.show, self._pools_of(pending.key.cls)),
            self._rank,
            lambda at: self._usage_of(*at),
            lambda pending: pending.waiting > pending.parked,
        )

    def add(self, pending: PendingQueue) -> PendingQueue:
        self._hold_changes += 1
        self.entries[pending.key.queue, pending.priority] = pending
        self._by_queue[pending.key.queue].append(pending)
        self._by_show[pending.key.show].append(pending)
        self._groups.changed(pending)
        return pending

    def clear(self) -> None:
        self.entries.clear()
        self._by_queue.clear()
        self._by_show.clear()
        self._groups.reset()

    def arrivals(self, queues: Collection[str] | None) -> dict[tuple[str, int], int]:
        """By entry of these queues, or of all: what has arrived before a count begins."""
        return {at: pending.arrivals for at, pending in self.entries.items() if queues is None or at[0] in queues}

    def set_counts(
        self,
        found: Iterable[ClaimableLane],
        keys: Mapping[str, QueueKey],
        ages_s: Mapping[int, float],
        arrivals: Mapping[tuple[str, int], int],
        queues: Collection[str] | None,
    ) -> None:
        """What waits in these queues, or in all, was read; `arrivals` is from before."""
        self._hold_changes += 1
        now = self._clock.monotonic()
        for at in self.entries if queues is None else arrivals:
            if (pending := self.entries.get(at)) is not None:
                pending.waiting = pending.parked = 0
                # While a claim is under way, what it gets would be subtracted again.
                pending.counted = pending.claimed or not pending.busy
        for candidate in found:
            if (key := keys.get(candidate.queue)) is not None:
                self._count(candidate, key, ages_s, now)
        for at, before in arrivals.items():
            if (known := self.entries.get(at)) is not None and known.arrivals != before:
                # Frames that came meanwhile may not be in what was read.
                known.waiting = max(known.waiting, known.parked + 1)
                known.counted = False
                self._groups.changed(known)
        if queues is None:
            self._evict_idle()
        else:
            self.changes += 1

    def _count(self, lane: ClaimableLane, key: QueueKey, ages_s: Mapping[int, float], now: float) -> None:
        pending = self.entries.get((lane.queue, lane.priority))
        if pending is None:
            pending = self.add(PendingQueue(key, lane.priority, [], since_s=now, counted=True))
        if lane.lane not in pending.lanes:
            pending.lanes.append(lane.lane)
        pending.waiting += lane.waiting
        pending.parked += lane.parked
        if _set_age(pending, ages_s, now) or pending not in self._groups:
            self._groups.changed(pending)

    def set_shares(self, shares: Mapping[ShareKey, tuple[int, int]]) -> None:
        """Size and use of each share, as PostgreSQL has them."""
        self._shares = {}
        for at, (size, used) in shares.items():
            self._set_share(at, size, used)
        self._usage_version += 1

    def _set_share(self, at: ShareKey, size: int, used: int) -> None:
        self._shares[at] = (size, used)
        self._use_averages[at].set(used, self._clock.monotonic())

    def set_minimums(self, least: Mapping[MinimumKey, Usage], used: Mapping[MinimumKey, Usage]) -> None:
        """Minimums of folders and departments, and their use, as PostgreSQL has them."""
        if self._minimums.replace(least, used):
            self._groups.reset()

    def mark_notified(self, queue: str) -> bool:
        """Something can be claimed from this queue; False if its lanes are not known yet."""
        self._hold_changes += 1
        matching = self._by_queue.get(queue, [])
        self.changes += 1
        for pending in matching:
            if pending.waiting <= pending.parked:
                pending.since_s = self._clock.monotonic()
                self._groups.changed(pending)
            elif pending not in self._groups:
                self._groups.changed(pending)
            pending.waiting = max(pending.waiting, pending.parked + 1)
            pending.arrivals += 1
            pending.notified = True
            pending.counted = False
            if pending.reason is None:
                pending.held_until_s = 0.0
        return bool(matching)

    def order(self) -> SchedulingOrder[PendingQueue]:
        """Queues eligible for a round, in scheduling order."""
        now, pools_version = self._clock.monotonic(), self._pools_version()
        eligible = partial(self._is_eligible, now=now, pools_version=pools_version)
        changes = (self._hold_changes, self._capacity_changes, pools_version)
        first: list[ShareGroup[PendingQueue]] = []
        if changes != self._all_held or now >= self._all_held_until_s:
            groups = self._current_groups(now)
            self._update_balances(now)
            for group in groups:
                group.at = 0
                if group.skip_to(eligible):
                    first.append(group)
            self._note_all_held(None if first else changes, now)
        shows = {group.queues[0].key.show for group in first}
        return SchedulingOrder(first, eligible, shows=len(shows), usage_version=lambda: self._usage_version)

    def _note_all_held(self, changes: tuple[int, int, object] | None, now: float) -> None:
        """So that queues that only wait are not looked at in every turn. Their holds are read when they are held for a
        second turn: in a busy farm something has changed by then."""
        if changes is not None and changes == self._all_held:
            held = [each.held_until_s for each in self.entries.values() if each.waiting > each.parked]
            self._all_held_until_s = min([now + ORDER_MAX_AGE_S, *held])
        else:
            self._all_held_until_s = now
        self._all_held = changes

    def _is_eligible(self, pending: PendingQueue, now: float, pools_version: object) -> bool:
        if pending.waiting <= pending.parked:
            return False
        return pending.held_until_s <= now or not self._is_held(pending, now, pools_version)

    def _is_held(self, pending: PendingQueue, now: float, pools_version: object) -> bool:
        if pending.held_for_pools is not None:
            return pending.held_until_s > now and pending.held_for_pools == pools_version
        return pending.held_until_s > now and (
            pending.held_at_change == self._capacity_changes or pending.reason not in _CAPACITY_REASONS
        )

    def _current_groups(self, now: float) -> Collection[ShareGroup[PendingQueue]]:
        return self._groups.current(self.entries.values(), now, self._pools_version())

    def position(self, queue: str, priority: int) -> PendingPosition:
        """What is scheduled before this queue and priority, if nothing ends or arrives meanwhile.

        Queues in back-off after a quota refusal delay no other queue; queues that wait for worker capacity do, if they
        may run in the same pools. Queues of another show come first until it uses as much of its size, and queues below
        a minimum until they have reached it.
        """
        target = self.entries.get((queue, priority))
        if target is None:
            return PendingPosition()
        now, pools_version = self._clock.monotonic(), self._pools_version()
        target_key, pools = self._sort_key(target, now), set(self._pools_of(target.key.cls))
        # Queues of one group that came together have the same rank: their order is that of the group.
        group = next((each for each in self._current_groups(now) if target in each.queues), None)
        places = {pending: at for at, pending in enumerate(group.queues)} if group is not None else {}
        first: list[tuple[tuple[ShareUsage, QueueRank], PendingQueue]] = []
        for pending in self.entries.values():
            waits = pending is not target and pending.waiting > pending.parked
            if (
                waits
                and (not self._is_held(pending, now, pools_version) or pending.reason is Reason.POOL_OVERLOADED)
                and (not pools or not pools.isdisjoint(self._pools_of(pending.key.cls)))
            ):
                sort_key = self._sort_key(pending, now)
                if places[pending] < places[target] if pending in places else sort_key < target_key:
                    first.append((sort_key, pending))
        frames = by_share = 0
        lead: dict[ShowId, float] = {}  # what another show books before it is the turn of this one
        for (usage, _), pending in sorted(first, key=itemgetter(0)):
            ahead, show = pending.claimable, pending.key.show
            if show != target.key.show:
                cores = max(1, _ask(pending).cores)
                lead.setdefault(show, self._cores_until(show, self._pools_of(pending.key.cls), usage, target_key[0]))
                if (most := lead[show] / cores) < ahead:
                    ahead = max(0, math.ceil(most))
                lead[show] -= ahead * cores
                by_share += ahead if usage < target_key[0] else 0
            elif (lacks := self._lacks_frames(pending)) and queue_rank(
                pending.priority, now - pending.since_s
            ) > target_key[1]:
                ahead = min(ahead, lacks)
            frames += ahead
        return PendingPosition(len(first), frames, by_share)

    def _cores_until(self, show: ShowId, pools: Sequence[PoolId], usage: ShareUsage, other: ShareUsage) -> float:
        """How much the show books before its usage is above that of another one: hundredths of cores."""
        if usage[0] < other[0]:
            return math.inf  # shows without a size come last
        size = sum(self._shares[show, pool][0] for pool in pools if (show, pool) in self._shares)
        return max(1.0, (other[1] - usage[1]) * (size or 1))

    def back_off(self, pending: PendingQueue, reason: Reason, seconds: float = BACKOFF_S) -> None:
        self._hold_changes += 1
        pending.reason = reason
        pending.held_until_s = self._clock.monotonic() + seconds
        pending.held_at_change = self._capacity_changes
        pending.held_for_pools = None

    def mark_refused(
        self, pending: PendingQueue, reason: Reason, asked: BookingMoment | None = None, *, whole_show: bool = False
    ) -> None:
        """Quota refused: no further frames until frames of the show end, except for occasional small probes.

        `whole_show`: any frame of the show would be refused; its queues try again at the same time, so in order.

        A release since the booking was `asked` may have come after the refusal: it is not announced again, so try again
        at once.
        """
        pending.unsettled = reason is Reason.BOOKS_UNAVAILABLE
        pending.reason = reason
        if asked is not None and asked.resets != pending.resets:
            return
        pending.budget = 0 if asked is None else pending.released - asked.released
        if not pending.budget:
            self.back_off(pending, reason)
            for each in self._by_show[pending.key.show] if whole_show else ():
                if each.waiting > each.parked and each.held_for_pools is None:
                    self.back_off(each, reason)

    def moment(self, pending: PendingQueue) -> BookingMoment:
        return BookingMoment(pending.released, pending.resets, self.share_rooms.moment(pending.key.show))

    def share_refused(
        self,
        pending: PendingQueue,
        pool: PoolId,
        refusal: Refusal,
        asked: BookingMoment,
        reservation: ShareReservation | None = None,
    ) -> None:
        """The show's share of this pool refused frames, for which this is still reserved."""
        pending.reason = Reason.QUOTA_SUBSCRIPTION
        self.share_rooms.refused(pending.key.show, pool, refusal, asked.shares, self._clock.monotonic())
        if reservation is not None:
            self.share_rooms.attach(pending.key.show, reservation)

    def share_limits(self, pending: PendingQueue) -> dict[PoolId, int]:
        """How many frames may be tried in pools whose share has refused."""
        return self.share_rooms.frames_max(pending.key.show, _ask(pending), self._clock.monotonic())

    def reserve_share(self, pending: PendingQueue, plan: PlacementPlan) -> ShareReservation:
        """Count the frames of a plan as used by their show while its round is under way."""
        show, ask = pending.key.show, _ask(pending)
        portions = [(portion.pool_id, portion.n) for portion in plan.portions]
        for pool, n in portions:
            self._reserved[show, pool] += n * ask.cores
        self._usage_version += 1
        self._reserve_minimum(pending, ask, sum(n for _, n in portions))
        return self.share_rooms.reserve(show, ask, portions, self._clock.monotonic())

    def shrink_share(self, pending: PendingQueue, reservation: ShareReservation, frames: int) -> bool:
        """Keep a reservation for so many frames. Returns whether queues that found no room in a share may try again."""
        show, cores = pending.key.show, reservation.ask.cores
        for pool, _, n in reservation.parts:
            self._reserved[show, pool] -= n * cores
        before = sum(n for _, _, n in reservation.parts)
        freed = self.share_rooms.shrink(reservation, frames)
        for pool, _, n in reservation.parts:
            self._reserved[show, pool] += n * cores
        self._usage_version += 1
        shrunk = before - sum(n for _, _, n in reservation.parts)
        self._reserve_minimum(pending, reservation.ask, -shrunk)
        if freed:
            self._end_holds_at_share(show)
        return freed

    def _end_holds_at_share(self, show: ShowId) -> None:
        self._hold_changes += 1
        for pending in self._by_show[show]:
            if pending.reason is Reason.QUOTA_SUBSCRIPTION:
                pending.held_until_s = 0.0

    def _sort_key(self, pending: PendingQueue, now: float) -> tuple[ShareUsage, QueueRank]:
        usage = self._usage_of(pending.key.show, self._pools_of(pending.key.cls))
        return usage, self._rank(pending, now)

    def _rank(self, pending: PendingQueue, now: float) -> QueueRank:
        below = self._lacks_frames(pending) > 0
        return queue_rank(pending.priority, now - pending.since_s, below_minimum=below)

    def _lacks_frames(self, pending: PendingQueue) -> int:
        """How many of its frames bring its folder and department to their minimum."""
        if not self._minimums:
            return 0
        return self._minimums.frames_lacking(_minimum_keys(pending.key), _ask(pending))

    def _reserve_minimum(self, pending: PendingQueue, ask: Ask, frames: int) -> None:
        if self._minimums.reserve(_minimum_keys(pending.key), ask, frames):
            self._groups.reset()

    def _usage_of(self, show: ShowId, pools: Sequence[PoolId]) -> ShareUsage:
        """How much of the show's shares of these pools is in use, with rounds under way."""
        shares = [(show, pool) for pool in pools] if pools else [at for at in self._shares if at[0] == show]
        found = ((at, self._shares[at]) for at in shares if at in self._shares)
        return share_usage((size, used + self._reserved[at] - self._balances.of(at)) for at, (size, used) in found)

    def _update_balances(self, now: float) -> None:
        shares: dict[ShareKey, tuple[int, int]] = {}
        self._contending = self._find_contending(now)
        if len({show for show, _ in self._contending}) > 1:
            for at in self._contending:
                size, used = self._shares.get(at, (0, 0))
                if size:
                    shares[at] = (size, used + self._reserved[at])
        self._balances.update(shares, now)
        self._usage_version += 1

    def frames_booked(self, pending: PendingQueue, pool: PoolId, frames: int, asked: BookingMoment) -> None:
        """Add our own bookings since the last reload."""
        ask = _ask(pending)
        if self.share_rooms.booked(pending.key.show, pool, ask, frames, asked.shares):
            self._end_holds_at_share(pending.key.show)
        if self._minimums.add(_minimum_keys(pending.key), ask, frames):
            self._groups.reset()
        size, used = self._shares.get((pending.key.show, pool), (0, 0))
        self._set_share((pending.key.show, pool), size, used + frames * ask.cores)
        self._usage_version += 1

    def _subtract_usage(self, show: ShowId, by_pool: Mapping[PoolId, Usage]) -> None:
        now = self._clock.monotonic()
        self._usage_version += 1
        for pool, usage in by_pool.items():
            self._release_rates[show, pool].add(usage.cores, now)
            if (share := self._shares.get((show, pool))) is not None:
                self._set_share((show, pool), share[0], max(0, share[1] - usage.cores))

    def no_capacity(self, pending: PendingQueue, reason: Reason, limits: Mapping[PoolId, int]) -> None:
        """No pool accepts a frame now: workers, or the shares that these `limits` are of."""
        at_share = reason is Reason.NO_WORKERS and 0 in limits.values()
        unserved = reason is Reason.NO_WORKERS and not self._pools_of(pending.key.cls)
        if at_share:
            self._hold_until_probe(pending)
            return
        if not unserved:
            self.back_off(pending, reason)
            return
        self.back_off(pending, reason, UNSERVED_BACKOFF_S)
        pending.held_for_pools = self._pools_version()

    def _hold_until_probe(self, pending: PendingQueue) -> None:
        now = self._clock.monotonic()
        until_s = self.share_rooms.hold_until_s(pending.key.show, _ask(pending), now) or 0.0
        # A probe that is due waits for the end of a round, which ends the back-off.
        self.back_off(pending, Reason.QUOTA_SUBSCRIPTION, until_s - now if until_s > now else BACKOFF_S)

    def frames_returned(self, pending: PendingQueue, frames: int) -> None:
        """A round returned frames: a round that began meanwhile has not seen them."""
        self._hold_changes += 1
        self.changes += 1
        pending.waiting = max(pending.waiting, pending.parked) + frames
        pending.counted = False  # a count may or may not have seen them
        pending.arrivals += frames
        self._groups.changed(pending)

    def frames_claimed(
        self, pending: PendingQueue, asked: int, got: int, arrivals: int, *, ended: bool, slots: int | None = None
    ) -> None:
        """A claim of `asked` frames, when so much had arrived, got these. `ended`: the lanes had no more. `slots`: how
        many of them are charged, if some are in series."""
        self._hold_changes += 1
        self.changes += 1
        if pending.arrivals != arrivals:
            pending.counted = False
        if got == asked:
            pending.waiting = max(pending.waiting - got, pending.parked + (0 if pending.counted else 1))
        elif ended:
            pending.waiting = pending.parked + pending.arrivals - arrivals
        if pending.waiting > pending.parked:
            self._groups.changed(pending)  # it may have seemed to be empty meanwhile
        pending.reason = None
        if pending.budget is not None:
            pending.budget = max(0, pending.budget - (got if slots is None else min(got, slots)))

    def mark_accepted(self, pending: PendingQueue) -> None:
        """The whole batch was booked, so accounting is available again."""
        if pending.unsettled:
            pending.unsettled = False
            pending.budget = None

    def frames_max(self, pending: PendingQueue, room: int) -> int:
        """Maximum number of frames for the next round; `room`: how many of them fit on workers now."""
        lacking = self._lacks_frames(pending)
        if lacking > 0:  # above its minimum it has no precedence
            return min(lacking, self._fair_frames_max(pending, room))
        return self._fair_frames_max(pending, room)

    def _fair_frames_max(self, pending: PendingQueue, room: int) -> int:
        pools, cores = self._pools_of(pending.key.cls), max(1, _ask(pending).cores)
        shows = {show for show, pool in self._contending if pool in pools}
        if len(shows) < 2:
            return BATCH_FRAMES_MAX
        show, now = pending.key.show, self._clock.monotonic()
        size = all_sizes = all_used = 0
        used = lately = released_per_s = 0.0
        for at in self._contending:
            if at[1] in pools and at in self._shares:
                each_size, each_used = self._shares[at]
                in_use = each_used + self._reserved[at]
                all_sizes, all_used = all_sizes + each_size, all_used + in_use
                if at[0] == show:
                    size, used = size + each_size, used + in_use - self._balances.of(at)
                    lately += self._use_averages[at].at(now)
                    released_per_s += self._release_rates[at].per_s(now)
        if not size:
            # Shows with a size are served before, so what is free now is divided between shows without one.
            return min(BATCH_FRAMES_MAX, fair_frames_max(room / len(shows), 0.0, 0.0))
        fair_share = size / all_sizes * (all_used + room * cores)
        turnover_per_s = released_per_s / lately if lately >= 1.0 else 0.0
        return min(BATCH_FRAMES_MAX, fair_frames_max(fair_share / cores, used / cores, turnover_per_s))

    def _find_contending(self, now: float) -> set[ShareKey]:
        return {
            (group.queues[0].key.show, pool)
            for group in self._groups.latest() or self._current_groups(now)
            if any(self._is_contending(pending, now) for pending in group.queues)
            for pool in group.pools
        }

    @staticmethod
    def _is_contending(pending: PendingQueue, now: float) -> bool:
        held = pending.held_until_s > now and pending.reason not in _CAPACITY_REASONS
        return pending.waiting > pending.parked and not held

    def came_together(self, one: PendingQueue, other: PendingQueue) -> bool:
        """Whether neither of them has precedence that a user would notice."""
        return (
            one.priority == other.priority
            and abs(one.since_s - other.since_s) <= TOGETHER_S
            and (self._lacks_frames(one) > 0) == (self._lacks_frames(other) > 0)
        )

    def budget_of(self, pending: PendingQueue) -> int:
        """Maximum number of frames that quota may allow."""
        if pending.budget is None:
            return BATCH_FRAMES_MAX
        # Nothing was released for a while: a small probe detects whether the limit has changed.
        return pending.budget or PROBE_FRAMES

    def capacity_released(
        self, show: ShowId | None = None, frames: int = 0, by_pool: Mapping[PoolId, Usage] = NOTHING
    ) -> None:
        """Capacity was released, by so many frames of a show, or in general (`show` is None): end back-offs."""
        self._hold_changes += 1
        if show is None:
            self.share_rooms.reset()
        else:
            self.share_rooms.released(show, by_pool)
            self._subtract_usage(show, by_pool)
        for pending in self.entries.values() if show is None else self._by_show.get(show, ()):
            if show is None:
                pending.budget = None
                pending.resets += 1
            else:
                pending.released += frames
                if pending.budget is not None:
                    pending.budget += frames
                if pending.reason in _CAPACITY_REASONS:
                    continue  # it waits for workers, which are announced by `workers_changed`
            pending.held_until_s = 0.0

    def bookings_released(self, show: ShowId, released: BookingBatch) -> None:
        """These bookings of the show have ended: its folders and departments use less."""
        for group in released if self._minimums else ():
            charge = group.charge
            if self._minimums.add(minimum_keys(show, charge.folder, charge.dept), charge.ask, -len(group.tokens)):
                self._groups.reset()

    def workers_changed(self) -> None:
        """Workers may have free capacity: end back-offs that wait for workers."""
        self._capacity_changes += 1

    def shows_waiting(self) -> int:
        return len(self._shows_with_frames())

    def _shows_with_frames(self) -> set[ShowId]:
        return {show for show, queues in self._by_show.items() if any(each.waiting > each.parked for each in queues)}

    def frames_by_reason(self) -> Mapping[str, int]:
        """Claimable frames by the reason for which they were skipped last."""
        counts: dict[str, int] = {}
        for pending in self.entries.values():
            reason = (pending.reason or Reason.QUEUED).value
            counts[reason] = counts.get(reason, 0) + max(0, pending.waiting - pending.parked)
        return counts

    def _evict_idle(self) -> None:
        """Bound the cache; the next poll finds evicted lanes again."""
        if len(self.entries) > ENTRIES_MAX:
            kept = [pending for pending in self.entries.values() if pending.waiting or pending.busy]
            self.clear()
            for pending in kept:
                self.add(pending)


def _set_age(pending: PendingQueue, ages: Mapping[int, float], now: float) -> bool:
    """Its age, which is that of the first waiting frame of all its lanes; returns whether its arrival changed."""
    since_s = now - max(ages.get(lane, 0.0) for lane in pending.lanes)
    if abs(since_s - pending.since_s) < SAME_ARRIVAL_S:
        return False
    pending.since_s = since_s
    return True


def _minimum_keys(key: QueueKey) -> tuple[MinimumKey, MinimumKey]:
    return minimum_keys(key.show, key.folder, key.dept)


def _ask(pending: PendingQueue) -> Ask:
    need = pending.key.cls.need
    return Ask(need.cores, need.gpus)
