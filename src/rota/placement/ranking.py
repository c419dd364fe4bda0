"""Workers of one pool as one class sees them, the best first, kept up to date by what changed.

What changes a worker makes its entry stale: a fresh one is sorted in when the view is next looked at, stale ones are
passed over and cleared away now and then. So a plan costs what changed since the last one and what it takes, never a
walk over all workers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import count
from math import ceil
from typing import Final

from rota.placement.requirements import PlacementRequirements
from rota.placement.scoring import spread
from rota.placement.topic_routes import Pool
from rota.placement.workers import WorkerInfo

UNCONFIRMED_PENALTY: Final = 1e9
"""Added to the score of workers that were only read of, in the snapshot, and not yet heard."""

STALE_ENTRIES_MAX: Final = 64

RankedWorker = tuple[float, int, float, int, int, WorkerInfo]
"""Score, when it was last used, its tie break, a number of its own, its room, and the worker."""


class WorkerRanking:
    def __init__(self, wanted: PlacementRequirements, pool: Pool, *, everyone: bool = False) -> None:
        self.pool = pool
        self._everyone = everyone
        self.room = 0
        """Frames of the class that fit on all workers in it together."""
        self.seen = 0
        """How far it has read the registry's changes."""
        self._wanted = wanted
        self._order: list[RankedWorker] = []
        self._stale = 0
        self._entries: dict[WorkerInfo, RankedWorker] = {}
        self._judged: dict[WorkerInfo, tuple[int, bool]] = {}
        self._matching = 0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._judged)

    @property
    def matching(self) -> int:
        """Workers that could run the class if they were free."""
        return self._matching

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        need, entries = self._wanted.need, self._entries
        fresh: list[RankedWorker] = []
        for worker in workers:
            self._invalidate(worker)
            if not self._matches(worker) or worker.blocked or not (worker.fed or self._everyone):
                continue
            room = worker.fitting_frames(need)
            if room:
                score = worker.score + (0.0 if worker.confirmed else UNCONFIRMED_PENALTY)
                entry = (score, worker.used, worker.tie, next(self._numbers), room, worker)
                entries[worker] = entry
                self.room += room
                fresh.append(entry)
        self._insert_sorted(fresh)

    def remove(self, worker: WorkerInfo) -> None:
        self._invalidate(worker)
        _, matched = self._judged.pop(worker, (0, False))
        self._matching -= matched

    def entry(self, worker: WorkerInfo) -> RankedWorker | None:
        return self._entries.get(worker)

    def best(self, n: int, horizon: float, last_resort: bool) -> list[RankedWorker]:
        """The workers that `n` frames spread over, best first; those of the last resort or the others."""
        found: list[RankedWorker] = []
        entries, check = self._entries, 1
        for entry in self._order:
            if (entry[0] >= UNCONFIRMED_PENALTY) is not last_resort:
                if last_resort:
                    continue
                break
            if entries.get(entry[5]) is not entry or entry[5].seen_at < horizon:
                continue
            if len(found) == n:
                break
            if len(found) == check:
                if _frames_below(found, entry[0]) >= n:
                    break
                check *= 2
            found.append(entry)
        return found

    def _invalidate(self, worker: WorkerInfo) -> None:
        old = self._entries.pop(worker, None)
        if old is not None:
            self.room -= old[4]
            self._stale += 1

    def _insert_sorted(self, fresh: list[RankedWorker]) -> None:
        if self._stale > STALE_ENTRIES_MAX + len(self._order) // 4:
            self._order = [entry for entry in self._order if self._entries.get(entry[5]) is entry]
            self._stale = 0
        if len(fresh) > len(self._order) // 16:
            self._order += fresh
            self._order.sort()
            return
        for entry in fresh:
            insort(self._order, entry)

    def _matches(self, worker: WorkerInfo) -> bool:
        shape, matched = self._judged.get(worker, (-1, False))
        if shape == worker.shape:
            return matched
        now = worker.pool == self.pool.name and worker.mismatch_reason(self._wanted) is None
        self._judged[worker] = (worker.shape, now)
        self._matching += now - matched
        return now


def _frames_below(found: list[RankedWorker], level: float) -> int:
    """Frames that these take before they are all as loaded as `level`."""
    return sum(min(entry[4], ceil(level - entry[0])) for entry in found)


def pick_workers(
    views: Sequence[WorkerRanking], n: int, preferred: list[WorkerInfo], only: list[WorkerInfo] | None, horizon: float
) -> tuple[list[tuple[Pool, WorkerInfo, int]], int]:
    """Up to `n` frames by pool and worker, and how many would fit in all: preferred workers first, then pool by pool.

    Those that were only read of come behind the last pool.
    """
    named = [_entries_of(view, only, horizon) for view in views] if only is not None else None
    room = sum(entry[4] for entries in named for entry in entries) if named else sum(view.room for view in views)
    shares: list[tuple[Pool, WorkerInfo, int]] = []
    left = n
    for view in views:
        for entry in _entries_of(view, preferred, horizon):
            if left and entry[5].confirmed and (only is None or entry[5] in only):
                shares.append((view.pool, entry[5], min(left, entry[4])))
                left -= shares[-1][2]
    for last_resort in (False, True):
        for place, view in enumerate(views):
            if not left:
                return shares, room
            if named is None:
                entries = view.best(left + len(preferred), horizon, last_resort)
            else:
                entries = [entry for entry in named[place] if (entry[0] >= UNCONFIRMED_PENALTY) is last_resort]
            if preferred:
                # What is left did not fit on those, so they are full.
                entries = [entry for entry in entries if entry[5] not in preferred]
            dealt = distribute(entries, left)
            shares += [(view.pool, worker, k) for worker, k in dealt]
            left -= sum(k for _, k in dealt)
    return shares, room


def _entries_of(view: WorkerRanking, workers: list[WorkerInfo], horizon: float) -> list[RankedWorker]:
    entries = (view.entry(worker) for worker in workers if worker.seen_at >= horizon)
    return sorted(entry for entry in entries if entry is not None)


def distribute(entries: list[RankedWorker], n: int) -> list[tuple[WorkerInfo, int]]:
    """`n` frames over these workers, best first."""
    if len(entries) < 2:
        return [(entry[5], min(n, entry[4])) for entry in entries]
    shares = spread([entry[0] for entry in entries], [entry[4] for entry in entries], n)
    return [(entry[5], share) for entry, share in zip(entries, shares, strict=True) if share]
