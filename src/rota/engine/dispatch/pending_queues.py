"""What waits, and in which order it is looked at. One per dispatcher, in memory; PostgreSQL is asked again and again.

A spot is a queue at one priority: lanes whose frames are alike in all that placement and quota look at, so the first
frame that is refused speaks for all behind it. Order: the show furthest below its size in the pool, then priority with
ageing, then age. A spot that was refused is passed over until something changed that concerns it, or for a moment.

What is remembered here may be old: a spot that turns out to be empty costs one claim that finds nothing, one that was
not heard of waits for the next look at everything (`LOOK_S`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from rota.infra.clock import Clock
from rota.infra.postgres import Database, Record, query
from rota.model.ids import DeptId, FolderId, PoolId, ShowId
from rota.model.reasons import Reason
from rota.placement import PlacementRequirements
from rota.queue import Queue

CLASSES = query(__package__, "queue_classes")
SHARES = query(__package__, "shares")

POLL_INTERVAL_S: Final = 1.0
BACKOFF_S: Final = 1.0
BATCH_FRAMES_MAX: Final = 512
FAIR_BATCH_FRAMES_MAX: Final = 64
"""Frames of a round at most while several shows wait: the order is looked at again after so many."""
FAIR_BATCH_FRAMES_MIN: Final = 1
PROBE_FRAMES: Final = 16
AGEING_S: Final = 300.0
"""A frame that has waited this long counts as one priority higher."""

_CAPACITY_REASONS: Final = frozenset({Reason.NO_WORKERS, Reason.POOL_OVERLOADED})


class QueueKey(msgspec.Struct, frozen=True):
    """What a queue stands for."""

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
    """When its first frame came, by our monotonic clock."""
    told: bool = False
    """A notification named its queue since it was claimed from last."""
    busy: bool = False
    """A round of ours is claiming from it."""
    held_until_s: float = 0.0
    reason: Reason | None = None
    """Why it was passed over last."""
    unsettled: bool = False
    """The books could not be asked when it was tried last."""
    full: dict[PoolId, float] = {}
    """Pools in which its show has used up its share, or has none, and until when rounds go by them."""
    budget: int | None = None
    """After a limit refused: so many frames were released since, and may be tried. None: no limit is known."""


class PendingPosition(msgspec.Struct, frozen=True):
    """Other spots that are looked at before one, and how many frames of them wait."""

    spots: int = 0
    frames: int = 0
    by_share: int = 0
    """Spots of these that come first because their show uses less of its size."""


class PendingQueues:
    def __init__(self, database: Database, queue: Queue, clock: Clock) -> None:
        self.database = database
        self.queue = queue
        self.spots: dict[tuple[str, int], PendingQueue] = {}
        self._clock = clock
        self._keys: dict[str, QueueKey] = {}
        self._shares_at = float("-inf")
        self._shares: dict[tuple[ShowId, PoolId], tuple[int, int]] = {}

    async def refresh(self, queues: Sequence[str] | None = None) -> None:
        """Find out what waits in these queues, or everywhere."""
        now = self._clock.monotonic()
        found = await self.queue.candidates(queues)
        unknown = sorted({candidate.queue for candidate in found} - self._keys.keys())
        if unknown:
            for row in await self.database.rows(CLASSES, unknown):
                self._keys[row["queue"]] = queue_key_from_row(row)
        ages = await self.queue.head_ages_s([candidate.lane for candidate in found]) if found else {}
        for at, spot in self.spots.items():
            if queues is None or at[0] in queues:
                spot.waiting = spot.parked = 0
        for candidate in found:
            key = self._keys.get(candidate.queue)
            if key is None:
                continue
            spot = self.spots.setdefault(
                (candidate.queue, candidate.priority), PendingQueue(key, candidate.priority, [], since_s=now)
            )
            if candidate.lane not in spot.lanes:
                spot.lanes.append(candidate.lane)
            spot.waiting += candidate.waiting
            spot.parked += candidate.parked
            spot.since_s = min(spot.since_s, now - ages.get(candidate.lane, 0.0)) if spot.waiting else now
        self._evict_idle(queues)

    def mark_notified(self, queue: str) -> bool:
        """Something can be claimed from this queue; False if its lanes are not known yet."""
        known = [spot for (name, _), spot in self.spots.items() if name == queue]
        for spot in known:
            spot.waiting = max(spot.waiting, 1)
            spot.told = True
            if spot.reason is None:
                spot.held_until_s = 0.0
        return bool(known)

    async def refresh_shares(self) -> None:
        """If several shows wait, and what is known of their shares is old."""
        now = self._clock.monotonic()
        if self.shows_waiting() < 2 or now - self._shares_at < POLL_INTERVAL_S:
            return
        self._shares_at = now
        rows = await self.database.rows(SHARES)
        self._shares = {(row["pk_show"], row["pk_alloc"]): (row["size"], row["used"]) for row in rows}

    def add_usage(self, show: ShowId, pool: PoolId, cores: int) -> None:
        """Booked by us since the last look."""
        size, used = self._shares.get((show, pool), (0, 0))
        self._shares[show, pool] = (size, used + cores)

    def schedulable(self) -> list[PendingQueue]:
        """What may be worth a round now, the first first."""
        now = self._clock.monotonic()
        waiting = [
            spot
            for spot in self.spots.values()
            if spot.waiting > spot.parked and not spot.busy and spot.held_until_s <= now
        ]
        if len(waiting) < 2:
            return waiting
        fullness = self._share_usage()
        return sorted(waiting, key=lambda spot: _sort_key(spot, fullness.get(spot.key.show, (1, 0.0)), now))

    def position(self, queue: str, priority: int) -> PendingPosition:
        """What comes before the spot of this queue and priority, when there is room.

        What a limit refused a moment ago keeps nobody waiting; what waits for room on workers does.
        """
        mine = self.spots.get((queue, priority))
        if mine is None:
            return PendingPosition()
        now, fullness = self._clock.monotonic(), self._share_usage()
        turns = {
            at: _sort_key(spot, fullness.get(spot.key.show, (1, 0.0)), now)
            for at, spot in self.spots.items()
            if spot is mine
            or (spot.waiting > spot.parked and (spot.held_until_s <= now or spot.reason is Reason.POOL_OVERLOADED))
        }
        my_turn = turns.pop((queue, priority))
        first = [at for at, turn in turns.items() if turn < my_turn]
        frames = sum(self.spots[at].waiting - self.spots[at].parked for at in first)
        return PendingPosition(len(first), frames, sum(turns[at][:2] < my_turn[:2] for at in first))

    def back_off(self, spot: PendingQueue, reason: Reason, seconds: float = BACKOFF_S) -> None:
        spot.reason = reason
        spot.held_until_s = self._clock.monotonic() + seconds

    def mark_refused(self, spot: PendingQueue, reason: Reason) -> None:
        """The books said no: until frames of the show end there is no room for more, and a small try now and then."""
        self.back_off(spot, reason)
        spot.budget = 0
        spot.unsettled = reason is Reason.BOOKS_UNAVAILABLE

    def exclude_pool(self, spot: PendingQueue, pool: PoolId) -> None:
        """The show's share of a pool refused: the others that may run it are tried before it waits."""
        spot.reason = Reason.QUOTA_SUBSCRIPTION
        spot.full[pool] = self._clock.monotonic() + BACKOFF_S

    def excluded_pools(self, spot: PendingQueue) -> set[PoolId]:
        """Pools that are not worth a try now."""
        now = self._clock.monotonic()
        spot.full = {pool: until_s for pool, until_s in spot.full.items() if until_s > now}
        return set(spot.full)

    def no_capacity(self, spot: PendingQueue, reason: Reason) -> None:
        """No pool takes a frame of it now: where shares refused and no other pool could, until there is room in one."""
        if spot.full and reason is Reason.NO_WORKERS:
            spot.full = {}
            self.mark_refused(spot, Reason.QUOTA_SUBSCRIPTION)
        else:
            self.back_off(spot, reason)

    def mark_accepted(self, spot: PendingQueue) -> None:
        """All of a batch was booked: books that could not be asked can be."""
        if spot.unsettled:
            spot.unsettled = False
            spot.budget = None

    def frames_max(self, spot: PendingQueue) -> int:
        """How many frames of it are worth a try now."""
        fair = BATCH_FRAMES_MAX if self.shows_waiting() < 2 else self._fair_frames_max(spot)
        if spot.budget is None:
            return fair
        # Nothing was released for a while: one small try tells whether the limit has changed.
        return min(fair, spot.budget or PROBE_FRAMES)

    def _fair_frames_max(self, spot: PendingQueue) -> int:
        """While several shows wait: what its show is promised and does not use, or else a little at a time."""
        left = sum(max(0, size - used) for (show, _), (size, used) in self._shares.items() if show == spot.key.show)
        return max(FAIR_BATCH_FRAMES_MIN, min(FAIR_BATCH_FRAMES_MAX, left // max(1, spot.key.cls.need.cores)))

    def consume_budget(self, spot: PendingQueue, frames: int) -> None:
        if spot.budget is not None:
            spot.budget = max(0, spot.budget - frames)

    def capacity_released(self, show: ShowId | None = None, frames: int = 0) -> None:
        """Room was made, by so many frames of a show or in some other way for everybody: look at what was held."""
        for spot in self.spots.values():
            if show is None:
                spot.budget = None
                spot.full = {}
            elif spot.key.show != show:
                continue
            elif spot.budget is not None:
                spot.budget += frames
            spot.held_until_s = 0.0

    def workers_changed(self) -> None:
        """There may be room on workers that was not there: look at what waits for one."""
        for spot in self.spots.values():
            if spot.held_until_s and spot.reason in _CAPACITY_REASONS:
                spot.held_until_s = 0.0

    def shows_waiting(self) -> int:
        return len({spot.key.show for spot in self.spots.values() if spot.waiting > spot.parked})

    def frames_by_reason(self) -> Mapping[str, int]:
        """Frames that may be claimed, by why they were passed over last."""
        counted: dict[str, int] = {}
        for spot in self.spots.values():
            reason = (spot.reason or Reason.QUEUED).value
            counted[reason] = counted.get(reason, 0) + max(0, spot.waiting - spot.parked)
        return counted

    def _share_usage(self) -> dict[ShowId, tuple[int, float]]:
        """Of each show: whether it has a size at all, then how much of it is used."""
        sums: dict[ShowId, tuple[int, int]] = {}
        for (show, _), (size, used) in self._shares.items():
            before = sums.get(show, (0, 0))
            sums[show] = (before[0] + size, before[1] + used)
        return {show: (0, used / size) if size else (1, float(used)) for show, (size, used) in sums.items()}

    def _evict_idle(self, queues: Sequence[str] | None) -> None:
        """Lanes of queues in which nothing waits are found again by the next look."""
        if queues is None and len(self.spots) > 10_000:
            for at in [at for at, spot in self.spots.items() if not spot.waiting and not spot.busy]:
                del self.spots[at]


def _sort_key(spot: PendingQueue, fullness: tuple[int, float], now: float) -> tuple[int, float, float, float]:
    age_s = now - spot.since_s
    return (*fullness, -(spot.priority + age_s / AGEING_S), -age_s)


def queue_key_from_row(row: Record) -> QueueKey:
    """Out of a row of `CLASSES`."""
    return QueueKey(
        row["queue"],
        ShowId(row["pk_show"]),
        FolderId(row["pk_folder"]),
        DeptId(row["pk_dept"]),
        requirements_from_row(row),
    )


def requirements_from_row(row: Record) -> PlacementRequirements:
    """Of the columns of `rota.placement_class`."""
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
