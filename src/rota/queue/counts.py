"""Counts of a queue. No I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

from rota.infra.postgres import Record

CounterMode = Literal["ledger", "scan"]


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Frames of a queue by state; `completed`, `failed` and `cancelled` include pruned ones."""

    waiting: int = 0
    running: int = 0
    deferred: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    dead: int = 0
    """Frames in the dead letters."""

    @property
    def terminal(self) -> int:
        return self.completed + self.failed + self.cancelled

    @classmethod
    def of(cls, row: Record) -> QueueCounts:
        return cls(**{field: row[field] for field in cls.__struct_fields__})


class ClaimableLane(msgspec.Struct, frozen=True):
    """A lane with waiting frames that may be claimed."""

    lane: int
    queue: str
    priority: int
    waiting: int
    parked: int
    """How many of these are parked because their job is at its cap."""
