"""The event loop of the sync facade: one thread per process, started by the first call.

`run_blocking` is thread-safe. It refuses to run on a thread with a running event loop, which it would block. A forked
child starts its own thread: its parent's does not exist there. On normal exit connections are closed and later calls
are refused; if the process is killed, the server detects the closed connections.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Final, TypeVar

from rota.client.connections import close_all
from rota.model.errors import InvalidInput

T = TypeVar("T")
CLOSE_TIMEOUT_S: Final = 2.0
_FORK_INHERITED: Final[list[object]] = []


class _BackgroundLoop:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def get_or_start(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                threading.Thread(target=self.loop.run_forever, name="rota-sync", daemon=True).start()
            return self.loop

    def after_fork(self) -> None:
        _FORK_INHERITED.append(self.loop)  # never closed here: its epoll descriptor is shared with the parent
        self.lock = threading.Lock()
        self.loop = None


_BACKGROUND: Final = _BackgroundLoop()
os.register_at_fork(after_in_child=_BACKGROUND.after_fork)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine on the background loop, with the caller's contextvars."""
    if _in_event_loop():
        coroutine.close()
        raise InvalidInput("This thread runs an event loop: omit `.sync` and await the call.")
    if _BACKGROUND.closed:
        coroutine.close()
        raise InvalidInput("This process is exiting: call Rota earlier.")
    future = asyncio.run_coroutine_threadsafe(coroutine, _BACKGROUND.get_or_start())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # the caller was interrupted; otherwise a no-op
        raise


async def run_in_background(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run `work` on the background loop, if there is one and it is not the running loop."""
    loop = _BACKGROUND.loop
    if loop is None or _BACKGROUND.closed or loop is asyncio.get_running_loop():
        return
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))


def is_shutting_down() -> bool:
    """Whether the process is exiting and the loop is closed."""
    return _BACKGROUND.closed


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@atexit.register
def _at_exit() -> None:
    loop, _BACKGROUND.closed = _BACKGROUND.loop, True
    if loop is not None and loop.is_running():
        with suppress(FutureTimeoutError):
            asyncio.run_coroutine_threadsafe(close_all(), loop).result(CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
