"""The event loop of long-running processes: uvloop if installed, which costs a fifth less per message.

asyncio and uvloop let `SystemExit` and `KeyboardInterrupt` of any callback or task out of the loop, which ends the
process. A process that runs user code on its loop ignores them instead: the loop is entered again and continues with
the next callback. Only the main coroutine ends it, or a second Ctrl-C (the first cancels the main coroutine).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)
T = TypeVar("T")


class _ExitIgnoringLoop(asyncio.AbstractEventLoop):
    """Mixin for a class of loops."""

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        if not isinstance(future, asyncio.Task):
            return super().run_until_complete(future)  # the clean-up after the main coroutine
        main: asyncio.Task[T] = future
        while True:
            try:
                return super().run_until_complete(main)
            except (SystemExit, KeyboardInterrupt) as error:
                if main.done() or (isinstance(error, KeyboardInterrupt) and main.cancelling()):
                    raise
                log.exception(
                    "loop_callback_exit_ignored",
                    remedy="a loop callback tried to end the process: let the task itself raise an exception",
                    exc_info=error,
                )


def run(main: Coroutine[Any, Any, T], *, ignore_exits: bool = False) -> T:
    """As `asyncio.run`. `ignore_exits`: a callback that raises SystemExit or KeyboardInterrupt is only logged."""
    base = _loop_class()
    loop_class = type("ExitIgnoringLoop", (_ExitIgnoringLoop, base), {}) if ignore_exits else base
    with asyncio.Runner(loop_factory=loop_class) as runner:
        return runner.run(main)


def _loop_class() -> type[asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.Loop
