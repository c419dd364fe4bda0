"""Frames on a worker: `AssignedBatch` holds frames that have not started, `RunningFrame` one that has. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from rota.model.jobs.work import Work
from rota.model.protocol import AssignedRange, AttemptStatus
from rota.model.token_ranges import TokenRange
from rota.sdk.task import Task
from rota.worker.tracing import BatchSpan

if TYPE_CHECKING:
    from rota.worker.series import FrameSeries


class StopReason(msgspec.Struct, frozen=True):
    """Why a frame is stopped early, and how that is reported."""

    status: AttemptStatus
    code: str
    reason: str


class AssignedBatch:
    """Frames of one assigned range that have not started: tokens `next` to `end - 1`, except `dropped`."""

    __slots__ = (
        "assigned",
        "dropped",
        "end",
        "first",
        "input",
        "next",
        "series",
        "span",
        "suspended",
        "task",
        "timing_key",
        "work",
    )

    def __init__(
        self, assigned: AssignedRange, token_range: TokenRange, work: Work, task: Task[..., Any] | None
    ) -> None:
        self.assigned = assigned
        self.first = self.next = token_range[0]
        self.end = token_range[0] + token_range[1]
        self.work = work
        self.task = task
        """None for a command."""
        self.span = BatchSpan.start(assigned, work, token_range[1]) if assigned.trace else None
        self.input = assigned.input
        self.dropped: set[int] = set()
        """Tokens that ended before they started."""
        self.series: FrameSeries | None = None
        self.suspended = False
        """Its runner has put it aside until the running frame of its series has ended."""
        self.timing_key = 0
        """Under which the duration of its frames is reported; 0: it is not."""

    @property
    def remaining(self) -> int:
        return self.end - self.next

    @property
    def is_blocked(self) -> bool:
        """Whether its next frame must wait for the running frame of its series."""
        return self.series is not None and self.series.running is not None

    @property
    def trace(self) -> str:
        """The traceparent for the code of its frames; empty if it is not traced."""
        return self.span.trace if self.span is not None else ""

    def frame_number(self, token: int) -> int:
        """Frame number in the layer."""
        return self.assigned.frame + (token - self.assigned.token) * self.assigned.step


class RunningFrame:
    """A started frame. Its runner sets `request_stop` and `kill`, which `FrameTable` calls to stop it."""

    __slots__ = ("batch", "began_at", "devices", "kill", "over", "request_stop", "stop", "timers", "token")

    def __init__(self, batch: AssignedBatch, token: int, began_at: float, devices: tuple[int, ...]) -> None:
        self.batch = batch
        self.token = token
        self.began_at = began_at
        self.devices = devices
        self.stop: StopReason | None = None
        self.over = False
        """Its end was reported; later output and results are ignored."""
        self.timers: list[asyncio.TimerHandle] = []
        self.request_stop: Callable[[], object] = _noop
        self.kill: Callable[[], object] = _noop

    def close(self) -> None:
        """Marks the frame as over and drops its timers and callbacks."""
        self.over = True
        for timer in self.timers:
            timer.cancel()
        self.request_stop = self.kill = _noop

    @property
    def work(self) -> Work:
        return self.batch.work

    @property
    def trace(self) -> str:
        return self.batch.trace

    @property
    def number(self) -> int:
        return self.batch.frame_number(self.token)


def _noop() -> None:
    return None
