"""Frames in series: they run one after the other on the capacity of one frame (ADR 23). No I/O.

`FrameTable` drives it: one batch of a series is with a runner at a time, and the next one follows when all frames of
that one have ended. Capacity is released when the last frame of the series has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from rota.model.jobs.work import Work
from rota.worker.frames import AssignedBatch, RunningFrame

HAND_BACK_AFTER_S: Final = 0.2
"""Frames that have not started so long after their series was assigned are handed back, so that another slot can run
them: servers assign series that they expect to end in half of it."""


class SeriesProcess(Protocol):
    """Runs frames of a series one after the other, and may have been sent some ahead."""

    def continue_with(self, batch: AssignedBatch, /) -> bool:
        """Runs the next batch; False: its runner has to find a process."""
        ...

    def take_back(self) -> None:
        """Takes back what was sent ahead, and finds out which frames have started and ended."""
        ...


class FrameSeries:
    __slots__ = ("current", "has_run", "process", "running", "since", "timer", "unended", "waiting", "work")

    def __init__(self, batches: Iterable[AssignedBatch], now: float) -> None:
        """`now`: by the clock of the event loop."""
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
        self.since = now
        """When its slot became free for the next frame."""
        self.has_run = False
        """A frame of it has started."""
        self.process: SeriesProcess | None = None
        """That runs it, and sets this. What it was sent ahead is in `waiting` until it is known to have started."""

    def next_batch(self) -> AssignedBatch | None:
        self.current = self.waiting.popleft() if self.waiting else None
        return self.current

    def settle(self) -> None:
        """Call before frames of it are stopped or taken: afterwards no process has any that are not running."""
        if self.process is not None:
            self.process.take_back()

    def take_slot_time(self, now: float) -> float:
        """Seconds for which the frames that end now have kept the slot."""
        since, self.since = self.since, now
        return max(0.0, now - since)

    def take_unstarted(self, *, all_frames: bool) -> list[tuple[AssignedBatch, int]]:
        """Batches with frames that have not started, and the first of these that is to be given up; none of them is
        started any more. Unless all are wanted, a series of which nothing has run keeps its first frame, so that its
        slot is not taken to be free: the worker may be too busy to start anything."""
        current = [self.current] if self.current is not None else []
        unstarted = [batch for batch in (*current, *self.waiting) if batch.remaining]
        self.waiting.clear()
        keeps_first = not all_frames and not self.has_run
        return [(batch, batch.next + (keeps_first and batch is self.current)) for batch in unstarted]
