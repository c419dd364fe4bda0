"""Queues that wait, grouped by show and pools and in order within each group, kept while queues change. Pure.

The order of two queues does not change while both wait, until the waiting time of one counts no more (`ordering`). So
the ranks of a group are computed for one moment and kept for `RERANK_S`: a queue that comes or changes is ranked for
that moment, too, and costs the search of its place. With thousands of queues, ranking all of them for each change would
take too long; for the same reason groups are ranked again one at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Final, Generic, TypeVar

from rota.engine.dispatch.ordering import QueueRank, Schedulable, ShareGroup, ShareUsage
from rota.model.ids import PoolId, ShowId

RERANK_S: Final = 2.0

GroupKey = tuple[ShowId, Sequence[PoolId]]
QueueT = TypeVar("QueueT", bound=Schedulable)


class QueueGroups(Generic[QueueT]):
    def __init__(
        self,
        key_of: Callable[[QueueT], GroupKey],
        rank_at: Callable[[QueueT, float], QueueRank],
        usage_of: Callable[[GroupKey], ShareUsage],
        waits: Callable[[QueueT], bool],
    ) -> None:
        self._key_of = key_of
        self._rank_at = rank_at
        self._usage_of = usage_of
        self._waits = waits
        self._groups: dict[GroupKey, ShareGroup[QueueT]] = {}
        self._placed: dict[QueueT, tuple[ShareGroup[QueueT], QueueRank]] = {}
        self._changed: set[QueueT] = set()
        self._stale = True
        self._version: object = None

    def __contains__(self, queue: QueueT) -> bool:
        return queue in self._placed

    def changed(self, queue: QueueT) -> None:
        """The queue is new, or its rank may have changed. One that does not wait any more may stay where it is."""
        self._changed.add(queue)

    def latest(self) -> Collection[ShareGroup[QueueT]]:
        """The groups as they were last asked for: while they are iterated over they must not change."""
        return self._groups.values()

    def reset(self) -> None:
        """Ranks of many queues may have changed."""
        self._stale = True

    def current(self, queues: Iterable[QueueT], now_s: float, version: object) -> Collection[ShareGroup[QueueT]]:
        """The groups, in no particular order. `queues`: all; `version` changes with the pools of queues."""
        if self._stale or version != self._version:
            self._stale, self._version = False, version
            self._group_all(queues, now_s)
        else:
            for queue in self._changed:
                self._place(queue, now_s)
            self._rank_oldest(now_s)
        self._changed.clear()
        return self._groups.values()

    def _rank_oldest(self, now_s: float) -> None:
        """One group at a time, or those that have waited too long for it."""
        oldest = min(self._groups.values(), key=attrgetter("ranked_at_s"), default=None)
        if oldest is not None and now_s - oldest.ranked_at_s >= RERANK_S:
            self._rank(oldest, oldest.queues, now_s)
        for group in self._groups.values():
            if now_s - group.ranked_at_s >= 2 * RERANK_S:
                self._rank(group, group.queues, now_s)

    def _group_all(self, queues: Iterable[QueueT], now_s: float) -> None:
        members: dict[GroupKey, list[QueueT]] = defaultdict(list)
        for queue in filter(self._waits, queues):
            members[self._key_of(queue)].append(queue)
        self._groups.clear()
        self._placed.clear()
        for key, each in members.items():
            self._rank(self._add_group(key, now_s), each, now_s)

    def _add_group(self, key: GroupKey, now_s: float) -> ShareGroup[QueueT]:
        group = self._groups[key] = ShareGroup(key[1], lambda: self._usage_of(key), now_s)
        return group

    def _rank(self, group: ShareGroup[QueueT], queues: Iterable[QueueT], now_s: float) -> None:
        """Rank those that wait, and forget the others."""
        ranked = []
        for number, queue in enumerate(queues):
            if self._waits(queue):
                ranked.append((self._rank_at(queue, now_s), number, queue))
            else:
                self._placed.pop(queue, None)
        ranked.sort()
        group.ranked_at_s = now_s
        group.ranks = [rank for rank, _, _ in ranked]
        group.queues = [queue for _, _, queue in ranked]
        self._placed.update((queue, (group, rank)) for rank, _, queue in ranked)

    def _place(self, queue: QueueT, now_s: float) -> None:
        before = self._placed.get(queue)
        if before is not None:
            group, known = before
            rank = self._rank_at(queue, group.ranked_at_s)
            if known == rank:
                return
            at = group.queues.index(queue, bisect_left(group.ranks, known))
            del group.ranks[at], group.queues[at]
        else:
            key = self._key_of(queue)
            group = self._groups.get(key) or self._add_group(key, now_s)
            rank = self._rank_at(queue, group.ranked_at_s)
        at = bisect_right(group.ranks, rank)
        group.ranks.insert(at, rank)
        group.queues.insert(at, queue)
        self._placed[queue] = (group, rank)
