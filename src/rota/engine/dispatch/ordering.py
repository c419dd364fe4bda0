"""Fair share and ageing: which pending queue is served first, and how many frames it may take in a round. Pure.

Order: the show furthest below its size in the pools that may run the frames, then priority with ageing, then age. While
several shows wait, a round takes what its show lacks of its part, or what the show would run within a second: so rounds
are large where frames are short, and each show has its part over the seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, Generic, Protocol, TypeVar

from rota.model.ids import PoolId, ShowId

AGEING_S: Final = 300.0
"""Waiting this long counts as one priority level."""
AGEING_LEVELS_MAX: Final = 2.0
"""More than this many levels are not gained: a long job of low priority stays behind urgent ones."""
ROTATION_S: Final = 1.0
"""Shows that wait have their turns within about this time, as far as frames end that fast."""
MEMORY_S: Final = 5.0
"""For about this long it counts that a show has had more or less than its part."""

ShareUsage = tuple[int, float]
"""0 if the show has a size, else 1; then the fraction of the size (or the amount) in use."""
ShareKey = tuple[ShowId, PoolId]
QueueRank = tuple[float, float]
"""Order of the queues of one show: the smallest is served first."""


def share_usage(shares: Iterable[tuple[int, float]]) -> ShareUsage:
    """How much of these shares, each a size and its use, a show uses."""
    size, used = 0, 0.0
    for each_size, each_used in shares:
        size += each_size
        used += each_used
    return (0, used / size) if size else (1, used)


def queue_rank(priority: int, age_s: float) -> QueueRank:
    """The rank of a queue whose first frame has waited for `age_s`."""
    return (-(priority + min(age_s / AGEING_S, AGEING_LEVELS_MAX)), -age_s)


def fair_frames_max(part: float, used: float, turns_per_s: float) -> int:
    """Frames for a round while several shows wait. In frames: the show's part of what is in use and free, what it uses,
    and how often all its frames end and are replaced in a second.

    What is free is not for the first show alone. Where its frames end quickly, a round may take as many as it would run
    within `ROTATION_S`: the others have their turns soon, and the balance makes up for it.
    """
    return max(1, math.ceil(part - used), math.floor(part * turns_per_s * ROTATION_S))


class FairBalances:
    """How many cores less than its part each waiting show has used of a pool lately; negative: more.

    Use of the moment is no measure where rounds are large: the show that has its turn has everything. What was missed
    is made up for by half, and forgotten after `MEMORY_S`, so that long frames are not counted again and again. A show
    that does not wait has no balance: none is saved up.
    """

    def __init__(self) -> None:
        self._missed: dict[ShareKey, float] = {}
        """In core-seconds."""
        self._lacks: dict[ShareKey, float] = {}
        """By share of a waiting show: what it has less than its part."""
        self._used: dict[ShareKey, float] = {}
        """What it has used on average within about the last second."""
        self._shares: Mapping[ShareKey, tuple[int, int]] = {}
        self._at_s = 0.0

    def used_lately(self, share: ShareKey) -> float:
        return self._used.get(share, 0.0)

    def of(self, share: ShareKey) -> float:
        return self._missed.get(share, 0.0) / (2 * MEMORY_S)

    def update(self, shares: Mapping[ShareKey, tuple[int, int]], now_s: float) -> None:
        """`shares`: size and use of each share whose show waits."""
        kept, kept_short = math.exp((self._at_s - now_s) / MEMORY_S), math.exp(self._at_s - now_s)
        self._at_s = now_s
        self._used = {
            share: self.used_lately(share) * kept_short + used * (1 - kept_short)
            for share, (_, used) in self._shares.items()
            if share in shares
        }
        self._shares = shares
        self._missed = {
            share: self._missed.get(share, 0.0) * kept + lack * MEMORY_S * (1 - kept)
            for share, lack in self._lacks.items()
            if share in shares
        }
        sizes: Counter[PoolId] = Counter()
        in_use: Counter[PoolId] = Counter()
        for (_, pool), (size, used) in shares.items():
            sizes[pool] += size
            in_use[pool] += used
        self._lacks = {
            (show, pool): in_use[pool] * size / sizes[pool] - used for (show, pool), (size, used) in shares.items()
        }


class ReleaseRate:
    """How much is released in a second, averaged over about the last second."""

    __slots__ = ("_amount", "_at_s")

    def __init__(self) -> None:
        self._amount = 0.0
        self._at_s = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self._amount = self.per_s(now_s) + amount
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        return self._amount * math.exp(self._at_s - now_s) if self._amount else 0.0


class Schedulable(Protocol):
    @property
    def busy(self) -> bool:
        """A round is claiming from it."""
        ...


QueueT = TypeVar("QueueT", bound=Schedulable)
PoolT = TypeVar("PoolT")


class ShareGroup(Generic[QueueT, PoolT]):
    """Queues of one show that may run in the same pools: the use of its share orders them alike against other shows."""

    __slots__ = ("at", "pools", "queues", "ranks", "usage")

    def __init__(
        self, pools: Sequence[PoolT], ranked: Iterable[tuple[QueueRank, QueueT]], usage: Callable[[], ShareUsage]
    ) -> None:
        """`ranked`: best first."""
        pairs = list(ranked)
        self.pools = pools
        self.ranks = [rank for rank, _ in pairs]
        self.queues = [queue for _, queue in pairs]
        self.usage = usage
        self.at = 0

    def skip_to(self, eligible: Callable[[QueueT], bool]) -> bool:
        """Move to the next eligible queue; returns whether there is one."""
        queues = self.queues
        while self.at < len(queues) and not eligible(queues[self.at]):
            self.at += 1
        return self.at < len(queues)


class SchedulingOrder(Generic[QueueT, PoolT]):
    """The queues in scheduling order, as of each step: what rounds reserve between two steps counts.

    A queue that a round is claiming from keeps its place among shows: what is left after the part that the round takes
    is for the next show in order, which may be the same one. Within one show the next queue follows at once.
    """

    def __init__(
        self,
        groups: Iterable[ShareGroup[QueueT, PoolT]],
        eligible: Callable[[QueueT], bool],
        *,
        shows: int,
        usage_version: Callable[[], int],
    ) -> None:
        """`usage_version` changes whenever the usage of a group may have."""
        self._eligible = eligible
        self._one_show = shows < 2
        self._version = usage_version
        self._usage_at = usage_version()
        self._claiming: set[PoolT] = set()
        self._heap = [
            (*self._place(group), number, group) for number, group in enumerate(groups) if group.skip_to(eligible)
        ]
        heapify(self._heap)

    def __iter__(self) -> Iterator[QueueT]:
        while self._heap:
            self._update_usage()
            group = self.group
            if not group.skip_to(self._eligible) or not self._claiming.isdisjoint(group.pools):
                heappop(self._heap)
                continue
            queue = group.queues[group.at]
            if queue.busy and not self._one_show:
                self._claiming.update(group.pools)
                heappop(self._heap)
                continue
            if not queue.busy:
                yield queue
            if self._one_show or not queue.busy:
                group.at += 1
                self._move_first()

    @property
    def group(self) -> ShareGroup[QueueT, PoolT]:
        """The group of the current queue."""
        return self._heap[0][-1]

    def followers(self) -> Iterator[QueueT]:
        """Queues behind the current one in its group, which a round may serve together with it."""
        group = self.group
        for at in range(group.at + 1, len(group.queues)):
            queue = group.queues[at]
            if not queue.busy and self._eligible(queue):
                yield queue

    def skip_group(self) -> None:
        """Nothing more of the current group fits: go on with the next."""
        self.group.at = len(self.group.queues) - 1

    def _place(self, group: ShareGroup[QueueT, PoolT]) -> tuple[ShareUsage, QueueRank]:
        return group.usage(), group.ranks[min(group.at, len(group.ranks) - 1)]

    def _move_first(self) -> None:
        _, _, number, group = self._heap[0]
        if group.skip_to(self._eligible):
            heapreplace(self._heap, (*self._place(group), number, group))
        else:
            heappop(self._heap)

    def _update_usage(self) -> None:
        if (version := self._version()) != self._usage_at:
            self._usage_at = version
            self._heap = [(*self._place(group), number, group) for _, _, number, group in self._heap]
            heapify(self._heap)
