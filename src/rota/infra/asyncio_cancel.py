"""Cancellations that libraries swallow take effect after all.

On Python 3.11 `asyncio.wait_for` returns its result when a cancellation comes in the moment it is done, and the
cancellation is gone; redis-py sends under it, and nats-py behaves alike when its buffer is full. Whoever cancelled, a
TaskGroup or a service that drains, would wait for ever.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class cancellable:
    """`with cancellable(): await library()`: a task that was cancelled meanwhile is cancelled, whatever came of it."""

    __slots__ = ("_before", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._before = self._task.cancelling() if self._task is not None else 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cancelled = self._task is not None and self._task.cancelling() > self._before
        if cancelled and not isinstance(error, asyncio.CancelledError):
            raise asyncio.CancelledError from error
