"""Turns `SystemExit` in tasks created by a handler into an ordinary exception.

asyncio propagates `SystemExit` and `KeyboardInterrupt` of any task out of the event loop, which would end the worker
with all its frames. `coroutine_pool` catches those raised by a handler itself; this module catches those of tasks it
creates with a TaskGroup, `gather` or `wait_for`, and raises `Exited` instead. A loop callback that exits is logged and
ignored by the loop of a worker process (`rota.infra.loop`). Only `os._exit` ends the worker; its frames are then
requeued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Final

from rota.sdk.context import CURRENT_CONTEXT

_EXIT_EXCEPTIONS: Final = (SystemExit, KeyboardInterrupt)


class Exited(Exception):
    """A task created by a handler tried to end the process."""


class ExitGuard(Coroutine[Any, Any, Any]):
    """Wraps a coroutine; it behaves the same except that it cannot end the process."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except _EXIT_EXCEPTIONS as error:
            raise _to_exited(error) from error

    def throw(self, *args: Any) -> Any:
        try:
            return self._inner.throw(*args)
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
        """`cr_frame` and the like, for tools that print tasks."""
        return getattr(self._inner, name)


def _to_exited(error: BaseException) -> Exited:
    return Exited(f"{type(error).__name__}: {error}")


def guarded_task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    """Task factory: guards tasks created by user code; the worker's own tasks stay plain."""
    if CURRENT_CONTEXT.get(None) is not None and asyncio.iscoroutine(coroutine):
        coroutine = ExitGuard(coroutine)
    return asyncio.Task(coroutine, loop=loop, **more)
