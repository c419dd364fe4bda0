"""The loop behind the sync facade: one thread for the whole process, started by the first call that needs it.

`run` may be called from any number of threads at once. It is refused on a thread that runs a loop itself, which it
would hold up. A forked child starts a thread of its own: that of its parent does not exist there. When the process ends
normally, connections are closed, and whatever is called after that is refused; when it is killed, the server notices.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as NotInTime
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
        self.over = False

    def get_or_start(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                threading.Thread(target=self.loop.run_forever, name="rota-sync", daemon=True).start()
            return self.loop

    def after_fork(self) -> None:
        _FORK_INHERITED.append(self.loop)  # never closed here: what it watches is shared with the parent
        self.lock = threading.Lock()
        self.loop = None


_BACKGROUND: Final = _BackgroundLoop()
os.register_at_fork(after_in_child=_BACKGROUND.after_fork)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns or raises, with the variables (contextvars) of the caller."""
    if _in_event_loop():
        coroutine.close()
        raise InvalidInput("This thread runs an event loop: leave `.sync` out and await the call instead.")
    if _BACKGROUND.over:
        coroutine.close()
        raise InvalidInput("This process is ending: call Rota before that.")
    future = asyncio.run_coroutine_threadsafe(coroutine, _BACKGROUND.get_or_start())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # of an interrupted caller; otherwise it has ended
        raise


def is_shutting_down() -> bool:
    """Whether the process is ending, and nobody would answer."""
    return _BACKGROUND.over


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@atexit.register
def _at_exit() -> None:
    loop, _BACKGROUND.over = _BACKGROUND.loop, True
    if loop is not None and loop.is_running():
        with suppress(NotInTime):
            asyncio.run_coroutine_threadsafe(close_all(), loop).result(CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
