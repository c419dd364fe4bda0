"""Connections of an app: one transport per event loop, created on first use.

Connections belong to the event loop and process that opened them. After a fork, the child drops its parent's
connections without closing them (closing would end the parent's session, and both share the epoll descriptor) and opens
its own. `override_backend` replaces all transports, for tests.
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
    """Replaces Rota in a test."""

    @property
    def clock(self) -> Clock: ...

    def transport(self, tasks: TasksByName) -> Transport:
        """A transport for an app with these tasks."""
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
        """The transport of the running event loop."""
        if _OVERRIDES:
            return _OVERRIDES[-1].transport(self._tasks)
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._by_loop:
                self._by_loop[loop] = self._make()
            return self._by_loop[loop]

    async def close(self) -> None:
        """Closes the running loop's connections; the next call opens new ones."""
        with self._lock:
            transport = self._by_loop.pop(asyncio.get_running_loop(), None)
        if transport is not None:
            await transport.close()

    def discard_after_fork(self) -> None:
        _FORK_INHERITED.append(self._by_loop)
        self._reset()


async def close_all() -> None:
    """Closes the running loop's connections of every app."""
    for pool in list(_ALL_POOLS):
        await pool.close()


@contextmanager
def override_backend(override: BackendOverride) -> Iterator[None]:
    """In this block, every app of this process uses `override`."""
    _OVERRIDES.append(override)
    try:
        yield
    finally:
        _OVERRIDES.remove(override)


def has_backend_override() -> bool:
    return bool(_OVERRIDES)


def now_ms() -> int:
    """Current time of the backend: the system clock, or the override's."""
    return (_OVERRIDES[-1].clock if _OVERRIDES else _SYSTEM_CLOCK).now_ms()


def _after_fork() -> None:
    for pool in list(_ALL_POOLS):
        pool.discard_after_fork()


os.register_at_fork(after_in_child=_after_fork)
