"""Async frames without a task each: the first step of a coroutine is taken by hand, and most need no second one.

What runs in that first step must find itself in a task all the same (`asyncio.timeout` and TaskGroups ask for it, and
cancel it later), so a *carrier* stands by: a task that waits at a gate. Frames take their first step in its name. One
that has to wait is handed to it and stays with it to the end; frames that finish at once leave it as it was. This is
what eager tasks do in later Pythons, at the price of a task per frame.

A carrier has started before it is used: cancelling one that has not would end it without a word to its frame.
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
"""Called with what the frame returned, or with what it raised."""

CLOSE_TIMEOUT_S: Final = 1.0
SPARE_SLOTS_MAX: Final = 512
"""That stand by; more would only wait for their turn."""


class CoroutineSlot:
    def __init__(self, loop: asyncio.AbstractEventLoop, on_free: Callable[[CoroutineSlot], bool]) -> None:
        self.gate: asyncio.Future[None] = loop.create_future()
        # Past the loop's task factory: what a frame raises is kept here.
        self.task = asyncio.Task(self._serve(), loop=loop, name="rota frame")
        self._loop = loop
        self._on_free = on_free
        self._frame: tuple[AnyCoroutine, Any, Variables, OnEnd] | None = None

    @property
    def is_available(self) -> bool:
        """Whether it can carry: it has no frame, and nobody has cancelled it."""
        return self._frame is None and not self.gate.done()

    def take_over(self, coroutine: AnyCoroutine, awaited: Any, variables: Variables, on_end: OnEnd) -> None:
        """Take a coroutine over that waits for `awaited`. It goes on with the next turn of the loop."""
        self._frame = (coroutine, awaited, variables, on_end)
        if not self.gate.done():
            self.gate.set_result(None)

    async def _serve(self) -> None:
        """Carry one frame after the other; one that was ever cancelled is not used again."""
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
        except BaseException as error:  # noqa: BLE001 - even SystemExit is the frame's own, not the worker's
            raised = error
        on_end(value, raised)


@types.coroutine
def _resume(coroutine: AnyCoroutine, awaited: Any, variables: Variables, cancelled: bool) -> Generator[Any, Any, Any]:
    """Drive a coroutine on that has taken its first step, in the variables it has taken it in."""
    thrown: BaseException | None = None
    if cancelled and not (isinstance(awaited, asyncio.Future) and awaited.cancel()):
        thrown = asyncio.CancelledError()
    while True:
        sent = None
        if thrown is None:
            try:
                sent = yield awaited
            except BaseException as error:  # noqa: BLE001 - whatever the loop throws is for the frame
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
    """Those that stand by and those that carry."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._all: set[asyncio.Task[None]] = set()
        self._spare: deque[CoroutineSlot] = deque()

    async def ensure_spare(self, n: int) -> None:
        """See to it that some `n` stand by."""
        missing = n - len(self._spare)
        if missing > 0:
            self._spare.extend(self._create_slot() for _ in range(missing))
            # They have started when it is our turn again.
            await asyncio.sleep(0)

    def first_available(self) -> CoroutineSlot | None:
        """One that can carry; the same again until it has a frame."""
        while self._spare and not self._spare[0].is_available:
            self._spare.popleft()
        return self._spare[0] if self._spare else None

    def _return_slot(self, carrier: CoroutineSlot) -> bool:
        """Whether a carrier is kept that has lost its frame."""
        if len(self._spare) >= SPARE_SLOTS_MAX:
            return False
        self._spare.append(carrier)
        return True

    def _create_slot(self) -> CoroutineSlot:
        carrier = CoroutineSlot(self._loop, self._return_slot)
        self._all.add(carrier.task)
        carrier.task.add_done_callback(self._all.discard)
        return carrier

    @contextmanager
    def as_current_task(self, carrier: CoroutineSlot) -> Iterator[None]:
        """Within, `asyncio.current_task()` is the carrier's."""
        own = asyncio.current_task()
        assert own is not None, "frames are begun by a task"
        asyncio_tasks._leave_task(self._loop, own)  # noqa: SLF001 - as asyncio's own eager tasks do
        asyncio_tasks._enter_task(self._loop, carrier.task)  # noqa: SLF001
        try:
            yield
        finally:
            asyncio_tasks._leave_task(self._loop, carrier.task)  # noqa: SLF001
            asyncio_tasks._enter_task(self._loop, own)  # noqa: SLF001

    async def close(self) -> int:
        """Cancel all; how many frames ignored that and cannot be ended from here."""
        for task in self._all:
            task.cancel()
        if self._all:
            await asyncio.wait(set(self._all), timeout=CLOSE_TIMEOUT_S)
        return len(self._all)
