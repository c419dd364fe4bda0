"""Child processes, started on demand and reused.

A process is starting, idle, or belongs to one caller. Callers that find no idle process wait in a queue; each process
that becomes ready or is released goes to the first of them. So a start is never wasted: it continues when its caller
gives up, and a caller takes a process that is released before its own has started. A start that fails fails the first
caller in the queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from rota.worker.processes.child import ChildProcess
from rota.worker.processes.group_guard import ProcessGroupGuard

log = structlog.get_logger(__name__)
P = TypeVar("P", bound=ChildProcess[Any])


class ProcessPool(Generic[P]):
    """`create` spawns a process under the guard that it is given.

    At most `idle_max` processes are idle and `starts_max` start at once.
    """

    def __init__(self, create: Callable[[ProcessGroupGuard], P], *, idle_max: int, starts_max: int) -> None:
        self._create = create
        self._idle_max = idle_max
        self._starts_max = starts_max
        self._idle: list[P] = []
        self._callers: deque[asyncio.Future[P]] = deque()
        self._starts: set[asyncio.Task[None]] = set()
        self._closed = False
        self._guard = ProcessGroupGuard()

    @property
    def idle(self) -> tuple[P, ...]:
        return tuple(self._idle)

    async def acquire(self) -> P:
        """A process that has loaded the app; the caller releases or closes it.

        Raises ProcessStartFailed, TimeoutError or OSError if a new one does not start.
        """
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            await child.close()
        caller: asyncio.Future[P] = asyncio.get_running_loop().create_future()
        self._callers.append(caller)
        self._start_missing()
        try:
            return await caller
        except BaseException:
            if not caller.cancel() and not caller.cancelled() and caller.exception() is None:
                # Cancelled in the moment in which it got a process.
                await self.release(caller.result())
            raise

    async def release(self, child: P) -> None:
        """Gives the process to the next caller, now or later, if it can still be used."""
        if child.alive and (caller := self._next_caller()) is not None:
            caller.set_result(child)
        elif child.alive and not self._closed and len(self._idle) < self._idle_max:
            self._idle.append(child)
        else:
            await child.close()

    async def close(self) -> None:
        """Closes idle and starting processes. Callers close theirs."""
        self._closed = True
        starts = set(self._starts)
        for start in starts:
            start.cancel()
        if starts:
            await asyncio.wait(starts)
        idle, self._idle = self._idle, []
        await asyncio.gather(*(child.close() for child in idle))
        await self._guard.close()

    def _next_caller(self) -> asyncio.Future[P] | None:
        while self._callers:
            caller = self._callers.popleft()
            if not caller.done():
                return caller
        return None

    def _start_missing(self) -> None:
        """Starts a process for each caller that has none, as far as allowed."""
        waiting = sum(not caller.done() for caller in self._callers)
        for _ in range(min(waiting, self._starts_max) - len(self._starts)):
            start = asyncio.create_task(self._start(), name="rota process start")
            self._starts.add(start)
            start.add_done_callback(self._on_start_ended)

    def _on_start_ended(self, start: asyncio.Task[None]) -> None:
        self._starts.discard(start)
        if not self._closed:
            self._start_missing()

    async def _start(self) -> None:
        try:
            child = await self._create_ready()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller that needs the process handles it
            if (caller := self._next_caller()) is not None:
                caller.set_exception(error)
            else:
                log.warning("process_start_failed", reason=str(error) or type(error).__name__)
        else:
            await self.release(child)

    async def _create_ready(self) -> P:
        child = self._create(self._guard)
        try:
            await child.wait_until_ready()
        except BaseException:
            await child.close()
            raise
        return child
