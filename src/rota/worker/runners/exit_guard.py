"""Tasks that a handler starts: what would end the process ends the task instead.

asyncio lets `SystemExit` and `KeyboardInterrupt` of any task through to whoever runs the loop, which here is the worker
with all its frames. `carriers` keeps those that a handler raises itself; this keeps those of tasks it has made, be it
by a TaskGroup, `gather` or `wait_for`: they become `Exited`, an error like any other. A callback of the loop that exits
still ends the worker, as `os._exit` does; then its frames go to another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Final

from rota.sdk.context import CURRENT_CONTEXT

_EXIT_EXCEPTIONS: Final = (SystemExit, KeyboardInterrupt)


class Exited(Exception):
    """A task of a handler tried to end the process."""


class ExitGuard(Coroutine[Any, Any, Any]):
    """A coroutine with all it does but ending the process."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except _EXIT_EXCEPTIONS as error:
            raise _to_exited(error) from error

    def throw(self, *given: Any) -> Any:
        try:
            return self._inner.throw(*given)
        except _EXIT_EXCEPTIONS as error:
            raise _to_exited(error) from error

    def close(self) -> None:
        try:
            self._inner.close()
        except _EXIT_EXCEPTIONS as error:
            raise _to_exited(error) from error

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            return (yield from self._inner.__await__())
        except _EXIT_EXCEPTIONS as error:
            raise _to_exited(error) from error

    def __getattr__(self, name: str) -> Any:
        """Where it stands, for those who print tasks."""
        return getattr(self._inner, name)


def _to_exited(error: BaseException) -> Exited:
    return Exited(f"{type(error).__name__}: {error}")


def guarded_task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    """A task factory: tasks made by a handler, or by what it calls, are contained; our own are as ever."""
    if CURRENT_CONTEXT.get(None) is not None and asyncio.iscoroutine(coroutine):
        coroutine = ExitGuard(coroutine)
    return asyncio.Task(coroutine, loop=loop, **more)
