"""An app is a set of tasks, by name. A task is the function it was made from, and what one frame of it needs.

The same module is imported by whoever submits and by `rota worker`, so declaring a task starts and contacts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import update_wrapper
from inspect import iscoroutinefunction
from typing import Any, Generic, ParamSpec, TypeVar, overload

from rota.model.errors import InvalidInput
from rota.model.units import parse_cores, parse_duration, parse_memory
from rota.model.work import Retries, Work

P = ParamSpec("P")
R = TypeVar("R")
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}", re.ASCII)


class Task(Generic[P, R]):
    """A plain callable that also knows how a worker runs it: on its loop if it is async, else in a process apart."""

    def __init__(self, function: Callable[P, R], work: Work, topic: str) -> None:
        update_wrapper(self, function)
        self.function = function
        self.work = work
        self.topic = topic
        self.is_async = iscoroutinefunction(function)

    @property
    def name(self) -> str:
        return self.work.task

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class Rota:
    """The tasks of one application."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task[..., Any]] = {}

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        /,
        *,
        name: str = "",
        topic: str = "",
        cores: float | str = 1,
        gpus: int = 0,
        memory: str | int = 0,
        retries: int | Retries = 0,
        timeout: float | str = 0,
        kill_after: float | str = 5,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, function: Callable[P, R] | None = None, /, **wanted: Any) -> Any:
        """Declare a task. It is called by `name` (the function's own), on `topic` (its name).

        `memory` is text such as "4GiB", or mebibytes; `timeout` and `kill_after` are seconds, or text such as "10min".
        """

        def declare(declared: Callable[P, R]) -> Task[P, R]:
            return self._add(declared, **wanted)

        return declare if function is None else declare(function)

    def _add(self, function: Callable[P, R], *, name: str = "", topic: str = "", **wanted: Any) -> Task[P, R]:
        name = name or getattr(function, "__name__", "")
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} cannot name a task: give it a name of letters, digits, dots and hyphens.")
        if name in self.tasks:
            raise InvalidInput(f"There are two tasks {name!r}: give one of them another name, as in task(name=...).")
        task = Task(function, _work(name, **wanted), topic or name)
        self.tasks[name] = task
        return task


def _work(
    name: str,
    *,
    cores: float | str = 1,
    gpus: int = 0,
    memory: str | int = 0,
    retries: int | Retries = 0,
    timeout: float | str = 0,
    kill_after: float | str = 5,
) -> Work:
    if gpus < 0:
        raise InvalidInput(f"Task {name!r} asks for {gpus} GPUs; write a number from 0.")
    return Work(
        task=name,
        cores=parse_cores(cores),
        gpus=gpus,
        memory_mb=parse_memory(memory) if isinstance(memory, str) else memory,
        retries=Retries(most=retries) if isinstance(retries, int) else retries,
        timeout_s=_seconds(timeout),
        kill_after_s=_seconds(kill_after),
    )


def _seconds(time: float | str) -> float:
    seconds = parse_duration(time) if isinstance(time, str) else float(time)
    if not 0 <= seconds < float("inf"):
        raise InvalidInput(f"{time!r} is no time; write seconds from 0, or text such as 10min.")
    return seconds
