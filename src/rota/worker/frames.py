"""Frames on a worker: a batch has not begun, a frame has. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from rota.model.jobs.work import Work
from rota.model.protocol import AssignedRange, AttemptStatus, TokenRange
from rota.sdk.task import Task
from rota.worker.tracing import BatchSpan


class StopReason(msgspec.Struct, frozen=True):
    """Why a frame is to end early, and how that is reported."""

    status: AttemptStatus
    code: str
    reason: str


class AssignedBatch:
    """Frames of one portion that have not begun: tokens `next` to `end - 1`, without those `dropped`."""

    __slots__ = ("dropped", "end", "first", "input", "next", "portion", "task", "traced", "work")

    def __init__(self, portion: AssignedRange, run: TokenRange, work: Work, task: Task[..., Any] | None) -> None:
        self.portion = portion
        self.first = self.next = run[0]
        self.end = run[0] + run[1]
        self.work = work
        self.task = task
        """None for a command."""
        self.traced = BatchSpan.start(portion, work, run[1]) if portion.trace else None
        self.input = portion.input
        self.dropped: set[int] = set()
        """Ended before they began."""

    @property
    def remaining(self) -> int:
        return self.end - self.next

    def frame_number(self, token: int) -> int:
        """Its number in the layer."""
        return self.portion.frame + (token - self.portion.token) * self.portion.step


class RunningFrame:
    """One that has begun. Whoever runs it sets `ask` and `kill`; `Desk` stops it by them."""

    __slots__ = ("ask", "batch", "began_at", "devices", "kill", "over", "stop", "timers", "token")

    def __init__(self, batch: AssignedBatch, token: int, began_at: float, devices: tuple[int, ...]) -> None:
        self.batch = batch
        self.token = token
        self.began_at = began_at
        self.devices = devices
        self.stop: StopReason | None = None
        self.over = False
        """Its end was reported; whatever it still does changes nothing."""
        self.timers: list[asyncio.TimerHandle] = []
        self.ask: Callable[[], object] = _noop
        self.kill: Callable[[], object] = _noop

    def close(self) -> None:
        """It is over; nothing keeps it alive any more."""
        self.over = True
        for timer in self.timers:
            timer.cancel()
        self.ask = self.kill = _noop

    @property
    def work(self) -> Work:
        return self.batch.work

    @property
    def trace(self) -> str:
        """The traceparent for what it runs; empty when it is not traced."""
        return self.batch.traced.trace if self.batch.traced is not None else ""

    @property
    def number(self) -> int:
        return self.batch.frame_number(self.token)


def _noop() -> None:
    return None
