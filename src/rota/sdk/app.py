"""An app is a set of tasks, by name, and the way to the Rota that runs them.

The same module is imported by whoever submits and by `rota worker`, so declaring a task starts and contacts nothing:
connections are opened by the first call that needs one.
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
from rota.model.units import parse_cores, parse_duration, parse_memory
from rota.sdk.agent import AgentDefinition, AgentOptions, define_agent
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
_TASK_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}", re.ASCII)


class TaskDecorator(Protocol):
    """What `app.task(...)` returns: it makes a task of the function it is given."""

    @overload
    def __call__(self, function: AsyncFunction[P, R], /) -> CoroutineTask[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Callable[P, R], /) -> FunctionTask[P, R]: ...


class WorkflowDecorator(Protocol):
    """What `app.workflow(...)` returns: it makes a workflow of the function it is given."""

    def __call__(self, body: Callable[Concatenate[Steps, P], R], /) -> Workflow[P, R]: ...


class Rota(AdminClient[AsyncMode]):
    """The tasks of one application, and where they are submitted to.

    `url` is that of the API and `key` one of its keys; without them they are found as the `rota` command finds them: in
    the settings (`ROTA_API_URL`, `ROTA_API_KEY`), or by the `rota up` of this directory. `show` is whose quota jobs use
    that do not name another.
    """

    def __init__(self, url: str = "", *, key: str = "", show: str = DEFAULT_SHOW, actor: str = "") -> None:
        self.tasks: dict[str, Task[..., Any]] = {}
        self.recurring: dict[str, AgentDefinition] = {}
        """Agents that are declared here; `agents` are those of the whole installation."""
        self.flows: dict[str, Workflow[..., Any]] = {}
        """Workflows that are declared here; `workflows` are those of the whole installation."""
        self.failure_hook: ClassifyHook | None = None
        self.show = show
        super().__init__(AsyncMode)
        self.actor = actor
        """Who submits, as jobs and the audit trail say it."""
        self._clients = TransportPool(self.tasks, lambda: make_transport(url, key))

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
        cores: float | str = 1,
        gpus: int = 0,
        memory: str | int = 0,
        retries: int | Retries = 0,
        timeout: float | str = 0,
        kill_after: float | str = 5,
    ) -> TaskDecorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, **wanted: Any) -> Any:
        """Declare a task. It is called by `name` (the function's own), on `topic` (its name).

        `memory` is text such as "4GiB", or mebibytes; `timeout` and `kill_after` are seconds, or text such as "10min".
        """

        def declare(declared: Callable[..., Any]) -> Task[..., Any]:
            return self._add_task(declared, **wanted)

        return declare if function is None else declare(function)

    def agent(self, **wanted: Unpack[AgentOptions]) -> Callable[[F], F]:
        """Declare an agent: `@app.agent(every="30s")` above a function, a task, or `app.agent(...)(task.call(1))`.

        It runs again and again on whichever `rota worker` takes it, never beside itself. On a task it submits a job.
        """

        def declare(target: F) -> F:
            agent = define_agent(target, **wanted)
            if agent.spec.name in self.recurring:
                raise InvalidInput(f"There are two agents {agent.spec.name!r}: give one of them another name=.")
            self.recurring[agent.spec.name] = agent
            return target

        return declare

    @overload
    def workflow(self, body: Callable[Concatenate[Steps, P], R], /) -> Workflow[P, R]: ...

    @overload
    def workflow(self, /, **wanted: Unpack[WorkflowOptions]) -> WorkflowDecorator: ...

    def workflow(self, body: Callable[..., Any] | None = None, /, **wanted: Unpack[WorkflowOptions]) -> Any:
        """Declare a workflow: a function that is given `Steps` and the inputs of a run, and writes the steps down.

        It is called once, here; `docs/howto/workflows.md` tells what steps there are.
        """

        def declare(body: Callable[..., Any]) -> Workflow[..., Any]:
            from rota.sdk.workflow.workflow import Workflow

            made: Workflow[..., Any] = Workflow(self, body, wanted)
            if made.name in self.flows:
                raise InvalidInput(f"There are two workflows {made.name!r}: give one of them another name=.")
            self.flows[made.name] = made
            return made

        return declare if body is None else declare(body)

    def classify_failure(self, hook: H) -> H:
        """Declare what kind of failure an exception of an agent is, before Rota judges by itself.

        It gets the exception and answers "THROTTLED", "TRANSIENT" or another `FailureClass`; None leaves it to Rota.
        """
        if self.failure_hook is not None:
            raise InvalidInput("This app has a hook for failures: let one function answer for all of them.")
        self.failure_hook = hook
        return hook

    def job(self, job: UUID | str) -> Job[Any]:
        """Any job by its id; its result is one value, or a list when it has several frames."""
        return Job(self, parse_id(JobId, str(job)), read_untyped_result)

    def run(self, run: UUID | str) -> Run[Any]:
        """Any run of a workflow by its id."""
        from rota.sdk.workflow.run import RunHandle

        return RunHandle(self, AsyncMode, parse_id(RunId, str(run)), msgspec.msgpack.decode)

    async def submit(self, submission: Submission) -> Job[Any]:
        """Anything that can be submitted: commands, several layers, tasks that are declared elsewhere."""
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
        """What happens from here on, or behind the event `after`: of a show, a job or a run, of kinds such as
        "job.failed" or "worker", or all that the key may see. One of the kind `reset` says that some are missing: look
        anew."""
        from rota.client.events import follow_events
        from rota.model.events import Event

        query = {"show": show or None, "job": job, "run": run, "kind": ",".join(kinds) or None}
        async for told in follow_events(http_client_of(self), "/events", query, after=after):
            yield msgspec.json.decode(told.data, type=Event)

    @property
    def sync(self) -> SyncRota:
        """The same, for code without an event loop."""
        from rota.sdk.sync import SyncRota

        return SyncRota(self)

    @property
    def transport(self) -> Transport:
        """Of the running loop."""
        return self._clients.current()

    async def close(self) -> None:
        """Close the connections that this loop has opened; the next call opens others."""
        await self._clients.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connection_owner(self) -> Rota:
        return self

    def _add_task(
        self, function: Callable[..., Any], *, name: str = "", topic: str = "", **wanted: Any
    ) -> Task[..., Any]:
        name = name or getattr(function, "__name__", "")
        if not _TASK_NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} cannot name a task: give it a name of letters, digits, dots and hyphens.")
        if name in self.tasks:
            raise InvalidInput(f"There are two tasks {name!r}: give one of them another name, as in task(name=...).")
        kind = CoroutineTask if iscoroutinefunction(function) else FunctionTask
        self.tasks[name] = kind(self, function, _work(name, **wanted), topic or name)
        return self.tasks[name]


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
