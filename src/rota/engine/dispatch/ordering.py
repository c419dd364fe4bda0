"""Fair share and ageing: which pending queue is served first, and how many frames it may take in a round. Pure.

Order: the show furthest below its size in the pools that may run the frames; within it, queues of folders and
departments below their minimum, then priority with ageing, then age.

While several shows wait, each has a fair share of a pool: its size divided by the sizes of all shows that wait for it.
A round takes what the show's use lacks of its fair share or, if its frames are short, what the show would run within a
second. So rounds of short frames are large, and every show gets its fair share on the average of some seconds.
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
"""Each show that waits gets a round within about this time, if frames end that fast."""
MEMORY_S: Final = 5.0
"""Use above or below the fair share affects the order for about this long."""

ShareUsage = tuple[int, float]
"""0 if the show has a size, else 1; then the fraction of the size (or the amount) in use."""
ShareKey = tuple[ShowId, PoolId]
QueueRank = tuple[int, float, float]
"""Order of the queues of one show: the smallest is served first."""


def share_usage(shares: Iterable[tuple[int, float]]) -> ShareUsage:
    """How much of these shares, each a size and its use, a show uses."""
    size, used = 0, 0.0
    for each_size, each_used in shares:
        size += each_size
        used += each_used
    return (0, used / size) if size else (1, used)


def queue_rank(priority: int, age_s: float, *, below_minimum: bool = False) -> QueueRank:
    """The rank of a queue whose first frame has waited for `age_s`."""
    return (0 if below_minimum else 1, -(priority + min(age_s / AGEING_S, AGEING_LEVELS_MAX)), -age_s)


def fair_frames_max(fair_share: float, used: float, turnover_per_s: float) -> int:
    """Maximum number of frames of a round while several shows wait.

    `fair_share`: the show's fair share of what is in use and free, in frames; `used`: its use; `turnover_per_s`: how
    often all its frames end and are replaced in a second. A round of short frames may exceed the fair share, because
    it is over within `ROTATION_S`, and `FairBalances` serves the other shows first afterwards.
    """
    # Not rounded up: that would make a whole frame of the smallest balance, and the last shows would get none.
    return max(1, math.floor(fair_share - used + 0.5), math.floor(fair_share * turnover_per_s * ROTATION_S))


class FairBalances:
    """How many cores below its fair share each waiting show has been in a pool lately; negative: above.

    Present use alone is no fair measure: a large round of one show may occupy the whole pool for a moment. A balance is
    half of the average deficit of the last `MEMORY_S` (half, so that corrections do not overshoot when frames are
    long). A show that stops waiting loses its balance, so no show can save up.
    """

    def __init__(self) -> None:
        self._deficits: dict[ShareKey, float] = {}
        """Average of about the last `MEMORY_S`."""
        self._shares: Mapping[ShareKey, tuple[int, int]] = {}
        self._at_s = 0.0

    def of(self, share: ShareKey) -> float:
        return self._deficits.get(share, 0.0) / 2

    def update(self, shares: Mapping[ShareKey, tuple[int, int]], now_s: float) -> None:
        """Count the time since the last update, and use these shares (size and use of each whose show waits) from now
        on."""
        weight = 1 - math.exp((self._at_s - now_s) / MEMORY_S)
        self._at_s = now_s
        sizes: Counter[PoolId] = Counter()
        in_use: Counter[PoolId] = Counter()
        for (_, pool), (size, used) in self._shares.items():
            sizes[pool] += size
            in_use[pool] += used
        deficits = {}
        for share, (size, used) in self._shares.items():
            if share in shares:
                deficit = in_use[share[1]] * size / sizes[share[1]] - used
                before = self._deficits.get(share, 0.0)
                deficits[share] = before + (deficit - before) * weight
        self._deficits, self._shares = deficits, shares


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


class UseAverage:
    """Average use of about the last second. Every change counts for as long as it lasts: frames that start and end
    between two looks are not missed."""

    __slots__ = ("_at_s", "_average", "_used")

    def __init__(self) -> None:
        self._average = 0.0
        self._used = 0.0
        self._at_s = 0.0

    def set(self, used: float, now_s: float) -> None:
        """So much is in use from now on."""
        self._average, self._used, self._at_s = self.at(now_s), used, now_s

    def at(self, now_s: float) -> float:
        return self._used + (self._average - self._used) * math.exp(self._at_s - now_s)


class Schedulable(Protocol):
    @property
    def busy(self) -> bool:
        """A round is claiming from it."""
        ...


QueueT = TypeVar("QueueT", bound=Schedulable)


class ShareGroup(Generic[QueueT]):
    """Queues of one show that may run in the same pools, in order. Against other shows they all have the same order."""

    __slots__ = ("at", "pools", "queues", "ranked_at_s", "ranks", "usage")

    def __init__(self, pools: Sequence[PoolId], usage: Callable[[], ShareUsage], ranked_at_s: float) -> None:
        self.pools = pools
        self.usage = usage
        self.ranks: list[QueueRank] = []
        """Of the queues, best first, as of the moment `ranked_at_s`."""
        self.queues: list[QueueT] = []
        self.ranked_at_s = ranked_at_s
        self.at = 0

    def skip_to(self, eligible: Callable[[QueueT], bool]) -> bool:
        """Move to the next eligible queue; returns whether there is one."""
        queues = self.queues
        while self.at < len(queues) and not eligible(queues[self.at]):
            self.at += 1
        return self.at < len(queues)


class SchedulingOrder(Generic[QueueT]):
    """Iterates over the queues in scheduling order. Each step counts what rounds have reserved since the last one.

    A queue from which a round is claiming keeps its position among the shows: no other show gets the rest of its pools
    until the claim has ended, because the same show may still be first. Within one show the next queue follows at once.
    """

    def __init__(
        self,
        groups: Iterable[ShareGroup[QueueT]],
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
        self._claiming: set[PoolId] = set()
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
    def group(self) -> ShareGroup[QueueT]:
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

    def _place(self, group: ShareGroup[QueueT]) -> tuple[ShareUsage, QueueRank]:
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
