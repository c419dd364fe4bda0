"""Blocking facade of the SDK: `task.sync`, `job.sync`, `app.sync`.

Each call runs the async method of the same name on the background loop (`rota.sdk.background_loop`) and waits for it.

It is a separate facade, so that the return type of `task.submit(...)` does not depend on the caller's context. Only
`on(connection)` does not use the loop: a blocking connection belongs to its caller's thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, Unpack, cast
from uuid import UUID

from rota.client.admin_client import AdminClient
from rota.client.connections import has_backend_override
from rota.client.resource import SyncMode
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.jobs.submission import Submission
from rota.sdk import own_transaction
from rota.sdk.background_loop import is_shutting_down, run_blocking
from rota.sdk.job import Job
from rota.sdk.task import Call, MappableTask, Task
from rota.sdk.task_options import TaskOptions

if TYPE_CHECKING:
    from rota.api.explanation import JobExplanation
    from rota.api.jobs import JobHistoryEntry, JobView
    from rota.model.events import Event
    from rota.model.jobs.submission import SubmitResult
    from rota.sdk.app import Rota
    from rota.sdk.workflow.run import SyncRun
    from rota.sdk.workflow.workflow import Workflow

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
T = TypeVar("T")


class SyncTask(Generic[P, R]):
    """A task with blocking calls."""

    def __init__(self, task: Task[P, R], connection: Any = None) -> None:
        self._task = task
        self._connection = connection

    def __repr__(self) -> str:
        return f"<sync task {self._task.name}>"

    def options(self, **options: Unpack[TaskOptions]) -> SyncTask[P, R]:
        return self._with_task(self._task.options(**options))

    def schedule(self, *, at: datetime | timedelta | float | str) -> SyncTask[P, R]:
        return self._with_task(self._task.schedule(at=at))

    def on(self, connection: Any) -> SyncTask[P, R]:
        """Submits in the transaction open on a connection of psycopg, SQLAlchemy or Django."""
        return SyncTask(self._task, connection)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        return self._task.call(*args, **kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> SyncJob[R]:
        [job] = self.submit_many([self._task.call(*args, **kwargs)])
        return job

    def submit_many(self, calls: Iterable[Call[R]]) -> list[SyncJob[R]]:
        calls = list(calls)
        submitted = self._send(self._task.submissions(calls))
        return [SyncJob(job) for job in self._task.jobs(calls, submitted)]

    def map(self: MappableTask[A, R], items: Iterable[A]) -> SyncJob[list[R]]:
        facade = cast("SyncTask[..., R]", self)
        [submitted] = facade._send([facade._task.mapping(items)])  # noqa: SLF001 - same class
        return SyncJob(facade._task.mapped(submitted))  # noqa: SLF001

    def submit_frames(self, frames: str | int, /, *args: P.args, **kwargs: P.kwargs) -> SyncJob[list[R]]:
        [submitted] = self._send([self._task.framed(frames, args, kwargs)])
        return SyncJob(self._task.mapped(submitted))

    def job(self, job: UUID | str) -> SyncJob[R]:
        return SyncJob(self._task.job(job))

    def _with_task(self, task: Task[P, R]) -> SyncTask[P, R]:
        return SyncTask(task, self._connection)

    def _send(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        if self._connection is None or has_backend_override():
            return run_blocking(self._task.send(submissions))
        return own_transaction.submit_sync(self._connection, submissions)


class SyncJob(Generic[R]):
    """A job with blocking calls."""

    def __init__(self, job: Job[R]) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"<sync job {self.id}>"

    @property
    def id(self) -> JobId:
        return self._job.id

    @property
    def already(self) -> bool:
        return self._job.already

    @property
    def unsync(self) -> Job[R]:
        """The async handle."""
        return self._job

    def get(self) -> JobView:
        return run_blocking(self._job.get())

    def state(self) -> JobState:
        return run_blocking(self._job.state())

    def wait(self, timeout: float | None = None) -> JobState:
        return run_blocking(self._job.wait(timeout))

    def result(self, timeout: float | None = None) -> R:
        return run_blocking(self._job.result(timeout))

    def cancel(self) -> bool:
        return run_blocking(self._job.cancel())

    def retry(self, *, every_frame: bool = False) -> SyncJob[R]:
        return SyncJob(run_blocking(self._job.retry(every_frame=every_frame)))

    def logs(
        self,
        frame: int | None = None,
        *,
        layer: str | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        return _iterate(self._job.logs(frame, layer=layer, attempt=attempt, follow=follow))

    def events(self) -> Iterator[JobHistoryEntry]:
        return _iterate(self._job.events())

    def explain(self) -> JobExplanation:
        return run_blocking(self._job.explain())


class SyncWorkflow(Generic[P, R]):
    """A workflow with blocking calls."""

    def __init__(self, workflow: Workflow[P, R]) -> None:
        self._workflow = workflow

    def __repr__(self) -> str:
        return f"<sync workflow {self._workflow.name}>"

    def options(self, *, key: str) -> SyncWorkflow[P, R]:
        return SyncWorkflow(self._workflow.options(key=key))

    def start(self, *args: P.args, **kwargs: P.kwargs) -> SyncRun[R]:
        return run_blocking(self._workflow.start(*args, **kwargs)).sync

    def run(self, run: UUID | str) -> SyncRun[R]:
        return self._workflow.run(run).sync


class SyncRota(AdminClient[SyncMode]):
    """An app with blocking calls."""

    def __init__(self, app: Rota) -> None:
        super().__init__(SyncMode)
        self._app = app

    def _connection_owner(self) -> Rota:
        return self._app

    def job(self, job: UUID | str) -> SyncJob[Any]:
        return SyncJob(self._app.job(job))

    def run(self, run: UUID | str) -> SyncRun[Any]:
        return self._app.run(run).sync

    def events(
        self,
        *,
        show: str = "",
        job: UUID | None = None,
        run: UUID | None = None,
        kinds: Sequence[str] = (),
        after: str = "",
    ) -> Iterator[Event]:
        return _iterate(self._app.events(show=show, job=job, run=run, kinds=kinds, after=after))

    def submit(self, submission: Submission) -> SyncJob[Any]:
        return SyncJob(run_blocking(self._app.submit(submission)))

    def close(self) -> None:
        """Closes the connections of the background loop; the next call opens new ones."""
        run_blocking(self._app.close())


_END: Final = object()


def _iterate(iterator: AsyncIterator[T]) -> Iterator[T]:
    try:
        while (item := run_blocking(_next(iterator))) is not _END:
            yield cast("T", item)
    finally:
        if isinstance(iterator, AsyncGenerator) and not is_shutting_down():
            run_blocking(_aclose(iterator))


async def _next(iterator: AsyncIterator[T]) -> T | object:
    return await anext(iterator, _END)


async def _aclose(iterator: AsyncGenerator[Any, None]) -> None:
    await iterator.aclose()
