"""Workers of one pool, ranked for one set of requirements and updated incrementally.

A change of a worker makes its entry stale: the next update inserts a fresh one, stale entries are skipped and purged
now and then. So a plan costs the changes since the last one plus the workers it uses, never a pass over all workers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import ceil
from typing import Final

from rota.model.ids import PoolId
from rota.placement import scoring
from rota.placement.requirements import PlacementRequirements
from rota.placement.topic_routes import PlacementPolicy, Pool
from rota.placement.workers import WorkerInfo

UNCONFIRMED_PENALTY: Final = 1e9
"""Added to the score of workers known only from the snapshot, before their first heartbeat."""

STALE_ENTRIES_MAX: Final = 64

GPU_PENALTY: Final = 1e6
"""Added to the score of machines with GPUs, for frames without."""
LOAD_WEIGHT: Final = 0.01
"""Of measured load, against the part in use."""

RankedWorker = tuple[float, int, float, int, int, WorkerInfo, float]
"""Score, last use, tie break, a unique number, fitting frames, the worker, and by how much a frame raises its score."""


class WorkerRanking:
    def __init__(self, requirements: PlacementRequirements, pool: Pool, *, ignore_ownership: bool = False) -> None:
        self.pool = pool
        self._ignore_ownership = ignore_ownership
        self.room = 0
        """Frames that fit on all ranked workers together."""
        self.last_change = 0
        """The registry change up to which it is current."""
        self._requirements = requirements
        self._order: list[RankedWorker] = []
        self._stale = 0
        self._entries: dict[WorkerInfo, RankedWorker] = {}
        self._match_cache: dict[WorkerInfo, tuple[int, bool]] = {}
        self._matching = 0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._match_cache)

    @property
    def matching(self) -> int:
        """Workers that could run such frames if they were free."""
        return self._matching

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        need, entries = self._requirements.need, self._entries
        fresh: list[RankedWorker] = []
        for worker in workers:
            self._invalidate(worker)
            if not self._matches(worker) or worker.blocked or not (worker.owned or self._ignore_ownership):
                continue
            room = worker.fitting_frames(need)
            if room:
                score, step = self._score(worker)
                entry = (score, worker.used, worker.tie, next(self._numbers), room, worker, step)
                entries[worker] = entry
                self.room += room
                fresh.append(entry)
        self._insert_sorted(fresh)

    def _score(self, worker: WorkerInfo) -> tuple[float, float]:
        """Its score, and the step of a frame."""
        policy, need = self.pool.spec.placement, self._requirements.need
        late = 0.0 if worker.confirmed else UNCONFIRMED_PENALTY
        if policy is PlacementPolicy.SPREAD:
            return worker.score + late, 1.0
        if policy is PlacementPolicy.PACK:
            return late - worker.part_in_use, 0.0
        if worker.gpus and not need.gpus:
            late += GPU_PENALTY
        return worker.part_in_use + LOAD_WEIGHT * worker.load.score + late, worker.part_of_frame(need)

    def remove(self, worker: WorkerInfo) -> None:
        self._invalidate(worker)
        _, matched = self._match_cache.pop(worker, (0, False))
        self._matching -= matched

    def entry(self, worker: WorkerInfo) -> RankedWorker | None:
        return self._entries.get(worker)

    def best(self, n: int, now: float, last_resort: bool) -> list[RankedWorker]:
        """The workers that `n` frames spread over, best first; only those of the last resort, or only the others."""
        found: list[RankedWorker] = []
        entries, check = self._entries, 1
        for entry in self._order:
            if (entry[0] >= UNCONFIRMED_PENALTY) is not last_resort:
                if last_resort:
                    continue
                break
            if entries.get(entry[5]) is not entry or entry[5].is_expired(now):
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
        shape, matched = self._match_cache.get(worker, (-1, False))
        if shape == worker.shape:
            return matched
        matches_now = worker.pool == self.pool.name and worker.mismatch_reason(self._requirements) is None
        self._match_cache[worker] = (worker.shape, matches_now)
        self._matching += matches_now - matched
        return matches_now


def _frames_below(found: list[RankedWorker], level: float) -> int:
    """Frames that these workers take before all reach the score `level`."""
    return sum(entry[4] if not entry[6] else min(entry[4], ceil((level - entry[0]) / entry[6])) for entry in found)


def pick_workers(
    rankings: Sequence[WorkerRanking],
    n: int,
    preferred: list[WorkerInfo],
    only: list[WorkerInfo] | None,
    now: float,
    at_most: Mapping[PoolId, int],
) -> tuple[list[tuple[Pool, WorkerInfo, int]], int]:
    """Up to `n` frames by pool and worker, and how many would fit in total: preferred workers first, then by pool.

    Workers known only from the snapshot come after the last pool. `at_most`: frames that some pools may get.
    """
    named = [_entries_of(ranking, only, now) for ranking in rankings] if only is not None else None
    room = (
        sum(entry[4] for entries in named for entry in entries) if named else sum(ranking.room for ranking in rankings)
    )
    shares: list[tuple[Pool, WorkerInfo, int]] = []
    remaining = n
    quota = [at_most.get(ranking.pool.id, n) for ranking in rankings]
    for index, ranking in enumerate(rankings):
        for entry in _entries_of(ranking, preferred, now):
            most = min(remaining, quota[index], entry[4])
            if most and entry[5].confirmed and (only is None or entry[5] in only):
                shares.append((ranking.pool, entry[5], most))
                remaining -= most
                quota[index] -= most
    for last_resort in (False, True):
        for index, ranking in enumerate(rankings):
            most = min(remaining, quota[index])
            if not most:
                continue
            if named is None:
                entries = ranking.best(most + len(preferred), now, last_resort)
            else:
                entries = [entry for entry in named[index] if (entry[0] >= UNCONFIRMED_PENALTY) is last_resort]
            if preferred:
                # The rest did not fit on the preferred workers, so these are full.
                entries = [entry for entry in entries if entry[5] not in preferred]
            distributed = distribute(entries, most)
            shares += [(ranking.pool, worker, k) for worker, k in distributed]
            placed = sum(k for _, k in distributed)
            remaining -= placed
            quota[index] -= placed
    return shares, room


def _entries_of(ranking: WorkerRanking, workers: list[WorkerInfo], now: float) -> list[RankedWorker]:
    entries = (ranking.entry(worker) for worker in workers if not worker.is_expired(now))
    return sorted(entry for entry in entries if entry is not None)


def distribute(entries: list[RankedWorker], n: int) -> list[tuple[WorkerInfo, int]]:
    """Distribute `n` frames over these workers, best first."""
    if len(entries) < 2:
        return [(entry[5], min(n, entry[4])) for entry in entries]
    scores, steps, room = [each[0] for each in entries], [each[6] for each in entries], [each[4] for each in entries]
    shares = scoring.distribute(scores, steps, room, n)
    return [(entry[5], share) for entry, share in zip(entries, shares, strict=True) if share]
