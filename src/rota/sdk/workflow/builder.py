"""Declares the steps of a workflow, in the function decorated with `@app.workflow`.

    flight = steps.job("flight", book_flight.call(city), compensate=cancel_flight.call)
    with steps.parallel("both"):
        steps.job("hotel", book_hotel.call(city, nights))
        steps.job("car", book_car.call(flight.output.lands_at))

A step depends on the steps whose values it uses and on those in `after`; all others may run concurrently. Steps inside
`with` start when their owner decides. The result is the same `StepSpec` as from YAML, validated by the same compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TypedDict, TypeVar, Unpack, cast

from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Budget, Compensation, RetrySpec
from rota.model.jobs.work import Work
from rota.model.workflows.approval_steps import ApprovalOutput, ApprovalSpec
from rota.model.workflows.expressions import expressions_in, steps_mentioned
from rota.model.workflows.spec import LOOP_ROUNDS_DEFAULT, LoopSpec, ParallelSpec, StepSpec, StepType, SwitchSpec
from rota.sdk.task import Call, Task
from rota.sdk.task_options import DurationLike, TaskOptions, frame_options, to_seconds, validate_options
from rota.sdk.workflow.deferred_values import (
    DeferredValue,
    checked_expression,
    is_deferred,
    reference_to,
    to_json_value,
)

if TYPE_CHECKING:
    from types import TracebackType

    from rota.sdk.workflow.workflow import WorkflowCall

R = TypeVar("R")
A = TypeVar("A")
CompensationCall = Call[Any] | Callable[[R], Call[Any]]
"""A call that undoes a step, or a function from the step's output to one, such as `cancel.call`."""
_JOB_OPTIONS: Final = frozenset(
    {"topic", "priority", "labels", "requires", "env", "deadline", "cores", "gpus", "memory", "retries", "timeout"}
)
_COMPENSATION_OPTIONS: Final = frozenset({"topic", "labels", "requires", "env", "deadline"})


class StepStartOptions(TypedDict, total=False):
    """Explicit start conditions of a step."""

    after: Step[Any] | Sequence[Step[Any]]
    when: bool | str
    """If false, the step is skipped and its dependents continue."""


class Step(Generic[R]):
    """A declared step; later steps may use its `output`, `state` and `error`."""

    def __init__(self, steps: Steps, name: str) -> None:
        self._steps = steps
        self.id = name

    def __repr__(self) -> str:
        return f"<step {self.id}>"

    @property
    def output(self) -> R:
        return cast("R", reference_to("steps", self.id, "output"))

    @property
    def state(self) -> str:
        return cast("str", reference_to("steps", self.id, "state"))

    @property
    def error(self) -> str:
        return cast("str", reference_to("steps", self.id, "error"))

    @contextmanager
    def on_error(self) -> Iterator[None]:
        """The single step inside runs if this one fails; if it succeeds, the run continues."""
        with self._steps.owned(self.id) as handlers:
            yield
        if len(handlers) != 1:
            raise InvalidInput(
                f"Step {self.id} has {len(handlers)} steps in on_error(): use one, such as a workflow step."
            )
        self._steps.change(self.id, on_error=handlers[0])


class Switch(Step[Any]):
    """Branches on a value: `with switch.case("train"):`, `with switch.default():`."""

    def __init__(self, steps: Steps, name: str, on: str) -> None:
        super().__init__(steps, name)
        self._on = on
        self._cases: dict[str, tuple[str, ...]] = {}
        self._default: tuple[str, ...] | None = None
        self._update_spec()

    @contextmanager
    def case(self, *values: str | int | bool) -> Iterator[None]:
        """Steps inside run if the value is one of `values`."""
        with self._steps.owned(self.id) as chosen:
            yield
        for value in values:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if text in self._cases:
                raise InvalidInput(f"Step {self.id} has two cases {text!r}: put its steps into one of them.")
            self._cases[text] = tuple(chosen)
        self._update_spec()

    @contextmanager
    def default(self) -> Iterator[None]:
        """Steps inside run if no case matches; without a default the step fails."""
        with self._steps.owned(self.id) as chosen:
            yield
        self._default = tuple(chosen)
        self._update_spec()

    def _update_spec(self) -> None:
        self._steps.change(self.id, switch=SwitchSpec(on=self._on, cases=self._cases, default=self._default))


class Parallel(Step[None]):
    """Starts the steps inside `with` together."""

    def __init__(self, steps: Steps, name: str, need: Literal["all", "any"] | int) -> None:
        super().__init__(steps, name)
        self._need = need
        self._block = steps.owned(name)

    def __enter__(self) -> Self:
        self._members = self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)
        self._steps.change(self.id, parallel=ParallelSpec(steps=tuple(self._members), need=self._need))


class LoopRound:
    """Of a `loop`: the number of completed rounds, and the result of the last."""

    @property
    def index(self) -> int:
        return cast("int", reference_to("round", "index"))

    @property
    def output(self) -> Any:
        return reference_to("round", "output")


class Steps:
    """First argument of a workflow function. Each step needs a unique name, which appears in the run's history."""

    round: Final = LoopRound()

    def __init__(self) -> None:
        self._fields: dict[str, dict[str, Any]] = {}
        self._after: dict[str, list[str]] = {}
        self._read: dict[str, set[str]] = {}
        self._owner: dict[str, str] = {}
        self._blocks: list[tuple[str, list[str]]] = []
        self.runs: dict[str, WorkflowCall[Any]] = {}
        """Calls of other workflows, by step name."""
        self.is_written = False
        """Whether the definition is complete: no step may be added."""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return cast("str", reference_to("run", "id"))

    def job(
        self,
        name: str,
        call: Call[R],
        /,
        *,
        compensate: CompensationCall[R] | None = None,
        **start: Unpack[StepStartOptions],
    ) -> Step[R]:
        """Runs a task once, with the retries, timeout and other `options` of the task."""
        fields = _task_fields(name, call)
        return self._add_with_compensation(name, fields, compensate, start)

    def command(
        self,
        name: str,
        argv: Sequence[str],
        /,
        *,
        reads: Mapping[str, object] | None = None,
        options: TaskOptions | None = None,
        **start: Unpack[StepStartOptions],
    ) -> Step[Any]:
        """Runs a command with `reads` as its input."""
        topic = (options or {}).get("topic", "")
        fields = _option_fields(name, Work(argv=tuple(argv)), topic, options or {})
        return self._add_step(
            name, "job", {**fields, "argv": tuple(argv), "input": _step_value(name, dict(reads or {}))}, start
        )

    def each(
        self,
        name: str,
        call: Callable[[A], Call[R]],
        items: Iterable[A] | str,
        /,
        *,
        max_parallel: int = 0,
        compensate: CompensationCall[list[R]] | None = None,
        **start: Unpack[StepStartOptions],
    ) -> Step[list[R]]:
        """Runs a task per item, at most `max_parallel` at a time: `each("shrink", shrink.call, pictures)`.

        `items` are literal values, a value of the run, or the text of an expression.
        """
        fields = _task_fields(name, call(cast("A", DeferredValue("item"))))
        item_list = items if isinstance(items, str) or is_deferred(items) else list(items)
        fields |= {"for_each": _step_value(name, item_list), "max_parallel": max_parallel}
        return self._add_with_compensation(name, fields, compensate, start)

    def loop(
        self,
        name: str,
        call: Call[R],
        /,
        *,
        until: Callable[[R], bool] | str = "",
        while_: bool | str = "",
        most: int = LOOP_ROUNDS_DEFAULT,
        compensate: CompensationCall[R] | None = None,
        **start: Unpack[StepStartOptions],
    ) -> Step[R]:
        """Repeats a task until a condition on its result holds: `until=lambda output: output.done`.

        `while_` is evaluated before each round and may use `steps.round`. With neither, the task runs `most` times.
        """
        condition = until(cast("R", reference_to("round", "output"))) if callable(until) else until
        spec = LoopSpec(
            while_=_step_expression(while_, name, "while_"), until=_step_expression(condition, name, "until"), most=most
        )
        return self._add_with_compensation(name, {**_task_fields(name, call), "loop": spec}, compensate, start)

    def workflow(
        self, name: str, call: WorkflowCall[R], /, *, deadline: DurationLike = 0, **start: Unpack[StepStartOptions]
    ) -> Step[R]:
        """Runs another workflow: `steps.workflow("trip", trip.call("Oslo"))`."""
        self.runs[name] = call
        fields = {"workflow": call.workflow.name, "input": _step_value(name, call.input)}
        return self._add_step(name, "workflow", {**fields, "deadline_s": _seconds(deadline, name, "deadline")}, start)

    def delay(
        self, name: str, span: DurationLike = 0, /, *, until: datetime | str = "", **start: Unpack[StepStartOptions]
    ) -> Step[None]:
        """Waits for a duration, or until a time."""
        if isinstance(until, datetime) and until.tzinfo is None:
            raise InvalidInput(
                f"Step {name} waits until {until}, which has no time zone: use datetime(..., tzinfo=UTC)."
            )
        delay = span if is_deferred(span) else _seconds(span, name, "delay")
        return self._add_step(
            name, "delay", {"delay_sec": _step_value(name, delay), "delay_until": _step_value(name, until)}, start
        )

    def condition(self, name: str, condition: bool | str, /, **start: Unpack[StepStartOptions]) -> Step[bool]:
        """Evaluates a condition; its output is true or false."""
        return self._add_step(name, "condition", {"condition": _step_expression(condition, name, "condition")}, start)

    def switch(self, name: str, on: object, /, **start: Unpack[StepStartOptions]) -> Switch:
        """Branches on a value of the run or an expression."""
        text = checked_expression(on, f"The value step {name} branches on")
        self._add_step(name, "switch", {"switch": SwitchSpec(on=text, cases={})}, start)
        return Switch(self, name, text)

    def parallel(
        self,
        name: str,
        /,
        *,
        need: Literal["all", "any"] | int = "all",
        deadline: DurationLike = 0,
        **start: Unpack[StepStartOptions],
    ) -> Parallel:
        """Starts steps together and ends when `need` of them have succeeded; the others are stopped."""
        self._add_step(name, "parallel", {"deadline_s": _seconds(deadline, name, "deadline")}, start)
        return Parallel(self, name, need)

    def approval(
        self,
        name: str,
        text: str,
        /,
        *,
        shows: Mapping[str, object] | None = None,
        quorum: int = 1,
        approvers: Sequence[str] = (),
        expires: DurationLike = 0,
        deadline: DurationLike = 0,
        **start: Unpack[StepStartOptions],
    ) -> Step[ApprovalOutput]:
        """Waits for approval of a text and the values in `shows`; its output lists the approvers."""
        expires_s = _seconds(expires, name, "expiry")
        terms = ApprovalSpec(
            text=_step_value(name, text), quorum=quorum, approvers=tuple(approvers), expires_s=expires_s
        )
        fields = {"approval": terms, "input": _step_value(name, dict(shows or {}))}
        return self._add_step(name, "approval", {**fields, "deadline_s": _seconds(deadline, name, "deadline")}, start)

    def notify(self, name: str, text: str, /, **start: Unpack[StepStartOptions]) -> Step[None]:
        """Publishes a text, such as f"Booked {flight.output}", as an event and a bus message."""
        return self._add_step(name, "notify", {"notify": _step_value(name, text)}, start)

    @contextmanager
    def owned(self, owner: str) -> Iterator[list[str]]:
        """Steps declared in this block belong to `owner`."""
        block: list[str] = []
        self._blocks.append((owner, block))
        try:
            yield block
        finally:
            self._blocks.pop()

    def change(self, name: str, **fields: Any) -> None:
        self._fields[name].update(fields)

    def specs(self) -> tuple[StepSpec, ...]:
        """In declaration order."""
        return tuple(
            StepSpec(id=name, depends_on=self._depends_on(name), **fields) for name, fields in self._fields.items()
        )

    def _depends_on(self, name: str) -> tuple[str, ...]:
        owners = {name}
        owner = name
        while owner in self._owner:
            owner = self._owner[owner]
            owners.add(owner)
        read = [each for each in self._fields if each in self._read[name] and each not in owners]
        return tuple(dict.fromkeys([*self._after[name], *read]))

    def _add_with_compensation(
        self, name: str, fields: dict[str, Any], compensate: CompensationCall[Any] | None, start: StepStartOptions
    ) -> Step[Any]:
        if isinstance(compensate, Task):
            raise InvalidInput(f"Step {name}: pass the compensation as a call, {compensate.name}.call.")
        if compensate is not None:
            output = reference_to("steps", name, "output")
            call = compensate if isinstance(compensate, Call) or not callable(compensate) else compensate(output)
            fields["compensate"] = _compensation(name, call)
        return self._add_step(name, "job", fields, start)

    def _add_step(self, name: str, kind: StepType, fields: dict[str, Any], start: StepStartOptions) -> Step[Any]:
        if self.is_written:
            raise InvalidInput(f"Step {name} is too late: its workflow is already declared.")
        if name in self._fields:
            raise InvalidInput(f"Step {name} is declared twice: give each step a unique name.")
        after = start.get("after", ())
        dependencies = [after] if isinstance(after, Step) else list(after)
        if any(not isinstance(each, Step) for each in dependencies):
            raise InvalidInput(
                f"Step {name} has an `after` that is not a step: pass what steps.job() and the like return."
            )
        if "when" in start:
            fields = {"when": _step_expression(start["when"], name, "when"), **fields}
        self._fields[name] = {"type": kind, **fields}
        self._after[name] = [step.id for step in dependencies]
        self._read[name] = {each for text in _expressions(fields) for each in steps_mentioned(text)}
        if self._blocks:
            owner, block = self._blocks[-1]
            self._owner[name] = owner
            block.append(name)
        return Step(self, name)


def _step_expression(condition: object, name: str, what: str) -> str:
    return checked_expression(condition, f"The {what.rstrip('_')} of step {name}")


def _step_value(name: str, value: object) -> Any:
    return to_json_value(value, f"The input of step {name}")


def _check_call(name: str, call: object) -> None:
    if not isinstance(call, Call):
        raise InvalidInput(f"Step {name} got a {type(call).__name__}: pass a call of a task, as in task.call(1).")


def _seconds(span: DurationLike, name: str, what: str) -> float:
    try:
        return to_seconds(span, what)
    except InvalidInput as error:
        raise InvalidInput(f"Step {name}: {error.sentence}") from error


def _expressions(fields: Mapping[str, Any]) -> Iterator[str]:
    """All expressions evaluated for a step."""
    loop, compensation, items = fields.get("loop"), fields.get("compensate"), fields.get("for_each")
    yield from (str(fields[name]) for name in ("when", "condition") if name in fields)
    if "switch" in fields:
        yield fields["switch"].on
    if loop is not None:
        yield from (loop.while_, loop.until)
    if isinstance(items, str) and "${" not in items:
        yield items
    yield from expressions_in(items)
    yield from expressions_in(compensation.context if compensation is not None else None)
    yield from expressions_in(fields["approval"].text if "approval" in fields else None)
    for name in ("args", "input", "delay_sec", "delay_until", "notify"):
        yield from expressions_in(fields.get(name))


def _task_fields(name: str, call: Call[Any]) -> dict[str, Any]:
    _check_call(name, call)
    task = call.task
    arguments = _step_value(name, call.input)
    fields = _option_fields(name, task.work, task.topic if task.topic != task.name else "", task.overrides)
    return {"task": task.name, "args": tuple(arguments["args"]), "input": arguments["kwargs"], **fields}


def _option_fields(name: str, work: Work, topic: str, options: TaskOptions) -> dict[str, Any]:
    """Declaration and options of a task as fields of a step."""
    _check_options(name, options, _JOB_OPTIONS, "A step")
    frame = frame_options(work, options)
    fields: dict[str, Any] = {
        "topic": options.get("topic", topic),
        "cores": _integral_cores(frame["cores"]),
        "gpus": frame["gpus"],
        "memory": frame["memory"],
        "timeout_s": frame["timeout_s"],
        "kill_after_s": frame["kill_after_s"],
        "retry": _simplified_retry(frame["retries"]),
        "priority": options.get("priority", 0),
        "requires": tuple(options.get("requires", ())),
        "labels": dict(options.get("labels", {})),
        "env": dict(options.get("env", {})),
    }
    if "deadline" in options:
        fields["deadline_s"] = _deadline_s(name, options)
    return fields


def _compensation(name: str, call: Call[Any]) -> Compensation:
    _check_call(name, call)
    task, options = call.task, call.task.overrides
    _check_options(name, options, _COMPENSATION_OPTIONS, "A compensation")
    arguments = _step_value(name, call.input)
    context = _arguments_by_name(name, task, arguments["args"], arguments["kwargs"])
    budget = Budget(deadline_ms=round(_deadline_s(name, options) * 1000)) if "deadline" in options else None
    return Compensation(
        topic=options.get("topic", task.topic),
        task=task.name,
        context=context,
        labels=dict(options.get("labels", {})),
        env=dict(options.get("env", {})),
        requires=tuple(options.get("requires", ())),
        budget=budget,
    )


def _arguments_by_name(
    step: str, task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = task.signature.parameter_names(len(args))
    if names is None:
        raise InvalidInput(f"Step {step}: the compensation {task.name} must accept its arguments by name.")
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _check_options(name: str, options: TaskOptions, allowed: frozenset[str], what: str) -> None:
    for option in validate_options(options):
        if option not in allowed:
            raise InvalidInput(
                f"Step {name}: {what} has no option {option!r}: use one of {', '.join(sorted(allowed))}."
            )


def _deadline_s(name: str, options: TaskOptions) -> float:
    deadline = options["deadline"]
    if isinstance(deadline, datetime):
        raise InvalidInput(f"Step {name}: the deadline of a step must be a duration after its start, not a datetime.")
    return _seconds(deadline, name, "deadline")


def _integral_cores(cores: float | str) -> float | str:
    return int(cores) if isinstance(cores, float) and cores.is_integer() else cores


def _simplified_retry(retry: int | RetrySpec) -> int | RetrySpec:
    return retry.most if isinstance(retry, RetrySpec) and retry == RetrySpec(most=retry.most) else retry
