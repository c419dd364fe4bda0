"""The connections of an app: one transport for each loop that uses it, made when it is first needed.

Connections belong to the loop and the process they were opened in. A child that was forked forgets those of its parent
without touching them (closing one would end the parent's session, and the two share what the kernel watches for it)
and opens its own. `replaced` puts another transport in the place of all of them, for tests.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

from rota.client.transport import Transport
from rota.infra.clock import Clock, SystemClock

if TYPE_CHECKING:
    from rota.sdk.task import Task

TasksByName = Mapping[str, "Task[..., Any]"]
_SYSTEM_CLOCK: Final = SystemClock()
_ALL_POOLS: Final[WeakSet[TransportPool]] = WeakSet()
_FORK_INHERITED: Final[list[object]] = []
_OVERRIDES: Final[list[BackendOverride]] = []


class BackendOverride(Protocol):
    """What stands in for Rota in a test."""

    @property
    def clock(self) -> Clock: ...

    def transport(self, tasks: TasksByName) -> Transport:
        """For an app with these tasks."""
        ...


class TransportPool:
    def __init__(self, tasks: TasksByName, make: Callable[[], Transport]) -> None:
        self._tasks = tasks
        self._make = make
        self._reset()
        _ALL_POOLS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Transport] = WeakKeyDictionary()

    def current(self) -> Transport:
        """Of the running loop."""
        if _OVERRIDES:
            return _OVERRIDES[-1].transport(self._tasks)
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._by_loop:
                self._by_loop[loop] = self._make()
            return self._by_loop[loop]

    async def close(self) -> None:
        """Of the running loop; the next call opens others."""
        with self._lock:
            transport = self._by_loop.pop(asyncio.get_running_loop(), None)
        if transport is not None:
            await transport.close()

    def discard_after_fork(self) -> None:
        _FORK_INHERITED.append(self._by_loop)
        self._reset()


async def close_all() -> None:
    """Those of the running loop, of every app."""
    for clients in list(_ALL_POOLS):
        await clients.close()


@contextmanager
def override_backend(by: BackendOverride) -> Iterator[None]:
    """Within, every app of this process uses this one."""
    _OVERRIDES.append(by)
    try:
        yield
    finally:
        _OVERRIDES.remove(by)


def has_backend_override() -> bool:
    return bool(_OVERRIDES)


def now_ms() -> int:
    """What "now" is where jobs are submitted."""
    return (_OVERRIDES[-1].clock if _OVERRIDES else _SYSTEM_CLOCK).now_ms()


def _after_fork() -> None:
    for clients in list(_ALL_POOLS):
        clients.discard_after_fork()


os.register_at_fork(after_in_child=_after_fork)
