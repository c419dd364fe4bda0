"""Placement plans, and why frames were not placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from uuid import UUID

import msgspec

from rota.api.explanation import ExcludedWorker
from rota.model.ids import PoolId
from rota.model.reasons import Reason
from rota.placement.requirements import Resources
from rota.placement.workers import WorkerInfo

EXPLAINED_WORKERS_MAX: Final = 100
"""Workers explained one by one; the rest are counted."""


class WorkerShare(msgspec.Struct, frozen=True):
    """`n` frames for one worker, and the pool under which they are booked."""

    worker: UUID
    pool: str
    pool_id: PoolId
    n: int


class PlacementExplanation(msgspec.Struct, frozen=True):
    """Why frames are not placed, for people. `passed` holds the first of the excluded workers."""

    reason: Reason | None
    """None when there is free capacity now."""
    sentence: str
    room: int = 0
    considered: int = 0
    passed: tuple[ExcludedWorker, ...] = ()


class PlacementPlan:
    """Where `asked` frames would go now. It takes no capacity: `WorkerRegistry.reserve` does."""

    __slots__ = ("_explain", "_workers", "asked", "need", "portions", "refusal", "room")

    def __init__(
        self,
        asked: int,
        need: Resources,
        portions: list[WorkerShare],
        workers: list[WorkerInfo],
        room: int,
        refusal: Reason | None,
        explain: Callable[[], PlacementExplanation],
    ) -> None:
        self.asked = asked
        self.need = need
        self.portions = portions
        self.room = room
        """Frames that fit now on all workers considered, those of this plan included."""
        self.refusal = refusal
        """Why fewer than asked are planned; None when all are."""
        self._workers = workers
        self._explain = explain

    @property
    def planned(self) -> int:
        return sum(portion.n for portion in self.portions)

    def explain(self) -> PlacementExplanation:
        """Computed on demand, from the state at that time."""
        return self._explain()

    @property
    def runs_series(self) -> bool:
        """Whether all its workers run frames in series."""
        return all(worker.runs_series for worker in self._workers)

    def shares(self) -> list[tuple[WorkerInfo, int]]:
        return [(worker, portion.n) for worker, portion in zip(self._workers, self.portions, strict=True)]


class CapacityReservation:
    """Capacity reserved by a plan, until `WorkerRegistry.unreserve`."""

    __slots__ = ("need", "refusals", "shares")

    def __init__(self, need: Resources, shares: list[tuple[WorkerInfo, int]], refusals: int) -> None:
        self.need = need
        self.shares = shares
        self.refusals = refusals
        """How many plans had found no capacity before: only later ones may have missed this one."""
