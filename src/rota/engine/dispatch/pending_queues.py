"""Queues with waiting frames, in scheduling order. One instance per dispatcher, in memory, polled from PostgreSQL.

A `PendingQueue` is a queue at one priority: lanes whose frames have the same placement and quota requirements, so one
refused frame stands for all behind it. Order: the show furthest below its size in the pool, then priority with ageing,
then age. The age is that of the first waiting frame as PostgreSQL stores it, so it is the same on every replica and
starts anew when a queue was empty. A refused queue is skipped until a relevant change or until `BACKOFF_S` has passed.

Entries may be stale: an empty one costs a claim that returns nothing; one whose notification was missed waits for the
next full poll (`POLL_INTERVAL_S`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from rota.engine.dispatch.fair_share import ShareUsage, fair_frames_max, scheduling_key, share_usage
from rota.engine.dispatch.share_rooms import ShareMoment, ShareReservation, ShareRooms
from rota.infra.clock import Clock
from rota.infra.postgres import Database, Record, query
from rota.model.ids import DeptId, FolderId, PoolId, ShowId
from rota.model.quota import Ask, Refusal, Usage
from rota.model.reasons import Reason
from rota.placement import PlacementPlan, PlacementRequirements
from rota.queue import Queue

CLASSES = query(__package__, "queue_classes")
SHARES = query(__package__, "shares")

POLL_INTERVAL_S: Final = 1.0
BACKOFF_S: Final = 1.0
BATCH_FRAMES_MAX: Final = 512
PROBE_FRAMES: Final = 16

NOTHING: Final[Mapping[PoolId, Usage]] = {}
_CAPACITY_REASONS: Final = frozenset({Reason.NO_WORKERS, Reason.POOL_OVERLOADED})


class QueueKey(msgspec.Struct, frozen=True):
    """The requirements shared by all frames of a queue."""

    queue: str
    show: ShowId
    folder: FolderId
    dept: DeptId
    cls: PlacementRequirements


class PendingQueue(msgspec.Struct):
    key: QueueKey
    priority: int
    lanes: list[int]
    waiting: int = 0
    parked: int = 0
    since_s: float = 0.0
    """Arrival of its first frame, by the monotonic clock."""
    notified: bool = False
    """A notification named its queue since the last claim."""
    busy: bool = False
    """One of our rounds is claiming from it."""
    held_until_s: float = 0.0
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


class BookingMoment(NamedTuple):
    """What had been released when a booking was asked for."""

    released: int
    resets: int
    shares: ShareMoment


class PendingPosition(msgspec.Struct, frozen=True):
    """Queues that are scheduled before a given one, and their waiting frames."""

    spots: int = 0
    frames: int = 0
    by_share: int = 0
    """Those of them that come first because their show uses less of its size."""


class PendingQueues:
    def __init__(
        self,
        database: Database,
        queue: Queue,
        clock: Clock,
        pools_of: Callable[[PlacementRequirements], Sequence[PoolId]],
    ) -> None:
        """`pools_of`: the pools in which frames can run now, by their requirements; without any, all count."""
        self.database = database
        self._pools_of = pools_of
        self.queue = queue
        self.entries: dict[tuple[str, int], PendingQueue] = {}
        self.share_rooms = ShareRooms()
        self._clock = clock
        self._keys: dict[str, QueueKey] = {}
        self._shares_at = float("-inf")
        self._shares: dict[tuple[ShowId, PoolId], tuple[int, int]] = {}
        """Size and use, in hundredths of cores."""
        self._reserved: Counter[tuple[ShowId, PoolId]] = Counter()
        """Cores of rounds under way, which are not booked yet."""

    async def refresh(self, queues: Sequence[str] | None = None) -> None:
        """Reload the waiting counts of these queues, or of all."""
        now = self._clock.monotonic()
        arrivals = {at: pending.arrivals for at, pending in self.entries.items() if queues is None or at[0] in queues}
        found = await self.queue.candidates(queues)
        unknown = sorted({candidate.queue for candidate in found} - self._keys.keys())
        if unknown:
            for row in await self.database.rows(CLASSES, unknown):
                self._keys[row["queue"]] = queue_key_from_row(row)
        ages = await self.queue.head_ages_s([candidate.lane for candidate in found]) if found else {}
        for at, pending in self.entries.items():
            if queues is None or at[0] in queues:
                pending.waiting = pending.parked = 0
        for candidate in found:
            key = self._keys.get(candidate.queue)
            if key is None:
                continue
            pending = self.entries.setdefault(
                (candidate.queue, candidate.priority), PendingQueue(key, candidate.priority, [], since_s=now)
            )
            if candidate.lane not in pending.lanes:
                pending.lanes.append(candidate.lane)
            pending.waiting += candidate.waiting
            pending.parked += candidate.parked
            _set_age(pending, ages, now)
        for at, before in arrivals.items():
            if (known := self.entries.get(at)) is not None and known.arrivals != before:
                # Frames that came meanwhile may not be in what was read.
                known.waiting = max(known.waiting, known.parked + 1)
        self._evict_idle(queues)

    def mark_notified(self, queue: str) -> bool:
        """Something can be claimed from this queue; False if its lanes are not known yet."""
        matching = [pending for (name, _), pending in self.entries.items() if name == queue]
        for pending in matching:
            if pending.waiting <= pending.parked:
                pending.since_s = self._clock.monotonic()
            pending.waiting = max(pending.waiting, 1)
            pending.arrivals += 1
            pending.notified = True
            if pending.reason is None:
                pending.held_until_s = 0.0
        return bool(matching)

    async def refresh_shares(self) -> None:
        """Reload shares if several shows wait and the cached values are old."""
        now = self._clock.monotonic()
        if self.shows_waiting() < 2 or now - self._shares_at < POLL_INTERVAL_S:
            return
        self._shares_at = now
        rows = await self.database.rows(SHARES)
        self._shares = {(row["pk_show"], row["pk_alloc"]): (row["size"], row["used"]) for row in rows}

    def schedulable(self) -> list[PendingQueue]:
        """Queues eligible for a round, in scheduling order."""
        now = self._clock.monotonic()
        waiting = [
            pending
            for pending in self.entries.values()
            if pending.waiting > pending.parked and pending.held_until_s <= now
        ]
        if len(waiting) < 2 or len({pending.key.show for pending in waiting}) < 2:
            ordered = sorted(waiting, key=lambda pending: self._sort_key(pending, now))
            return [pending for pending in ordered if not pending.busy]
        # A round takes a part of what is free; the rest is for the next show in order, even while that one is claiming.
        found: list[PendingQueue] = []
        claiming: set[PoolId] = set()
        for pending in sorted(waiting, key=lambda pending: self._sort_key(pending, now)):
            pools = self._pools_of(pending.key.cls)
            if pending.busy:
                claiming.update(pools)
            elif claiming.isdisjoint(pools):
                found.append(pending)
        return found

    def position(self, queue: str, priority: int) -> PendingPosition:
        """What is scheduled before this queue and priority.

        Queues in back-off after a quota refusal delay no other queue; queues that wait for worker capacity do.
        """
        target = self.entries.get((queue, priority))
        if target is None:
            return PendingPosition()
        now = self._clock.monotonic()
        sort_keys = {
            at: self._sort_key(pending, now)
            for at, pending in self.entries.items()
            if pending is target
            or (
                pending.waiting > pending.parked
                and (pending.held_until_s <= now or pending.reason is Reason.POOL_OVERLOADED)
            )
        }
        target_key = sort_keys.pop((queue, priority))
        first = [at for at, sort_key in sort_keys.items() if sort_key < target_key]
        frames = sum(self.entries[at].waiting - self.entries[at].parked for at in first)
        return PendingPosition(len(first), frames, sum(sort_keys[at][:2] < target_key[:2] for at in first))

    def back_off(self, pending: PendingQueue, reason: Reason, seconds: float = BACKOFF_S) -> None:
        pending.reason = reason
        pending.held_until_s = self._clock.monotonic() + seconds

    def mark_refused(self, pending: PendingQueue, reason: Reason, asked: BookingMoment | None = None) -> None:
        """Quota refused: no further frames until frames of the show end, except for occasional small probes.

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

    def moment(self, pending: PendingQueue) -> BookingMoment:
        return BookingMoment(pending.released, pending.resets, self.share_rooms.moment(pending.key.show))

    def share_refused(self, pending: PendingQueue, pool: PoolId, refusal: Refusal, asked: BookingMoment) -> None:
        """The show's share of this pool refused."""
        pending.reason = Reason.QUOTA_SUBSCRIPTION
        self.share_rooms.refused(pending.key.show, pool, refusal, asked.shares, self._clock.monotonic())

    def share_limits(self, pending: PendingQueue) -> dict[PoolId, int]:
        """How many frames may be tried in pools whose share has refused."""
        return self.share_rooms.frames_max(pending.key.show, _ask(pending), self._clock.monotonic())

    def reserve_share(self, pending: PendingQueue, plan: PlacementPlan) -> ShareReservation:
        """Count the frames of a plan as used by their show while its round is under way."""
        show, ask = pending.key.show, _ask(pending)
        portions = [(portion.pool_id, portion.n) for portion in plan.portions]
        for pool, n in portions:
            self._reserved[show, pool] += n * ask.cores
        return self.share_rooms.reserve(show, ask, portions, self._clock.monotonic())

    def shrink_share(self, pending: PendingQueue, reservation: ShareReservation, frames: int) -> bool:
        """Keep a reservation for so many frames. Returns whether queues that found no room in a share may try again."""
        show, cores = pending.key.show, reservation.ask.cores
        for pool, _, n in reservation.parts:
            self._reserved[show, pool] -= n * cores
        freed = self.share_rooms.shrink(reservation, frames)
        for pool, _, n in reservation.parts:
            self._reserved[show, pool] += n * cores
        for other in self.entries.values() if freed else ():
            if other.reason is Reason.QUOTA_SUBSCRIPTION and other.key.show == show:
                other.held_until_s = 0.0
        return freed

    def _sort_key(self, pending: PendingQueue, now: float) -> tuple[int, float, float, float]:
        return scheduling_key(self._usage_of(pending), pending.priority, now - pending.since_s)

    def _usage_of(self, pending: PendingQueue) -> ShareUsage:
        """How much of its show's shares is in use in the pools that may run its frames, with rounds under way."""
        show, pools = pending.key.show, self._pools_of(pending.key.cls)
        shares = [(show, pool) for pool in pools] if pools else [at for at in self._shares if at[0] == show]
        found = ((at, self._shares[at]) for at in shares if at in self._shares)
        return share_usage((size, used + self._reserved[at]) for at, (size, used) in found)

    def frames_booked(self, pending: PendingQueue, pool: PoolId, frames: int, asked: BookingMoment) -> None:
        """Add our own bookings since the last reload."""
        ask = _ask(pending)
        self.share_rooms.booked(pending.key.show, pool, ask, frames, asked.shares)
        size, used = self._shares.get((pending.key.show, pool), (0, 0))
        self._shares[pending.key.show, pool] = (size, used + frames * ask.cores)

    def _subtract_usage(self, show: ShowId, by_pool: Mapping[PoolId, Usage]) -> None:
        for pool, usage in by_pool.items():
            if (share := self._shares.get((show, pool))) is not None:
                self._shares[show, pool] = (share[0], max(0, share[1] - usage.cores))

    def no_capacity(self, pending: PendingQueue, reason: Reason, limits: Mapping[PoolId, int]) -> None:
        """No pool accepts a frame now: workers, or the shares that these `limits` are of."""
        at_share = reason is Reason.NO_WORKERS and 0 in limits.values()
        self.back_off(pending, Reason.QUOTA_SUBSCRIPTION if at_share else reason)

    def frames_returned(self, pending: PendingQueue, frames: int) -> None:
        """A round returned frames: a round that began meanwhile has not seen them."""
        pending.waiting = max(pending.waiting, frames)
        pending.arrivals += frames

    def mark_accepted(self, pending: PendingQueue) -> None:
        """The whole batch was booked, so accounting is available again."""
        if pending.unsettled:
            pending.unsettled = False
            pending.budget = None

    def frames_max(self, pending: PendingQueue, room: int) -> int:
        """Maximum number of frames for the next round; `room`: how many of them fit on workers now."""
        shows = self.shows_waiting()
        fair = BATCH_FRAMES_MAX if shows < 2 else min(BATCH_FRAMES_MAX, fair_frames_max(room, shows))
        if pending.budget is None:
            return fair
        # Nothing was released for a while: a small probe detects whether the limit has changed.
        return min(fair, pending.budget or PROBE_FRAMES)

    def consume_budget(self, pending: PendingQueue, frames: int) -> None:
        if pending.budget is not None:
            pending.budget = max(0, pending.budget - frames)

    def capacity_released(
        self, show: ShowId | None = None, frames: int = 0, by_pool: Mapping[PoolId, Usage] = NOTHING
    ) -> None:
        """Capacity was released, by so many frames of a show, or in general (`show` is None): end back-offs."""
        if show is None:
            self.share_rooms.reset()
        else:
            self.share_rooms.released(show, by_pool)
            self._subtract_usage(show, by_pool)
        for pending in self.entries.values():
            if show is None:
                pending.budget = None
                pending.resets += 1
            elif pending.key.show != show:
                continue
            else:
                pending.released += frames
                if pending.budget is not None:
                    pending.budget += frames
            pending.held_until_s = 0.0

    def workers_changed(self) -> None:
        """Workers may have free capacity: end back-offs that wait for workers."""
        for pending in self.entries.values():
            if pending.held_until_s and pending.reason in _CAPACITY_REASONS:
                pending.held_until_s = 0.0

    def shows_waiting(self) -> int:
        return len({pending.key.show for pending in self.entries.values() if pending.waiting > pending.parked})

    def frames_by_reason(self) -> Mapping[str, int]:
        """Claimable frames by the reason for which they were skipped last."""
        counts: dict[str, int] = {}
        for pending in self.entries.values():
            reason = (pending.reason or Reason.QUEUED).value
            counts[reason] = counts.get(reason, 0) + max(0, pending.waiting - pending.parked)
        return counts

    def _evict_idle(self, queues: Sequence[str] | None) -> None:
        """Bound the cache; the next poll finds evicted lanes again."""
        if queues is None and len(self.entries) > 10_000:
            for at in [at for at, pending in self.entries.items() if not pending.waiting and not pending.busy]:
                del self.entries[at]


def _set_age(pending: PendingQueue, ages: Mapping[int, float], now: float) -> None:
    """Its age, and its lanes, the longest waiting first: a claim drains one after the other."""
    pending.lanes.sort(key=lambda lane: ages.get(lane, -1.0), reverse=True)
    pending.since_s = now - ages.get(pending.lanes[0], 0.0)


def _ask(pending: PendingQueue) -> Ask:
    need = pending.key.cls.need
    return Ask(need.cores, need.gpus)


def queue_key_from_row(row: Record) -> QueueKey:
    """From a row of `CLASSES`."""
    return QueueKey(
        row["queue"],
        ShowId(row["pk_show"]),
        FolderId(row["pk_folder"]),
        DeptId(row["pk_dept"]),
        requirements_from_row(row),
    )


def requirements_from_row(row: Record) -> PlacementRequirements:
    """From the columns of `rota.placement_class`."""
    return PlacementRequirements.from_row(
        topic=row["topic"],
        requires=row["requires"],
        labels=msgspec.json.decode(row["labels"], type=dict[str, str]),
        preferred_pool=row["preferred_pool"],
        preferred_worker=row["preferred_worker"],
        cores=row["cores"],
        gpus=row["gpus"],
        memory_mb=row["memory_mb"],
    )
