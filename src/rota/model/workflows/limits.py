"""Size limits of a workflow definition. No I/O.

These are checked first, so that no later processing of a definition needs a bound of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Compensation
from rota.model.workflows.spec import StepSpec, WorkflowSpec, encode_workflow

SPEC_BYTES_MAX: Final = 1024 * 1024
STEPS_MAX: Final = 1000
ITEMS_MAX: Final = 10_000
DEPTH_MAX: Final = 32
EXPRESSIONS_MAX: Final = 200
"""Per step: the values they read may all have to be in memory together."""

_EXPRESSION = re.compile(r"(?<!\$)\$\{\s*(?:input|steps|item|round|run)\s*\.", re.ASCII)


def check_size(spec: WorkflowSpec) -> None:
    """Raises InvalidInput for a definition that is too large or cannot be encoded."""
    if not 1 <= len(spec.steps) <= STEPS_MAX:
        raise InvalidInput(f"The workflow {spec.name} has {len(spec.steps)} steps: use 1 to {STEPS_MAX}.")
    for what, value in (("inputs", spec.inputs), ("output", spec.output)):
        _check_depth(value, f"the {what} of workflow {spec.name}")
    for step in spec.steps:
        if isinstance(step.for_each, list) and len(step.for_each) > ITEMS_MAX:
            raise InvalidInput(f"Step {step.id} has {len(step.for_each)} items: use at most {ITEMS_MAX}.")
        for value in _values(step):
            _check_depth(value, f"step {step.id[:64]}")
    try:
        size = len(encode_workflow(spec))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidInput(f"The workflow {spec.name} cannot be stored: {str(error)[:200].rstrip('.')}.") from error
    if size > SPEC_BYTES_MAX:
        raise InvalidInput(
            f"The workflow {spec.name} has {size} bytes, at most {SPEC_BYTES_MAX} are allowed:"
            " pass large values as input."
        )


def check_expressions(texts: Iterable[str], what: str) -> list[str]:
    """`texts` as a list; raises InvalidInput if there are too many."""
    found = list(texts)
    if len(found) > EXPRESSIONS_MAX:
        raise InvalidInput(f"There are {len(found)} expressions in {what}: use at most {EXPRESSIONS_MAX}.")
    return found


def _values(step: StepSpec) -> Iterator[Any]:
    yield from (step.args, step.input, step.for_each)
    if step.compensate is not None:
        yield step.compensate.context


def _check_depth(value: Any, what: str) -> None:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [below for each in level for below in _children(each)]
        if not level:
            return
    raise InvalidInput(f"A value of {what} is nested more than {DEPTH_MAX} levels deep: make it flatter.")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def check_no_expressions(spec: StepSpec | Compensation, what: str) -> None:
    """Refuse expressions in fields that are the same in every run: they would be passed on literally."""
    for name, texts in (("argv", spec.argv), ("env", spec.env.values()), ("labels", spec.labels.values())):
        if any(_EXPRESSION.search(text) for text in texts):
            how = "input, which a command reads from the file named by ROTA_INPUT" if name == "argv" else "input"
            raise InvalidInput(f"The {name} of {what} cannot contain expressions: put varying values into its {how}.")
    if isinstance(spec, StepSpec) and spec.compensate is not None:
        check_no_expressions(spec.compensate, f"the compensation of {what}")
