"""Compiles a workflow definition: `compile_workflow`. No I/O.

Every limit of a definition is checked here. Step ids become indexes, expressions become functions, and the submission
of each step is validated once: a run only inserts its input. Refused are: duplicate step ids, unknown step ids, cycles,
fields that the step's type does not use, expressions that read a step which may not have ended, and unknown inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Budget, LayerSpec, Submission, decode_details, encode_details
from rota.model.jobs.validation import INPUT_BYTES_MAX, ValidatedSubmission, validate_submission
from rota.model.workflows.approval_steps import check_terms
from rota.model.workflows.expressions import (
    Evaluate,
    ExpressionError,
    Scope,
    compile_expression,
    compile_template,
    expressions_in,
    steps_mentioned,
    validate_value,
)
from rota.model.workflows.limits import ITEMS_MAX, check_expressions, check_no_expressions, check_size
from rota.model.workflows.spec import REQUIRED_INPUT, StepSpec, WorkflowSpec, struct_fields

LOOP_ROUNDS_MAX: Final = 10_000
NESTING_MAX: Final = 32
DELAY_MAX_S: Final = 10 * 366 * 86_400.0
ACTORS_CACHE_MAX: Final = 1000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_INPUT = re.compile(r"\binput\s*\.\s*([A-Za-z_]\w*)", re.ASCII)
_FIELDS: Final = {
    "job": {"task", "argv", "args", "input", "topic", "priority", "cores", "gpus", "memory", "requires", "labels"}
    | {"env", "retry", "timeout_s", "kill_after_s", "deadline_s", "compensate", "for_each", "max_parallel", "loop"},
    "delay": {"delay_sec", "delay_until"},
    "condition": {"condition"},
    "switch": {"switch"},
    "parallel": {"parallel", "deadline_s"},
    "workflow": {"workflow", "input", "loop", "deadline_s"},
    "notify": {"notify"},
    "approval": {"approval", "input", "deadline_s"},
}
_COMMON_FIELDS: Final = {"id", "type", "depends_on", "when", "on_error"}

StepRole = Literal["", "member", "case", "handler"]
_pack = msgspec.msgpack.Encoder().encode


class CompiledStep(msgspec.Struct):
    """A step with its index (`place`). `owner` is the parallel, switch or failed step that starts it; -1: none."""

    place: int
    spec: StepSpec
    depends_on: tuple[int, ...] = ()
    owner: int = -1
    role: StepRole = ""
    handler: int = -1
    members: tuple[int, ...] = ()
    cases: dict[str, tuple[int, ...]] = {}
    default: tuple[int, ...] | None = None
    followers: tuple[int, ...] = ()
    """Steps to evaluate when the state of this one changes."""
    when: Evaluate | None = None
    value: Evaluate | None = None
    """Of a condition, switch, delay, notification or approval, or the items of a for_each."""
    again: Evaluate | None = None
    """Whether a loop runs another round."""
    args: Evaluate | None = None
    input: Evaluate | None = None
    plan: ValidatedSubmission | None = None
    """Includes the input if that is the same in every run."""
    by: dict[tuple[str, str], ValidatedSubmission] = {}
    """`plan` with the submitter of a run, cached by actor and show name."""
    undo: Evaluate | None = None
    """Input of its compensation."""
    reads: frozenset[int] = frozenset()
    """Steps whose outputs its expressions read."""

    @property
    def id(self) -> str:
        return self.spec.id

    def call_input(self, scope: Scope) -> Any:
        """The input of the step's job, child run or approval."""
        spec = self.spec
        values = self.input(scope) if self.input is not None else spec.input
        if spec.type in ("workflow", "approval") or spec.argv:
            return validate_value(values, f"input of step {spec.id}")
        args = self.args(scope) if self.args is not None else list(spec.args)
        return validate_value({"args": args, "kwargs": values}, f"input of step {spec.id}")

    def submission(self, scope: Scope, run: str, actor: str = "", show: str = "") -> ValidatedSubmission:
        """The job to submit in a run started by `actor`; `show` is the current name of its show."""
        assert self.plan is not None, "only steps of type job are submitted"
        if self.spec.for_each is not None:
            return with_submitter(self._mapped_submission(scope, run), actor, show)
        shared = self._submission_by(actor, show)
        [layer] = shared.layers
        if layer.input is not None:
            return replace(shared, workflow_id=run, like=shared)
        data = _pack(self.call_input(scope))
        if len(data) > INPUT_BYTES_MAX:
            raise ExpressionError(f"The input of step {self.id} has {len(data)} bytes: pass a pointer to it.")
        return replace(shared, workflow_id=run, layers=(replace(layer, input=data),), like=shared)

    def _submission_by(self, actor: str, show: str) -> ValidatedSubmission:
        """One shared submission for all runs of an actor, so that their jobs are written as one group."""
        assert self.plan is not None
        cached = self.by.get((actor, show))
        if cached is None:
            if len(self.by) >= ACTORS_CACHE_MAX:
                self.by.clear()
            cached = self.by[actor, show] = with_submitter(self.plan, actor, show)
        return cached

    def items(self, scope: Scope) -> list[Any]:
        items = self.value(scope) if self.value is not None else self.spec.for_each
        if not isinstance(items, (list, tuple)):
            raise ExpressionError(f"The items of step {self.id} must be a list, not a {type(items).__name__}.")
        if len(items) > ITEMS_MAX:
            raise ExpressionError(f"Step {self.id} has {len(items)} items, at most {ITEMS_MAX} are allowed.")
        return list(items)

    def _mapped_submission(self, scope: Scope, run: str) -> ValidatedSubmission:
        inputs = [self.call_input({**scope, "item": item}) for item in self.items(scope)]
        spec = self.spec
        width = spec.max_parallel
        try:
            layer = replace(
                _layer_of(spec),
                items=inputs,
                fail_fast=True,
                max_cores=_multiply_cores(spec.cores, width) if width else None,
            )
            mapped = validate_submission(_item_submission(spec, self.plan, layer), may_be_critical=True)
        except InvalidInput as error:
            raise ExpressionError(error.sentence) from error
        return replace(mapped, name=self.plan.name if self.plan else mapped.name, workflow_id=run)


class CompiledWorkflow(msgspec.Struct):
    """A definition in the form that runs use."""

    spec: WorkflowSpec
    steps: list[CompiledStep]
    output: Evaluate | None
    reads: frozenset[int]
    """Steps whose outputs any expression reads."""

    def index_of(self, step: str) -> int:
        """Index of a step by id; raises InvalidInput if there is none."""
        for each in self.steps:
            if each.id == step:
                return each.place
        raise InvalidInput(
            f"The workflow {self.spec.name} has no step {step[:64]!r}: its steps are {_step_names(self.steps)}."
        )

    def inputs(self, values: dict[str, Any]) -> dict[str, Any]:
        """The input of a run with defaults applied; raises InvalidInput."""
        declared = self.spec.inputs
        if declared and (unknown := sorted(values.keys() - declared.keys())):
            raise InvalidInput(
                f"The workflow {self.spec.name} has no input {unknown[0][:64]!r}: its inputs are"
                f" {', '.join(sorted(declared))}."
            )
        merged = {**{name: value for name, value in declared.items() if value != REQUIRED_INPUT}, **values}
        if missing := sorted(declared.keys() - merged.keys()):
            raise InvalidInput(f"The workflow {self.spec.name} requires the input {missing[0]}: pass a value for it.")
        try:
            return dict(validate_value(merged, "input of the run"))
        except ExpressionError as error:
            raise InvalidInput(str(error)) from error

    def after(self, place: int) -> frozenset[int]:
        """The step and all its transitive followers."""
        found: set[int] = set()
        pending = [place]
        while pending:
            each = pending.pop()
            if each not in found:
                found.add(each)
                pending += self.steps[each].followers
        return frozenset(found)


def compile_workflow(spec: WorkflowSpec) -> CompiledWorkflow:
    """Compile a definition; raises InvalidInput with a sentence that names the step."""
    if not _NAME.fullmatch(spec.name):
        raise InvalidInput(f"{spec.name[:64]!r} is not a valid workflow name: use up to 64 letters, digits, _ and -.")
    check_size(spec)
    if not 0 <= spec.timeout_s <= DELAY_MAX_S:
        raise InvalidInput(f"The timeout_s of workflow {spec.name} is out of range: use seconds from 0 to ten years.")
    places = _step_indexes(spec)
    steps = [_compile_step(step, at, places, spec) for at, step in enumerate(spec.steps)]
    _assign_owners(steps)
    order = _topological_order(steps)
    _link_followers(steps)
    reads = _check_reads(steps, places, order, spec)
    return CompiledWorkflow(spec, steps, compile_template(spec.output, "the output"), reads)


def _step_indexes(spec: WorkflowSpec) -> dict[str, int]:
    places: dict[str, int] = {}
    for at, step in enumerate(spec.steps):
        if not _NAME.fullmatch(step.id):
            raise InvalidInput(f"{step.id[:64]!r} is not a valid id of a step: use up to 64 letters, digits, _ and -.")
        if step.id in places:
            raise InvalidInput(f"Step {step.id} is defined twice: give each step its own id.")
        places[step.id] = at
    return places


def _compile_step(spec: StepSpec, at: int, places: dict[str, int], flow: WorkflowSpec) -> CompiledStep:
    _check_fields(spec)
    step = CompiledStep(at, spec, tuple(_find(name, places, spec, "depends on") for name in spec.depends_on))
    what = f"step {spec.id}"
    step.when = compile_expression(spec.when, what) if spec.when else None
    if spec.on_error:
        step.handler = _find(spec.on_error, places, spec, "names as on_error")
    if spec.type == "job":
        _compile_job(step, flow)
    else:
        _compile_other(step, places)
    if spec.loop is not None:
        step.again = _compile_loop(spec)
    return step


def _compile_other(step: CompiledStep, places: dict[str, int]) -> None:
    spec, what = step.spec, f"step {step.spec.id}"
    match spec.type:
        case "workflow":
            if not _NAME.fullmatch(spec.workflow):
                raise InvalidInput(f"Step {spec.id} names no workflow to run: set its field workflow.")
            step.input = compile_template(spec.input, what)
        case "delay":
            step.value = _compile_delay(spec)
        case "condition":
            step.value = compile_expression(spec.condition, what)
        case "switch":
            _compile_switch(step, places)
        case "parallel":
            _compile_parallel(step, places)
        case "notify":
            if not spec.notify:
                raise InvalidInput(f"Step {spec.id} has no text to publish: set its field notify.")
            step.value = compile_template(spec.notify, what)
        case "approval":
            step.value = compile_template(check_terms(spec.id, spec.approval).text, what)
            step.input = compile_template(spec.input, what)


def _check_fields(spec: StepSpec) -> None:
    known = _FIELDS[spec.type] | _COMMON_FIELDS
    for field in struct_fields(StepSpec):
        if field.name not in known and getattr(spec, field.name) != _default(field):
            raise InvalidInput(f"Step {spec.id} is of type {spec.type}, which does not use {field.name}: remove it.")
    for name, seconds in (("timeout_s", spec.timeout_s), ("deadline_s", spec.deadline_s)):
        if not 0 <= seconds <= DELAY_MAX_S:
            raise InvalidInput(f"The {name} of step {spec.id} is out of range: use seconds from 0 to ten years.")


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def _compile_job(step: CompiledStep, flow: WorkflowSpec) -> None:
    spec = step.spec
    if bool(spec.task) == bool(spec.argv):
        raise InvalidInput(f"Step {spec.id} must have either a task or an argv: set exactly one of them.")
    if spec.loop is not None and spec.for_each is not None:
        raise InvalidInput(f"Step {spec.id} has both loop and for_each: move one of them into a workflow of its own.")
    if not 0 <= spec.max_parallel <= ITEMS_MAX:
        raise InvalidInput(f"The max_parallel of step {spec.id} is {spec.max_parallel}: use 0 to {ITEMS_MAX}.")
    what = f"step {spec.id}"
    check_no_expressions(spec, what)
    step.args, step.input = compile_template(list(spec.args), what), compile_template(spec.input, what)
    try:
        validated = validate_submission(_submission(spec, flow, _layer_of(spec)), may_be_critical=True)
    except InvalidInput as error:
        raise InvalidInput(f"Step {spec.id}: {error.sentence}") from error
    step.plan = validated
    _compile_compensation(step, flow)
    if isinstance(spec.for_each, str):
        text = spec.for_each
        step.value = compile_template(text, what) or compile_expression(text, what)
    elif spec.for_each is not None:
        step.value = compile_template(spec.for_each, what)
    elif step.args is None and step.input is None:
        data = _pack(spec.input if spec.argv else {"args": list(spec.args), "kwargs": spec.input})
        if len(data) > INPUT_BYTES_MAX:
            raise InvalidInput(f"The input of step {spec.id} has {len(data)} bytes: pass a pointer to it.")
        [layer] = validated.layers
        step.plan = replace(validated, layers=(replace(layer, input=data),))


def with_submitter(submission: ValidatedSubmission, actor: str, show: str = "") -> ValidatedSubmission:
    """The starter of a run is the submitter of its jobs: policies see that, and they cannot approve them."""
    if show and show != submission.show:
        submission = replace(submission, show=show, like=None)
    if not actor:
        return submission
    details = replace(decode_details(submission.details), principal=actor)
    return replace(submission, details=encode_details(details), like=None)


def _compile_compensation(step: CompiledStep, flow: WorkflowSpec) -> None:
    spec = step.spec
    if spec.compensate is None:
        return
    if spec.compensate.idempotency_key:
        raise InvalidInput(
            f"The compensation of step {spec.id} has an idempotency_key, which all runs would share: remove it."
        )
    try:
        validate_submission(
            replace(_submission(spec, flow, _layer_of(spec)), compensation=spec.compensate), may_be_critical=True
        )
    except InvalidInput as error:
        raise InvalidInput(f"The compensation of step {spec.id}: {error.sentence}") from error
    step.undo = compile_template(spec.compensate.context, f"the compensation of step {spec.id}")


def _layer_of(spec: StepSpec) -> LayerSpec:
    return LayerSpec(
        name=spec.id,
        task=spec.task,
        argv=spec.argv,
        cores=spec.cores,
        gpus=spec.gpus,
        memory=spec.memory,
        timeout_s=spec.timeout_s,
        kill_after_s=spec.kill_after_s,
        retries=spec.retry,
    )


def _submission(spec: StepSpec, flow: WorkflowSpec, layer: LayerSpec) -> Submission:
    return Submission(
        show=flow.show,
        folder=flow.folder,
        dept=flow.dept,
        name=f"{flow.name}.{spec.id}",
        topic=spec.topic or spec.task or "default",
        priority=spec.priority or flow.priority,
        labels=spec.labels,
        env=spec.env,
        requires=spec.requires,
        budget=Budget(deadline_ms=round(spec.deadline_s * 1000)),
        layers=(layer,),
    )


def _item_submission(spec: StepSpec, plan: ValidatedSubmission | None, layer: LayerSpec) -> Submission:
    assert plan is not None
    flow = WorkflowSpec(name="of", steps=(), show=plan.show, folder=plan.folder, dept=plan.dept, priority=plan.priority)
    return _submission(spec, flow, layer)


def _multiply_cores(cores: float | str, width: int) -> str:
    from rota.model.units import Centicores, format_cores, parse_cores

    return format_cores(Centicores(parse_cores(cores) * width))


def _compile_delay(spec: StepSpec) -> Evaluate | None:
    if bool(spec.delay_sec) == bool(spec.delay_until):
        raise InvalidInput(f"Step {spec.id} must have either delay_sec or delay_until: set exactly one of them.")
    delay = spec.delay_sec or spec.delay_until
    evaluate = compile_template(delay, f"step {spec.id}")
    if evaluate is None:
        try:
            due_ms(spec, delay, 0)
        except ExpressionError as error:
            raise InvalidInput(str(error)) from error
    return evaluate


def due_ms(spec: StepSpec, value: Any, now_ms: int) -> int:
    """When a delay that began at `now_ms` ends."""
    if spec.delay_until:
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise ExpressionError(
                f"Step {spec.id} waits until {str(value)[:40]!r}: use a time such as 2026-01-31T12:00:00Z."
            )
        due = round(moment.timestamp() * 1000)
        if now_ms and due - now_ms > DELAY_MAX_S * 1000:
            raise ExpressionError(f"Step {spec.id} waits until {str(value)[:40]!r}: use at most ten years from now.")
        return due
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds <= DELAY_MAX_S:
        raise ExpressionError(f"Step {spec.id} waits for {str(value)[:40]!r}: use seconds from 0 to ten years.")
    return now_ms + round(seconds * 1000)


def _compile_switch(step: CompiledStep, places: dict[str, int]) -> None:
    spec = step.spec
    if spec.switch is None or not spec.switch.cases:
        raise InvalidInput(f"Step {spec.id} has no cases to choose from: set its field switch.")
    step.value = compile_expression(spec.switch.on, f"step {spec.id}")
    step.cases = {
        value: tuple(_find(name, places, spec, "chooses") for name in names)
        for value, names in spec.switch.cases.items()
    }
    if spec.switch.default is not None:
        step.default = tuple(_find(name, places, spec, "chooses") for name in spec.switch.default)


def _compile_parallel(step: CompiledStep, places: dict[str, int]) -> None:
    spec = step.spec
    if spec.parallel is None or not spec.parallel.steps:
        raise InvalidInput(f"Step {spec.id} has no steps to run in parallel: set its field parallel.")
    step.members = tuple(_find(name, places, spec, "starts") for name in spec.parallel.steps)
    need = spec.parallel.need
    if isinstance(need, int) and not 1 <= need <= len(step.members):
        raise InvalidInput(f"Step {spec.id} needs {need} of {len(step.members)} steps: use 1 to {len(step.members)}.")


def _compile_loop(spec: StepSpec) -> Evaluate | None:
    loop = spec.loop
    assert loop is not None
    if not 1 <= loop.most <= LOOP_ROUNDS_MAX:
        raise InvalidInput(f"The loop of step {spec.id} allows {loop.most} rounds: use 1 to {LOOP_ROUNDS_MAX}.")
    if loop.while_ and loop.until:
        raise InvalidInput(f"The loop of step {spec.id} has both while and until: set only one of them.")
    if loop.while_:
        return compile_expression(loop.while_, f"the loop of step {spec.id}")
    if loop.until:
        until = compile_expression(loop.until, f"the loop of step {spec.id}")
        return lambda scope: not require_bool(until(scope), spec.id)
    return None


def require_bool(value: Any, step: str) -> bool:
    if not isinstance(value, bool):
        raise ExpressionError(f"An expression of step {step} must return true or false, not a {type(value).__name__}.")
    return value


def _find(name: str, places: dict[str, int], spec: StepSpec, what: str) -> int:
    if name not in places:
        near = ", ".join(list(places)[:20])
        raise InvalidInput(f"Step {spec.id} {what} {name[:64]!r}, which does not exist: the steps are {near}.")
    if name == spec.id:
        raise InvalidInput(f"Step {spec.id} {what} itself: it would never begin.")
    return places[name]


def _assign_owners(steps: list[CompiledStep]) -> None:
    """Set owner and role of every step that another step starts."""

    def own(owner: CompiledStep, owned: int, role: StepRole) -> None:
        step = steps[owned]
        if step.owner not in (-1, owner.place):
            raise InvalidInput(f"Step {step.id} belongs to both {steps[step.owner].id} and {owner.id}: use two steps.")
        step.owner, step.role = owner.place, role

    for step in steps:
        for member in step.members:
            own(step, member, "member")
        for case in {place for chosen in (*step.cases.values(), step.default or ()) for place in chosen}:
            own(step, case, "case")
        if step.handler >= 0:
            own(step, step.handler, "handler")
    for step in steps:
        _check_nesting(step, steps)


def _check_nesting(step: CompiledStep, steps: Sequence[CompiledStep]) -> None:
    """Limit the nesting of parallels and handlers, and refuse ownership cycles."""
    outer = step
    for _ in range(NESTING_MAX):
        if outer.owner < 0:
            return
        outer = steps[outer.owner]
    raise InvalidInput(f"Step {step.id} is nested {NESTING_MAX} levels deep or in a cycle: flatten the workflow.")


def _predecessors(step: CompiledStep, steps: Sequence[CompiledStep]) -> list[int]:
    """Steps that must reach some state before this one may begin or, for a parallel, end."""
    owner = [step.owner] if step.owner >= 0 else []
    return [*step.depends_on, *owner, *(end for dep in step.depends_on for end in _required_ends(steps[dep], steps))]


def _required_ends(step: CompiledStep, steps: Sequence[CompiledStep]) -> Iterable[int]:
    """Steps that must end before `step` counts as ended: its error handlers and the members of a parallel."""
    if step.handler >= 0:
        yield step.handler
        yield from _required_ends(steps[step.handler], steps)
    for member in step.members:
        yield member
        yield from _required_ends(steps[member], steps)


def _topological_order(steps: list[CompiledStep]) -> list[int]:
    """Indexes in dependency order; raises InvalidInput for a cycle."""
    pending = {step.place: set(_predecessors(step, steps)) for step in steps}
    order: list[int] = []
    while pending:
        free = [place for place, before in pending.items() if not before]
        if not free:
            names = ", ".join(steps[place].id for place in list(pending)[:10])
            if len(pending) == 1:
                raise InvalidInput(f"Step {names} depends on a step that ends after it: remove the dependency.")
            raise InvalidInput(f"The steps {names} depend on each other in a cycle: remove one of the dependencies.")
        for place in free:
            del pending[place]
        for before in pending.values():
            before.difference_update(free)
        order += free
    return order


def _link_followers(steps: list[CompiledStep]) -> None:
    followers: list[dict[int, None]] = [{} for _ in steps]
    for step in steps:
        for dep in (*step.depends_on, *([step.owner] if step.owner >= 0 else [])):
            for waited in (steps[dep], *_handlers(steps[dep], steps)):
                if waited.place != step.place:
                    followers[waited.place][step.place] = None
        if step.role == "member":
            for waited in (step, *_handlers(step, steps)):
                followers[waited.place][step.owner] = None
    for step in steps:
        step.followers = tuple(followers[step.place])


def _handlers(step: CompiledStep, steps: Sequence[CompiledStep]) -> Iterator[CompiledStep]:
    """Its error handler, the handler of that one, and so on."""
    while step.handler >= 0:
        step = steps[step.handler]
        yield step


def _check_reads(
    steps: list[CompiledStep], places: dict[str, int], order: list[int], spec: WorkflowSpec
) -> frozenset[int]:
    """Indexes of all steps read by expressions; each must have ended by then, and inputs must be declared."""
    before: dict[int, set[int]] = {}
    for place in order:
        direct = set(_predecessors(steps[place], steps))
        before[place] = direct.union(*(before[each] for each in direct if each in before))
    read: set[int] = set()
    for step in steps:
        reads = set()
        reads_itself = step.spec.loop is not None or step.spec.compensate is not None
        for text in check_expressions(_expression_texts(step.spec), f"step {step.id}"):
            for name in steps_mentioned(text):
                found = _find_read(name, places, step.id)
                if found not in before[step.place] and not (found == step.place and reads_itself):
                    raise InvalidInput(
                        f"An expression of step {step.id} reads step {name}, which may not have ended by then:"
                        f" make {step.id} depend on it."
                    )
                reads.add(found)
            _check_inputs(text, spec, f"step {step.id}")
        if step.spec.loop is not None:
            reads.add(step.place)
        step.reads = frozenset(reads)
        read |= reads
    for text in check_expressions(expressions_in(spec.output), "the output"):
        read |= {_find_read(name, places, "output") for name in steps_mentioned(text)}
        _check_inputs(text, spec, "the output")
    return frozenset(read)


def _find_read(name: str, places: dict[str, int], step: str) -> int:
    if name not in places:
        raise InvalidInput(f"An expression of {step} reads step {name[:64]!r}, which does not exist.")
    return places[name]


def _check_inputs(text: str, spec: WorkflowSpec, what: str) -> None:
    for name in _INPUT.findall(text):
        if spec.inputs and name not in spec.inputs:
            raise InvalidInput(f"An expression of {what} reads input.{name}, which is not declared: add it to inputs.")


def _expression_texts(spec: StepSpec) -> Iterable[str]:
    if spec.when:
        yield spec.when
    if spec.condition:
        yield spec.condition
    if spec.switch is not None:
        yield spec.switch.on
    if spec.loop is not None:
        yield from (text for text in (spec.loop.while_, spec.loop.until) if text)
    if isinstance(spec.for_each, str) and "${" not in spec.for_each:
        yield spec.for_each
    compensation = spec.compensate.context if spec.compensate is not None else None
    approval_text = spec.approval.text if spec.approval is not None else None
    for value in (
        spec.args,
        spec.input,
        spec.for_each,
        spec.delay_sec,
        spec.delay_until,
        spec.notify,
        approval_text,
        compensation,
    ):
        yield from expressions_in(value)


def _step_names(steps: Sequence[CompiledStep]) -> str:
    return ", ".join(step.id for step in steps[:20])
