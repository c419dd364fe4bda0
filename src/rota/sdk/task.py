"""A task: the function it was made from, what one frame of it needs, and how it is submitted.

Types go all the way: `submit` takes what the function takes, and `Job.result` returns what it returns, awaited when the
function is async. `options`, `schedule` and `on` return another task that differs in how it is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from copy import copy
from datetime import datetime, timedelta
from functools import update_wrapper
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, cast
from uuid import UUID

from rota.client.connections import has_backend_override, now_ms
from rota.model.errors import InvalidInput
from rota.model.ids import JobId, parse_id
from rota.model.jobs.submission import Submission
from rota.model.jobs.work import Work
from rota.sdk.job import Job, list_result_reader, single_result_reader
from rota.sdk.payload import Signature, to_msgpack_value
from rota.sdk.task_options import TaskOptions, build_submission, validate_options

if TYPE_CHECKING:
    from rota.model.jobs.submission import SubmitResult
    from rota.sdk.app import Rota
    from rota.sdk.sync import SyncTask

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)


class Call(Generic[R]):
    """A task with its arguments, for `submit_many`."""

    __slots__ = ("input", "task")

    def __init__(self, task: Task[..., R], given: dict[str, Any]) -> None:
        self.task = task
        self.input = given


class MappableTask(Protocol[A_contra, R]):
    """A task that may be called with one argument: one that can be mapped."""

    def call(self, item: A_contra, /) -> Call[R]: ...


class Task(Generic[P, R]):
    """A worker runs it on its loop if it is async, else in a process apart."""

    def __init__(self, app: Rota, function: Callable[P, Any], work: Work, topic: str) -> None:
        update_wrapper(cast("Callable[P, Any]", self), function)
        self.app = app
        self.function: Callable[..., Any] = function
        self.work = work
        self.topic = topic
        self.is_async = iscoroutinefunction(function)
        self.signature = Signature(function)
        self.wanted: TaskOptions = {}
        self._connection: Any = None

    @property
    def name(self) -> str:
        return self.work.task

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    @property
    def sync(self) -> SyncTask[P, R]:
        """The same, for code without an event loop: its calls wait, and return what these return when awaited."""
        from rota.sdk.sync import SyncTask

        return SyncTask(self)

    def options(self, **wanted: Unpack[TaskOptions]) -> Self:
        """The same task, submitted with these options besides those it has: `docs/reference/sdk.md` lists them."""
        return self._copy_with(wanted={**self.wanted, **validate_options(wanted)})

    def schedule(self, *, at: datetime | timedelta | float | str) -> Self:
        """The same task, submitted at once and run at a moment, or so long after its submission."""
        return self.options(run_at=at)

    def on(self, connection: Any) -> Self:
        """The same task, submitted in the transaction that is open on a connection of asyncpg, psycopg or SQLAlchemy.

        The job is there if and only if the caller commits. A connection whose calls are not awaited is for `.sync.on`.
        """
        return self._copy_with(_connection=connection)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call of it for `submit_many`."""
        return Call(self, self._input(args, kwargs))

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Have it run once with these arguments."""
        [job] = await self.submit_many([self.call(*args, **kwargs)])
        return job

    async def submit_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """A job for each call, all of them or none, in one go: `task.submit_many([task.call(1), task.call(2)])`.

        What a call was given options for wins over the options of this task.
        """
        calls = list(calls)
        return self.jobs(calls, await self.send(self.submissions(calls)))

    async def map(self: MappableTask[A, R], items: Iterable[A]) -> Job[list[R]]:
        """One job with a frame for each item; its result is a list, in the order of the items."""
        task = cast("Task[..., R]", self)
        [submitted] = await task.send([task.mapping(items)])
        return task.mapped(submitted)

    async def submit_frames(self, frames: str | int, /, *args: P.args, **kwargs: P.kwargs) -> Job[list[R]]:
        """One job that runs it with these arguments once for each frame of a range: "1-100x2", or how many.

        `context().frame` tells which; its result is a list, in the order of the frames.
        """
        [submitted] = await self.send([self.framed(frames, args, kwargs)])
        return self.mapped(submitted)

    def job(self, job: UUID | str) -> Job[R]:
        """A job of this task that was submitted before, perhaps elsewhere, by its id."""
        return Job(self.app, parse_id(JobId, str(job)), single_result_reader(self.signature.decode_result))

    def submissions(self, calls: Iterable[Call[R]]) -> list[Submission]:
        """What `submit_many` submits."""
        return [call.task.submission({**self.wanted, **call.task.wanted}, input=call.input) for call in calls]

    def jobs(self, calls: Iterable[Call[R]], submitted: Iterable[SubmitResult]) -> list[Job[R]]:
        """What `submit_many` returns."""
        return [
            Job(self.app, one.job, single_result_reader(call.task.signature.decode_result), already=one.already)
            for call, one in zip(calls, submitted, strict=True)
        ]

    def mapping(self, items: Iterable[Any]) -> Submission:
        """What `map` submits."""
        given = [self._input((item,), {}) for item in items]
        if not given:
            raise InvalidInput(f"The task {self.name} was given no items to map: a job needs at least one frame.")
        return self.submission(self.wanted, items=given)

    def framed(self, frames: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Submission:
        """What `submit_frames` submits."""
        return self.submission(self.wanted, input=self._input(args, kwargs), frames=frames)

    def mapped(self, submitted: SubmitResult) -> Job[list[R]]:
        """What `map` and `submit_frames` return."""
        return Job(self.app, submitted.job, list_result_reader(self.signature.decode_result), already=submitted.already)

    def submission(self, wanted: TaskOptions, **frames: Any) -> Submission:
        """With these options and no others; `frames` are its input and its range, or its items."""
        return build_submission(self.work, self.topic, self.app, wanted, now_ms(), **frames)

    async def send(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        """By the transport of the app, or on the connection of the caller."""
        if self._connection is None or has_backend_override():
            return await self.app.transport.submit(submissions)
        from rota.sdk import transactional

        return await transactional.submit(self._connection, submissions)

    def _input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            self.signature.check(args, kwargs)
            return {"args": to_msgpack_value(list(args)), "kwargs": to_msgpack_value(kwargs)}
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            told = str(error)[:300].rstrip(".")
            raise InvalidInput(f"The task {self.name} cannot be submitted like this: {told}.") from error

    def _copy_with(self, **other: Any) -> Self:
        changed = copy(self)
        vars(changed).update(other)
        return changed


class FunctionTask(Task[P, R]):
    """Of a plain function: called, it is that function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.function(*args, **kwargs)
        return result


class CoroutineTask(Task[P, R]):
    """Of an async function: called, it is that function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        coroutine: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return coroutine
