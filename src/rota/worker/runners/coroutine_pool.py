"""Runs coroutines without an asyncio task each: the first step is taken directly, and most frames need no second one.

Code in that first step still needs a current task (`asyncio.timeout` and TaskGroup use it and cancel it later), so a
*slot* is kept ready: a task that waits on a future. Frames take their first step with the slot as current task. A frame
that has to wait is moved to the slot and stays there until it ends; a frame that finishes leaves the slot free. Eager
tasks of later Python versions do the same, but cost a task per frame.

A slot is started before use: a task cancelled before its first step never runs its coroutine, so the frame would never
be reported.
"""

from __future__ import annotations

import asyncio
import types
from asyncio import tasks as asyncio_tasks
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context as Variables
from typing import Any, Final

AnyCoroutine = Coroutine[Any, Any, Any]
OnEnd = Callable[[Any, BaseException | None], None]
"""Called with the frame's return value, or its exception."""

CLOSE_TIMEOUT_S: Final = 1.0
SPARE_SLOTS_MAX: Final = 512
"""Idle slots; more would not start frames any sooner."""


class CoroutineSlot:
    def __init__(self, loop: asyncio.AbstractEventLoop, on_free: Callable[[CoroutineSlot], bool]) -> None:
        self.gate: asyncio.Future[None] = loop.create_future()
        # Bypasses the loop's task factory: `_drive` handles exceptions of the frame itself.
        self.task = asyncio.Task(self._serve(), loop=loop, name="rota frame")
        self._loop = loop
        self._on_free = on_free
        self._frame: tuple[AnyCoroutine, Any, Variables, OnEnd] | None = None

    @property
    def is_available(self) -> bool:
        """Whether it has no frame and was not cancelled."""
        return self._frame is None and not self.gate.done()

    def take_over(self, coroutine: AnyCoroutine, awaited: Any, variables: Variables, on_end: OnEnd) -> None:
        """Takes over a coroutine that waits for `awaited`; it continues in the next loop iteration."""
        self._frame = (coroutine, awaited, variables, on_end)
        if not self.gate.done():
            self.gate.set_result(None)

    async def _serve(self) -> None:
        """Runs one frame after the other; a slot that was cancelled once is not reused."""
        while True:
            cancelled = False
            try:
                await self.gate
            except asyncio.CancelledError:
                cancelled = True
            if self._frame is None:
                return
            await self._drive(*self._frame, cancelled)
            self._frame = None
            self.gate = self._loop.create_future()
            if self.task.cancelling() or not self._on_free(self):
                return

    async def _drive(
        self, coroutine: AnyCoroutine, awaited: Any, variables: Variables, on_end: OnEnd, cancelled: bool
    ) -> None:
        value, raised = None, None
        try:
            value = await _resume(coroutine, awaited, variables, cancelled)
        except BaseException as error:  # noqa: BLE001 - even SystemExit ends the frame, not the worker
            raised = error
        on_end(value, raised)


@types.coroutine
def _resume(coroutine: AnyCoroutine, awaited: Any, variables: Variables, cancelled: bool) -> Generator[Any, Any, Any]:
    """Continues a coroutine after its first step, in the same contextvars."""
    thrown: BaseException | None = None
    if cancelled and not (isinstance(awaited, asyncio.Future) and awaited.cancel()):
        thrown = asyncio.CancelledError()
    while True:
        sent = None
        if thrown is None:
            try:
                sent = yield awaited
            except BaseException as error:  # noqa: BLE001 - the loop throws into the frame
                thrown = error
        try:
            if thrown is None:
                awaited = variables.run(coroutine.send, sent)
            else:
                awaited = variables.run(_throw, coroutine, thrown)
        except StopIteration as end:
            return end.value
        thrown = None


def _throw(coroutine: AnyCoroutine, error: BaseException) -> Any:
    return coroutine.throw(error)


class CoroutineSlotPool:
    """Idle and busy slots."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._all: set[asyncio.Task[None]] = set()
        self._spare: deque[CoroutineSlot] = deque()

    async def ensure_spare(self, n: int) -> None:
        """Creates slots until `n` are idle."""
        missing = n - len(self._spare)
        if missing > 0:
            self._spare.extend(self._create_slot() for _ in range(missing))
            # Let them start.
            await asyncio.sleep(0)

    def first_available(self) -> CoroutineSlot | None:
        """An idle slot; returns the same one until it has a frame."""
        while self._spare and not self._spare[0].is_available:
            self._spare.popleft()
        return self._spare[0] if self._spare else None

    def _return_slot(self, slot: CoroutineSlot) -> bool:
        """Returns a slot whose frame ended; False: the pool is full and the slot ends."""
        if len(self._spare) >= SPARE_SLOTS_MAX:
            return False
        self._spare.append(slot)
        return True

    def _create_slot(self) -> CoroutineSlot:
        slot = CoroutineSlot(self._loop, self._return_slot)
        self._all.add(slot.task)
        slot.task.add_done_callback(self._all.discard)
        return slot

    @contextmanager
    def as_current_task(self, slot: CoroutineSlot) -> Iterator[None]:
        """In this block `asyncio.current_task()` is the slot's task."""
        own = asyncio.current_task()
        assert own is not None, "frames are started from a task"
        asyncio_tasks._leave_task(self._loop, own)  # noqa: SLF001 - as asyncio's eager tasks do
        asyncio_tasks._enter_task(self._loop, slot.task)  # noqa: SLF001
        try:
            yield
        finally:
            asyncio_tasks._leave_task(self._loop, slot.task)  # noqa: SLF001
            asyncio_tasks._enter_task(self._loop, own)  # noqa: SLF001

    async def close(self) -> int:
        """Cancels all frames; returns how many ignored it."""
        for task in self._all:
            task.cancel()
        if self._all:
            await asyncio.wait(set(self._all), timeout=CLOSE_TIMEOUT_S)
        return len(self._all)
