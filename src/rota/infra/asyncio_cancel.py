"""Restores cancellations that libraries swallow.

On Python 3.11 `asyncio.wait_for` loses a cancellation that arrives in the moment its result is ready; redis-py sends
under it, and nats-py behaves alike when its buffer is full. The canceller, a TaskGroup or a draining service, would
then wait forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Final, TypeVar

CANCEL_INTERVAL_S: Final = 0.1
T = TypeVar("T")


class cancellable:
    """`with cancellable(): await library()`: raises CancelledError if the task was cancelled meanwhile, whatever the
    result.
    """

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


async def run_cancellable(work: Coroutine[None, None, T]) -> T:
    """The same for work that may use a TaskGroup; it runs in a task of its own.

    A TaskGroup that fails while it is cancelled raises the failure alone. Before Python 3.13 one that fails also leaves
    a cancellation in the count of its task, which `cancellable` could not distinguish from a real one.
    """
    task = asyncio.create_task(work)
    with cancellable():
        return await task


async def run_within(work: Coroutine[None, None, T], seconds: float) -> T:
    """The result of `work`. Raises TimeoutError if it takes longer; it has ended then, as after a cancellation.

    `asyncio.timeout` cancels once: work that swallows this in a loop of its own would go on for ever.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        timed_out = not task.done()
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_INTERVAL_S)
    if timed_out:
        if not task.cancelled():
            task.exception()  # or asyncio would report it as never retrieved
        raise TimeoutError
    return task.result()
