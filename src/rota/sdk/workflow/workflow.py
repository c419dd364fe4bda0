"""A workflow of an app: the function that declares its steps, the resulting definition, and how runs are started.

    @app.workflow(rollback_on=["failed"])
    def trip(steps: Steps, city: str, nights: int = 2) -> dict[str, str]:
        flight = steps.job("flight", book_flight.call(city), compensate=cancel_flight.call)
        room = steps.job("room", book_room.call(city, nights), after=flight)
        return {"ticket": flight.output, "room": room.output}

    run = await trip.start("Oslo", nights=3)

The function is called once, at declaration; its parameters are the inputs of a run, its return value the run's output.
A process stores the definition before it starts its first run, and its runs use that version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypedDict, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from rota.client.resource import AsyncMode
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import RunId, parse_id
from rota.model.workflows.spec import REQUIRED_INPUT, Trigger, WorkflowSpec
from rota.sdk.payload import Signature
from rota.sdk.task_options import DurationLike, to_seconds
from rota.sdk.workflow.builder import Step, Steps
from rota.sdk.workflow.deferred_values import reference_to, to_json_value
from rota.sdk.workflow.run import Run, RunHandle, start_run

if TYPE_CHECKING:
    from rota.model.workflows.dry_run import WorkflowDryRun
    from rota.sdk.app import Rota
    from rota.sdk.sync import SyncWorkflow

P = ParamSpec("P")
R = TypeVar("R")
WorkflowFunction = Callable[Concatenate[Steps, P], R]


class WorkflowOptions(TypedDict, total=False):
    name: str
    """Default: the function's name."""
    show: str
    """The show whose quota its jobs use; default: the app's."""
    folder: str
    dept: str
    priority: int | str
    description: str
    """Default: first line of the function's docstring."""
    timeout: DurationLike
    """Of a whole run."""
    rollback_on: Iterable[Trigger]
    """Ends of a step that roll the run back; default: ["fatal"]."""


class WorkflowCall(Generic[R]):
    """A workflow with its inputs, for a step of another workflow."""

    __slots__ = ("input", "workflow")

    def __init__(self, workflow: Workflow[..., R], given: dict[str, Any]) -> None:
        self.workflow = workflow
        self.input = given


class Workflow(Generic[P, R]):
    """Made by `@app.workflow`."""

    def __init__(self, app: Rota, body: WorkflowFunction[P, R], options: WorkflowOptions) -> None:
        update_wrapper(cast("Callable[..., Any]", self), body)
        self.app = app
        self.signature = Signature(body)
        self._parameters = _parameters(body)
        self._key = ""
        self._versions: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self.spec, self.uses = _build_spec(app, body, self._parameters, options)

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def sync(self) -> SyncWorkflow[P, R]:
        """The blocking facade, for code without an event loop."""
        from rota.sdk.sync import SyncWorkflow

        return SyncWorkflow(self)

    def options(self, *, key: str) -> Self:
        """A copy with an idempotency key: starts with one key are one run."""
        workflow = copy(self)
        workflow._key = key  # noqa: SLF001 - same class
        return workflow

    def call(self, *args: P.args, **kwargs: P.kwargs) -> WorkflowCall[R]:
        """A call for `steps.workflow`."""
        return WorkflowCall(self, self._input(args, kwargs))

    async def start(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Starts a run with these inputs."""
        inputs = self._input(args, kwargs)
        start = partial(start_run, self.app, self.spec.show, self.name, inputs, key=self._key)
        try:
            started = await start(version=await self.declare())
        except NotFound:  # retention removed the declared version
            self._versions.pop(self.app.transport, None)
            started = await start(version=await self.declare())
        return RunHandle(self.app, AsyncMode, started.run, self.signature.decode_result, already=started.already)

    async def declare(self) -> int:
        """Stores this workflow and those it calls, once per connection. Returns its version."""
        from rota.sdk.workflow.run import declare_workflow

        transport = self.app.transport
        if transport not in self._versions:
            for each in self.uses:
                await each.declare()
            self._versions[transport] = (await declare_workflow(self.app, self.spec)).version
        return self._versions[transport]

    def dry_run(self, *args: P.args, **kwargs: P.kwargs) -> WorkflowDryRun:
        """The inputs of a run and the possible order of its steps. Starts nothing."""
        from rota.model.workflows.compiler import compile_workflow
        from rota.model.workflows.dry_run import dry_run_workflow

        return dry_run_workflow(compile_workflow(self.spec), self._input(args, kwargs))

    def run(self, run: UUID | str) -> Run[R]:
        """A handle of a run of this workflow, by id."""
        return RunHandle(self.app, AsyncMode, parse_id(RunId, str(run)), self.signature.decode_result)

    def _input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.Signature(self._parameters)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidInput(f"Workflow {self.name} cannot be started with these inputs: {error}.") from error
        return cast("dict[str, Any]", to_json_value(bound, f"The input of workflow {self.name}"))


def _parameters(body: Callable[..., Any]) -> list[inspect.Parameter]:
    """The inputs: all parameters but the first, which takes the steps."""
    name = getattr(body, "__name__", "")
    parameters = list(inspect.signature(body).parameters.values())
    if not parameters or inspect.iscoroutinefunction(body):
        raise InvalidInput(f"Workflow {name} must be a plain function that takes its steps: def {name}(steps).")
    for each in parameters[1:]:
        if each.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise InvalidInput(f"Workflow {name} takes a variable number of {each.name}: name each input.")
    return parameters[1:]


def _default(parameter: inspect.Parameter, workflow: str) -> Any:
    if parameter.default is parameter.empty:
        return REQUIRED_INPUT
    return to_json_value(parameter.default, f"The default of {parameter.name} of workflow {workflow}")


def _build_spec(
    app: Rota, body: Callable[..., Any], parameters: list[inspect.Parameter], options: WorkflowOptions
) -> tuple[WorkflowSpec, list[Workflow[..., Any]]]:
    from rota.model.workflows.compiler import compile_workflow

    steps = Steps()
    keyword_inputs = {
        each.name: reference_to("input", each.name) for each in parameters if each.kind is each.KEYWORD_ONLY
    }
    returned = body(
        steps,
        *(reference_to("input", each.name) for each in parameters if each.name not in keyword_inputs),
        **keyword_inputs,
    )
    steps.is_written = True
    name: str = options.get("name", "") or getattr(body, "__name__", "")
    if isinstance(returned, Step):
        raise InvalidInput(f"Workflow {name} returns a step: return its output.")
    output = to_json_value(returned, f"The output of workflow {name}")
    if output is not None and not isinstance(output, (dict, list, str)):
        raise InvalidInput(f"Workflow {name} always returns {returned!r}: return outputs of steps.")
    spec = WorkflowSpec(
        name=name,
        steps=steps.specs(),
        inputs={each.name: _default(each, name) for each in parameters},
        output={} if output is None else output,
        show=options.get("show", app.show),
        folder=options.get("folder", "default"),
        dept=options.get("dept", "default"),
        priority=options.get("priority", 5),
        description=options.get("description", (inspect.getdoc(body) or "").partition("\n")[0]),
        timeout_s=to_seconds(options.get("timeout", 0), f"timeout of workflow {name}"),
        rollback_on=frozenset(options.get("rollback_on", ("fatal",))),
    )
    compile_workflow(spec)
    for step, call in steps.runs.items():
        if call.workflow.spec.show != spec.show:
            raise InvalidInput(
                f"Step {step} runs the workflow {call.workflow.name} of show {call.workflow.spec.show}: set the show"
                f" of both to {spec.show}."
            )
    return spec, [call.workflow for call in steps.runs.values()]
