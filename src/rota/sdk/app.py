"""`Rota`: the tasks, agents and workflows of an application, and its connection to the API.

Submitters and `rota worker` import the same module, so declarations have no side effects: connections are opened by the
first call that needs one.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, Unpack, overload
from uuid import UUID

import msgspec

from rota.client.admin_client import AdminClient
from rota.client.connections import TransportPool
from rota.client.resource import AsyncMode, http_client_of
from rota.client.transport import Transport, make_transport
from rota.model.errors import InvalidInput
from rota.model.failure_classes import ClassifyHook
from rota.model.ids import JobId, RunId, parse_id
from rota.model.jobs.submission import Submission
from rota.model.jobs.work import Retries, Work
from rota.model.units import Centicores, parse_cores, parse_duration, parse_memory
from rota.sdk.agent import AgentDefinition, AgentOptions, define_agent
from rota.sdk.background_loop import run_in_background
from rota.sdk.job import Job, read_untyped_result
from rota.sdk.task import Call, CoroutineTask, FunctionTask, Task

if TYPE_CHECKING:
    from rota.model.events import Event
    from rota.sdk.sync import SyncRota
    from rota.sdk.workflow.builder import Steps
    from rota.sdk.workflow.run import Run
    from rota.sdk.workflow.workflow import Workflow, WorkflowOptions

F = TypeVar("F", bound="Callable[..., Any] | Call[Any]")
H = TypeVar("H", bound=ClassifyHook)
P = ParamSpec("P")
R = TypeVar("R")
AsyncFunction = Callable[P, Coroutine[Any, Any, R]]
DEFAULT_SHOW: Final = "default"
ASYNC_CORES: Final = 0.1
SYNC_CORES: Final = 1
_TASK_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}", re.ASCII)


class TaskDecorator(Protocol):
    """Returned by `app.task(...)`: makes a task of a function."""

    @overload
    def __call__(self, function: AsyncFunction[P, R], /) -> CoroutineTask[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Callable[P, R], /) -> FunctionTask[P, R]: ...


class WorkflowDecorator(Protocol):
    """Returned by `app.workflow(...)`: makes a workflow of a function."""

    def __call__(self, body: Callable[Concatenate[Steps, P], R], /) -> Workflow[P, R]: ...


class Rota(AdminClient[AsyncMode]):
    """The tasks of one application and the API they are submitted to.

    `url` and `key` are those of the API. Without them they are discovered as by the `rota` command: from the settings
    (`ROTA_API_URL`, `ROTA_API_KEY`), or from the `rota up` of this directory. `show` is the default show of its jobs.

    A task that names no cores asks for `async_cores` if it is a coroutine function, which mostly waits, and for
    `sync_cores` if it is a plain function, which computes in a process of its own.
    """

    def __init__(
        self,
        url: str = "",
        *,
        key: str = "",
        show: str = DEFAULT_SHOW,
        actor: str = "",
        async_cores: float | str = ASYNC_CORES,
        sync_cores: float | str = SYNC_CORES,
    ) -> None:
        self.tasks: dict[str, Task[..., Any]] = {}
        self.recurring: dict[str, AgentDefinition] = {}
        """Agents declared by this app; `agents` are those of the whole installation."""
        self.flows: dict[str, Workflow[..., Any]] = {}
        """Workflows declared by this app; `workflows` are those of the whole installation."""
        self.failure_hook: ClassifyHook | None = None
        self.show = show
        self._async_cores = parse_cores(async_cores)
        self._sync_cores = parse_cores(sync_cores)
        super().__init__(AsyncMode)
        self.actor = actor
        """The submitter, as recorded in jobs and the audit log."""
        self._transports = TransportPool(self.tasks, lambda: make_transport(url, key))

    @overload
    def task(self, function: AsyncFunction[P, R], /) -> CoroutineTask[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def task(self, function: Callable[P, R], /) -> FunctionTask[P, R]: ...

    @overload
    def task(
        self,
        /,
        *,
        name: str = "",
        topic: str = "",
        cores: float | str | None = None,
        gpus: int = 0,
        memory: str | int = 0,
        retries: int | Retries = 0,
        timeout: float | str = 0,
        kill_after: float | str = 5,
    ) -> TaskDecorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Declares a task. `name` defaults to the function's name, `topic` to the task's name.

        `cores` are those of one frame, such as 4 or 0.5, and decide how many frames run at once on a worker. By default
        a coroutine function asks for a tenth of a core, because it mostly waits, and a plain function for one core;
        `Rota(async_cores=..., sync_cores=...)` changes both.
        `memory` is text such as "4GiB", or mebibytes; `timeout` and `kill_after` are seconds, or text such as "10min".
        """

        def declare(declared: Callable[..., Any]) -> Task[..., Any]:
            return self._add_task(declared, **options)

        return declare if function is None else declare(function)

    def agent(self, **options: Unpack[AgentOptions]) -> Callable[[F], F]:
        """Declares an agent: `@app.agent(every="30s")` above a function or task, or `app.agent(...)(task.call(1))`.

        It recurs on any `rota worker` that acquires it and never overlaps itself. On a task it submits a job.
        """

        def declare(target: F) -> F:
            agent = define_agent(target, **options)
            if agent.spec.name in self.recurring:
                raise InvalidInput(f"Agent {agent.spec.name!r} is declared twice: give one another name=.")
            self.recurring[agent.spec.name] = agent
            return target

        return declare

    @overload
    def workflow(self, body: Callable[Concatenate[Steps, P], R], /) -> Workflow[P, R]: ...

    @overload
    def workflow(self, /, **options: Unpack[WorkflowOptions]) -> WorkflowDecorator: ...

    def workflow(self, body: Callable[..., Any] | None = None, /, **options: Unpack[WorkflowOptions]) -> Any:
        """Declares a workflow: a function that takes `Steps` and the inputs of a run, and declares the steps.

        The function is called once, by this decorator; `docs/howto/workflows.md` lists the kinds of steps.
        """

        def declare(body: Callable[..., Any]) -> Workflow[..., Any]:
            from rota.sdk.workflow.workflow import Workflow

            workflow: Workflow[..., Any] = Workflow(self, body, options)
            if workflow.name in self.flows:
                raise InvalidInput(f"Workflow {workflow.name!r} is declared twice: give one another name=.")
            self.flows[workflow.name] = workflow
            return workflow

        return declare if body is None else declare(body)

    def classify_failure(self, hook: H) -> H:
        """Declares a hook that classifies exceptions of agents before Rota's own rules.

        It takes the exception and returns "THROTTLED", "TRANSIENT" or another `FailureClass`; None: use Rota's rules.
        """
        if self.failure_hook is not None:
            raise InvalidInput("This app already has a failure hook: use one function for all failures.")
        self.failure_hook = hook
        return hook

    def job(self, job: UUID | str) -> Job[Any]:
        """A handle of any job; its result is one value, or a list if it has several frames."""
        return Job(self, parse_id(JobId, str(job)), read_untyped_result)

    def run(self, run: UUID | str) -> Run[Any]:
        """A handle of any workflow run."""
        from rota.sdk.workflow.run import RunHandle

        return RunHandle(self, AsyncMode, parse_id(RunId, str(run)), msgspec.msgpack.decode)

    async def submit(self, submission: Submission) -> Job[Any]:
        """Submits any job: commands, several layers, tasks declared elsewhere."""
        [submitted] = await self.transport.submit([submission])
        return Job(self, submitted.job, read_untyped_result, already=submitted.already)

    async def events(
        self,
        *,
        show: str = "",
        job: UUID | None = None,
        run: UUID | None = None,
        kinds: Sequence[str] = (),
        after: str = "",
    ) -> AsyncIterator[Event]:
        """Events from now on, or after the event id `after`, filtered by show, job, run and kinds such as "job.failed"
        or "worker". Without filters: all events the key may see. An event of kind `reset` means that some were lost:
        read the current state again."""
        from rota.client.events import follow_events
        from rota.model.events import Event

        query = {"show": show or None, "job": job, "run": run, "kind": ",".join(kinds) or None}
        async for message in follow_events(http_client_of(self), "/events", query, after=after):
            yield msgspec.json.decode(message.data, type=Event)

    @property
    def sync(self) -> SyncRota:
        """The blocking facade, for code without an event loop."""
        from rota.sdk.sync import SyncRota

        return SyncRota(self)

    @property
    def transport(self) -> Transport:
        """The transport of the running event loop."""
        return self._transports.current()

    async def close(self) -> None:
        """Closes the connections of the running loop and of `sync`; the next call opens new ones."""
        await self._transports.close()
        await run_in_background(self._transports.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connection_owner(self) -> Rota:
        return self

    def _add_task(
        self, function: Callable[..., Any], *, name: str = "", topic: str = "", **options: Any
    ) -> Task[..., Any]:
        name = name or getattr(function, "__name__", "")
        if not _TASK_NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} is not a valid task name: use letters, digits, dots and hyphens.")
        if name in self.tasks:
            raise InvalidInput(f"Task {name!r} is declared twice: give one another name, as in task(name=...).")
        is_async = iscoroutinefunction(function)
        work = _work(name, self._async_cores if is_async else self._sync_cores, **options)
        kind = CoroutineTask if is_async else FunctionTask
        self.tasks[name] = kind(self, function, work, topic or name)
        return self.tasks[name]


def _work(
    name: str,
    default_cores: Centicores,
    *,
    cores: float | str | None = None,
    gpus: int = 0,
    memory: str | int = 0,
    retries: int | Retries = 0,
    timeout: float | str = 0,
    kill_after: float | str = 5,
) -> Work:
    if gpus < 0:
        raise InvalidInput(f"Task {name!r} requests {gpus} GPUs: use a number from 0.")
    return Work(
        task=name,
        cores=default_cores if cores is None else parse_cores(cores),
        gpus=gpus,
        memory_mb=parse_memory(memory) if isinstance(memory, str) else memory,
        retries=Retries(most=retries) if isinstance(retries, int) else retries,
        timeout_s=_seconds(timeout),
        kill_after_s=_seconds(kill_after),
    )


def _seconds(time: float | str) -> float:
    seconds = parse_duration(time) if isinstance(time, str) else float(time)
    if not 0 <= seconds < float("inf"):
        raise InvalidInput(f"{time!r} is not a valid duration: use seconds from 0, or text such as 10min.")
    return seconds
