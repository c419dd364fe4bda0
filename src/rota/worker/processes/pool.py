"""Idle child processes, started on demand and reused. A process is idle here or belongs to one caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rota.worker.processes.child import ChildProcess

P = TypeVar("P", bound=ChildProcess[Any])


class ProcessPool(Generic[P]):
    """`create` spawns a process; at most `idle_max` processes are kept when nobody uses them."""

    def __init__(self, create: Callable[[], P], idle_max: int) -> None:
        self._create = create
        self._idle_max = idle_max
        self._idle: list[P] = []

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
        child = self._create()
        try:
            await child.wait_until_ready()
        except BaseException:
            await child.close()
            raise
        return child

    async def release(self, child: P) -> None:
        """Keeps the process for the next caller, if it can still be used."""
        if child.alive and len(self._idle) < self._idle_max:
            self._idle.append(child)
        else:
            await child.close()

    async def close(self) -> None:
        """Closes idle processes. Callers close theirs."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(child.close() for child in idle))
