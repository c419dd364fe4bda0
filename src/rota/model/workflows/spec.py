"""What a workflow is: steps, what each depends on, and what undoes it. No I/O.

    WorkflowSpec(name="book", show="travel", steps=(
        StepSpec(id="flight", task="book_flight", input={"to": "${input.city}"}),
        StepSpec(id="hotel", task="book_hotel", depends_on=("flight",)),
    ))

The same structs are what Python declares, YAML says and the API takes; `rota.model.workflows.compiler.compile_workflow` refuses
what could never run. A step that a `switch` chooses, that belongs to a `parallel` or that handles an error begins when
that one says so, besides what it depends on.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Literal

import msgspec

from rota.model.jobs.submission import Compensation, RetrySpec
from rota.model.workflows.approval_steps import ApprovalSpec

StepType = Literal["job", "delay", "condition", "switch", "parallel", "workflow", "notify", "approval"]
Trigger = Literal["failed", "fatal", "timeout", "cancelled", "denied", "quarantined"]
"""How a step may end that makes a run undo what it has done."""
LOOP_ROUNDS_DEFAULT: Final = 100


class LoopSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"while_": "while"}):
    """The step again and again: `while` is asked before each time, `until` after it. Neither: `most` times."""

    while_: str = ""
    until: str = ""
    most: int = LOOP_ROUNDS_DEFAULT


class SwitchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps by the value of an expression; the others are passed over, with what follows from them alone."""

    on: str
    cases: dict[str, tuple[str, ...]]
    default: tuple[str, ...] | None = None
    """None: a value that no case has fails the step."""


class ParallelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps that begin together. With `need` of them succeeded the others are cancelled."""

    steps: tuple[str, ...]
    need: Literal["all", "any"] | int = "all"


class StepSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step; which fields mean something is up to its type."""

    id: str
    type: StepType = "job"
    depends_on: tuple[str, ...] = ()
    when: str = ""
    """An expression. False: the step is skipped, and what depends on it goes on."""
    on_error: str = ""
    """The step that runs when this one fails; if it succeeds, what depends on this one goes on."""

    task: str = ""
    argv: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    input: dict[str, Any] = {}
    """Of a task: its keyword arguments. Of a command: what it reads. Of a workflow: its input.
    Of an approval: what people are shown besides its text."""
    topic: str = ""
    """The name of the task when left out."""
    priority: int | str = 0
    """0: that of the workflow."""
    cores: int | float | str = 1
    gpus: int = 0
    memory: str = ""
    requires: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    env: dict[str, str] = {}
    retry: int | RetrySpec = 0
    timeout_s: float = 0.0
    """Of one attempt."""
    kill_after_s: float = 5.0
    """How long an attempt that was told to stop may take for it."""
    deadline_s: float = 0.0
    """Of the step as a whole, waiting included."""
    compensate: Compensation | None = None
    for_each: str | list[Any] | None = None
    """Items, or an expression for them: one frame for each, called with `item` in its input."""
    max_parallel: int = 0
    """Items that run at a time; 0: as many as there is room for."""
    loop: LoopSpec | None = None

    delay_sec: float | str = 0
    delay_until: str = ""
    """A moment in ISO 8601 with its offset, or an expression for one."""
    condition: str = ""
    switch: SwitchSpec | None = None
    parallel: ParallelSpec | None = None
    workflow: str = ""
    notify: str = ""
    """A text with expressions; told as an event, and as a message on the bus."""
    approval: ApprovalSpec | None = None


class WorkflowSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    steps: tuple[StepSpec, ...]
    show: str = "default"
    folder: str = "default"
    dept: str = "default"
    priority: int | str = 5
    description: str = ""
    inputs: dict[str, Any] = {}
    """Names that a run may be given, with their defaults; one whose default is `{required: true}` must be given."""
    output: dict[str, Any] | list[Any] | str = {}
    """What a run returns, with expressions."""
    timeout_s: float = 0.0
    """Of a run as a whole; 0: none."""
    rollback_on: frozenset[Trigger] = frozenset({"fatal"})

    def rolls_back_on(self, trigger: Trigger | None) -> bool:
        """Whether a run that ends by this undoes what it did; what is fatal has failed, too."""
        return trigger in self.rollback_on or (trigger == "fatal" and "failed" in self.rollback_on)


REQUIRED_INPUT: Final = {"required": True}

_JSON = msgspec.json.Decoder(WorkflowSpec)
_ENCODER = msgspec.json.Encoder(order="deterministic")


def encode_workflow(spec: WorkflowSpec) -> bytes:
    """The same bytes for the same definition, whether or not it says what goes without saying."""
    return _ENCODER.encode(_without_defaults(spec))


def _without_defaults(value: Any) -> Any:
    """Without what is given and equals its default: msgspec leaves out the very default alone."""
    if isinstance(value, tuple):
        return tuple(map(_without_defaults, value))
    if not isinstance(value, msgspec.Struct):
        return value
    fields = struct_fields(type(value))
    given = {field.name: getattr(value, field.name) for field in fields}
    needed = {field.name: given[field.name] for field in fields if field.required}
    usual = type(value)(**needed)
    told = {name: each for name, each in given.items() if name in needed or each != getattr(usual, name)}
    return type(value)(**{name: _without_defaults(each) for name, each in told.items()})


@cache
def struct_fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Looked up once: it takes milliseconds, and a definition has many steps."""
    return msgspec.structs.fields(kind)


def decode_workflow(data: bytes) -> WorkflowSpec:
    return _JSON.decode(data)
