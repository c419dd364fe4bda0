"""Workflow definitions: steps, their dependencies and compensations. No I/O.

    WorkflowSpec(name="book", show="travel", steps=(
        StepSpec(id="flight", task="book_flight", input={"to": "${input.city}"}),
        StepSpec(id="hotel", task="book_hotel", depends_on=("flight",)),
    ))

Python, YAML and the API use the same structs; `rota.model.workflows.compiler.compile_workflow` refuses definitions that
could never run. Besides its dependencies, a step waits for its owner: the `switch` that chooses it, the `parallel` it
belongs to, or the step whose error it handles.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Literal

import msgspec

from rota.model.jobs.submission import Compensation, RetrySpec
from rota.model.workflows.approval_steps import ApprovalSpec

StepType = Literal["job", "delay", "condition", "switch", "parallel", "workflow", "notify", "approval"]
Trigger = Literal["failed", "fatal", "timeout", "cancelled", "denied", "quarantined"]
"""How a step may end such that the run is rolled back."""
LOOP_ROUNDS_DEFAULT: Final = 100


class LoopSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"while_": "while"}):
    """Repeats a step: `while` is evaluated before each round, `until` after it. Without either: `most` rounds."""

    while_: str = ""
    until: str = ""
    most: int = LOOP_ROUNDS_DEFAULT


class SwitchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chooses steps by the value of an expression; the others, and steps that depend on them alone, are passed over."""

    on: str
    cases: dict[str, tuple[str, ...]]
    default: tuple[str, ...] | None = None
    """None: the step fails for a value without a case."""


class ParallelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps that begin together. Once `need` of them have succeeded, the others are cancelled."""

    steps: tuple[str, ...]
    need: Literal["all", "any"] | int = "all"


class StepSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step; its type decides which fields apply."""

    id: str
    type: StepType = "job"
    depends_on: tuple[str, ...] = ()
    when: str = ""
    """An expression. False: the step is skipped, and its dependents continue."""
    on_error: str = ""
    """The step that runs if this one fails; if it succeeds, the dependents of this one continue."""

    task: str = ""
    argv: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    input: dict[str, Any] = {}
    """For a task: its keyword arguments. For a command: its input file. For a workflow: its input.
    For an approval: what approvers see besides its text."""
    topic: str = ""
    """Default: the name of the task."""
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
    """Time between asking an attempt to stop and killing it."""
    deadline_s: float = 0.0
    """Of the whole step, including waiting."""
    compensate: Compensation | None = None
    for_each: str | list[Any] | None = None
    """Items, or an expression that returns them: one frame per item, which its input reads as `item`."""
    max_parallel: int = 0
    """Concurrent items; 0: no limit."""
    loop: LoopSpec | None = None

    delay_sec: float | str = 0
    delay_until: str = ""
    """A time in ISO 8601 with its offset, or an expression that returns one."""
    condition: str = ""
    switch: SwitchSpec | None = None
    parallel: ParallelSpec | None = None
    workflow: str = ""
    notify: str = ""
    """A text with expressions; published as an event and as a bus message."""
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
    """Input names with their defaults; `{required: true}` as default means that a value is required."""
    output: dict[str, Any] | list[Any] | str = {}
    """The output of a run, with expressions."""
    timeout_s: float = 0.0
    """Of the whole run; 0: none."""
    rollback_on: frozenset[Trigger] = frozenset({"fatal"})

    def rolls_back_on(self, trigger: Trigger | None) -> bool:
        """Whether a run that ends by `trigger` is rolled back; "fatal" is a kind of "failed"."""
        return trigger in self.rollback_on or (trigger == "fatal" and "failed" in self.rollback_on)


REQUIRED_INPUT: Final = {"required": True}

_JSON = msgspec.json.Decoder(WorkflowSpec)
_ENCODER = msgspec.json.Encoder(order="deterministic")


def encode_workflow(spec: WorkflowSpec) -> bytes:
    """Equal bytes for equal definitions, whether or not defaults are written out."""
    return _ENCODER.encode(_without_defaults(spec))


def _without_defaults(value: Any) -> Any:
    """Drops values that equal their default: msgspec omits only values identical to it."""
    if isinstance(value, tuple):
        return tuple(map(_without_defaults, value))
    if not isinstance(value, msgspec.Struct):
        return value
    fields = struct_fields(type(value))
    values = {field.name: getattr(value, field.name) for field in fields}
    required = {field.name: values[field.name] for field in fields if field.required}
    defaults = type(value)(**required)
    changed = {name: each for name, each in values.items() if name in required or each != getattr(defaults, name)}
    return type(value)(**{name: _without_defaults(each) for name, each in changed.items()})


@cache
def struct_fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Cached: msgspec takes milliseconds for it, and a definition has many steps."""
    return msgspec.structs.fields(kind)


def decode_workflow(data: bytes) -> WorkflowSpec:
    return _JSON.decode(data)
