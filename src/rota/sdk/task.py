"""A task: its function, the resources of one frame, and submission.

Fully typed: `submit` takes the function's parameters and `Job.result` returns its return type (awaited if async).
`options`, `schedule` and `on` return a copy with other submission options.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from copy import copy
from datetime import datetime, timedelta
from functools import update_wrapper
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, cast
from uuid import UUID

from msgspec.structs import replace

from rota.client.connections import has_backend_override, now_ms
from rota.model.errors import InvalidInput
from rota.model.ids import JobId, parse_id
from rota.model.jobs.submission import Submission
from rota.model.jobs.work import Work
from rota.sdk import own_transaction
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
    """A task callable with one argument, for `map`."""

    def call(self, item: A_contra, /) -> Call[R]: ...


class Task(Generic[P, R]):
    """Workers run an async task on their event loop, a sync one in a separate process."""

    def __init__(self, app: Rota, function: Callable[P, Any], work: Work, topic: str) -> None:
        update_wrapper(cast("Callable[P, Any]", self), function)
        self.app = app
        self.function: Callable[..., Any] = function
        self.work = work
        self.topic = topic
        self.is_async = iscoroutinefunction(function)
        self.signature = Signature(function)
        self.overrides: TaskOptions = {}
        self._connection: Any = None

    @property
    def name(self) -> str:
        return self.work.task

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    @property
    def sync(self) -> SyncTask[P, R]:
        """The blocking facade, for code without an event loop."""
        from rota.sdk.sync import SyncTask

        return SyncTask(self)

    def options(self, **options: Unpack[TaskOptions]) -> Self:
        """A copy with these submission options added: see `docs/reference/sdk.md`."""
        return self._copy_with(overrides={**self.overrides, **validate_options(options)})

    def schedule(self, *, at: datetime | timedelta | float | str) -> Self:
        """A copy whose jobs are submitted now and run at a time, or a duration after submission."""
        return self.options(run_at=at)

    def on(self, connection: Any) -> Self:
        """A copy that submits in the transaction open on a connection of asyncpg, psycopg or SQLAlchemy.

        The job exists if and only if the caller commits. For blocking connections use `.sync.on`.
        """
        return self._copy_with(_connection=connection)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call for `submit_many`."""
        return Call(self, self._input(args, kwargs))

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Submits a job that runs the task once with these arguments."""
        [job] = await self.submit_many([self.call(*args, **kwargs)])
        return job

    async def submit_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Submits one job per call, all or nothing: `task.submit_many([task.call(1), task.call(2)])`.

        Options of a call override those of this task.
        """
        calls = list(calls)
        return self.jobs(calls, await self.send(self.submissions(calls)))

    async def map(self: MappableTask[A, R], items: Iterable[A]) -> Job[list[R]]:
        """Submits one job with a frame per item; its result is a list in the order of the items."""
        task = cast("Task[..., R]", self)
        [submitted] = await task.send([task.mapping(items)])
        return task.mapped(submitted)

    async def submit_frames(self, frames: str | int, /, *args: P.args, **kwargs: P.kwargs) -> Job[list[R]]:
        """Submits one job that runs the task once per frame of a range such as "1-100x2", or a count.

        `context().frame` is the frame number; the result is a list in the order of the frames.
        """
        [submitted] = await self.send([self.framed(frames, args, kwargs)])
        return self.mapped(submitted)

    def job(self, job: UUID | str) -> Job[R]:
        """A handle of a job of this task, by id."""
        return Job(self.app, parse_id(JobId, str(job)), single_result_reader(self.signature.decode_result))

    def submissions(self, calls: Iterable[Call[R]]) -> list[Submission]:
        """The submissions of `submit_many`. The options of a task are read once: its calls differ in their input."""
        alike: dict[Task[..., R], Submission] = {}
        found: list[Submission] = []
        for call in calls:
            shared = alike.get(call.task)
            if shared is None:
                shared = alike[call.task] = call.task.submission({**self.overrides, **call.task.overrides}, input=None)
            [layer] = shared.layers
            found.append(replace(shared, layers=(replace(layer, input=call.input),)))
        return found

    def jobs(self, calls: Iterable[Call[R]], submitted: Iterable[SubmitResult]) -> list[Job[R]]:
        """The jobs `submit_many` returns."""
        return [
            Job(self.app, result.job, single_result_reader(call.task.signature.decode_result), already=result.already)
            for call, result in zip(calls, submitted, strict=True)
        ]

    def mapping(self, items: Iterable[Any]) -> Submission:
        """The submission of `map`."""
        inputs = [self._input((item,), {}) for item in items]
        if not inputs:
            raise InvalidInput(f"Task {self.name} has no items to map: pass at least one.")
        return self.submission(self.overrides, items=inputs)

    def framed(self, frames: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Submission:
        """The submission of `submit_frames`."""
        return self.submission(self.overrides, input=self._input(args, kwargs), frames=frames)

    def mapped(self, submitted: SubmitResult) -> Job[list[R]]:
        """The job `map` and `submit_frames` return."""
        return Job(self.app, submitted.job, list_result_reader(self.signature.decode_result), already=submitted.already)

    def submission(self, options: TaskOptions, **frames: Any) -> Submission:
        """A submission with exactly these options; `frames` are its input and range, or its items."""
        return build_submission(self.work, self.topic, self.app, options, now_ms(), **frames)

    async def send(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        """Uses the app's transport, or the caller's connection."""
        if self._connection is None or has_backend_override():
            return await self.app.transport.submit(submissions)
        return await own_transaction.submit(self._connection, submissions)

    def _input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            self.signature.check(args, kwargs)
            return {"args": to_msgpack_value(list(args)), "kwargs": to_msgpack_value(kwargs)}
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = str(error)[:300].rstrip(".")
            raise InvalidInput(f"Task {self.name} cannot be submitted with these arguments: {reason}.") from error

    def _copy_with(self, **attributes: Any) -> Self:
        task = copy(self)
        vars(task).update(attributes)
        return task


class FunctionTask(Task[P, R]):
    """A task of a plain function; calling it calls the function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.function(*args, **kwargs)
        return result


class CoroutineTask(Task[P, R]):
    """A task of an async function; calling it calls the function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        coroutine: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return coroutine
