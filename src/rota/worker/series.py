"""Frames in series: they run one after the other on the capacity of one frame (ADR 23). No I/O.

`FrameTable` drives it: one batch of a series is with a runner at a time, and the next one follows when all frames of
that one have ended. Capacity is released when the last frame of the series has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from rota.model.jobs.work import Work
from rota.worker.frames import AssignedBatch, RunningFrame

HAND_BACK_AFTER_S: Final = 0.2
"""Frames that have not started so long after their series was assigned are handed back, so that another slot can run
them: servers assign series that they expect to end in half of it."""


class FrameSeries:
    __slots__ = ("current", "running", "timer", "unended", "waiting", "work")

    def __init__(self, batches: Iterable[AssignedBatch]) -> None:
        self.waiting = deque(batches)
        """Batches that no runner has yet."""
        self.work: Work = self.waiting[0].work
        """Of the first frame; all need the same resources."""
        self.unended = sum(batch.remaining for batch in self.waiting)
        """Frames that have not ended."""
        self.current: AssignedBatch | None = None
        """The batch that a runner has."""
        self.running: RunningFrame | None = None
        self.timer: asyncio.TimerHandle | None = None

    def next_batch(self) -> AssignedBatch | None:
        self.current = self.waiting.popleft() if self.waiting else None
        return self.current

    def unstarted_batches(self) -> list[AssignedBatch]:
        """Batches with frames that have not started; none of them is started any more."""
        current = [self.current] if self.current is not None else []
        unstarted = [batch for batch in (*current, *self.waiting) if batch.remaining]
        self.waiting.clear()
        return unstarted
