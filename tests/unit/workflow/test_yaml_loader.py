"""Workflows from YAML files: equal to those in Python, and refused with a line number."""

import re
from pathlib import Path

import pytest

from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Compensation, RetrySpec
from rota.model.workflows.spec import LoopSpec, StepSpec, SwitchSpec, WorkflowSpec
from rota.workflow.yaml_loader import parse, read

TRIP = """\
name: trip
show: travel
inputs:
  city: {required: true}
  nights: 2
rollback_on: [failed, timeout]
steps:
  - id: flight
    task: book
    args: ["${input.city}", 3]
    retry: {most: 2}
    compensate: {topic: undo, task: unbook, context: {ticket: "${steps.flight.output}"}}
  - id: which
    type: switch
    depends_on: [flight]
    switch: {on: input.nights > 0, cases: {"true": [hotel]}, default: []}
  - id: hotel
    task: book
    loop: {while: round.index < 2}
"""


def test_yaml_workflow_equals_its_python_form():
    assert parse(TRIP) == WorkflowSpec(
        name="trip",
        show="travel",
        inputs={"city": {"required": True}, "nights": 2},
        rollback_on=frozenset({"failed", "timeout"}),
        steps=(
            StepSpec(
                id="flight",
                task="book",
                args=("${input.city}", 3),
                retry=RetrySpec(most=2),
                compensate=Compensation(topic="undo", task="unbook", context={"ticket": "${steps.flight.output}"}),
            ),
            StepSpec(
                id="which",
                type="switch",
                depends_on=("flight",),
                switch=SwitchSpec(on="input.nights > 0", cases={"true": ("hotel",)}, default=()),
            ),
            StepSpec(id="hotel", task="book", loop=LoopSpec(while_="round.index < 2")),
        ),
    )


INVALID = {
    "nothing": ("", 1, "a workflow must be a mapping"),
    "malformed YAML": ("name: [", 2, "not YAML"),
    "no steps": ("name: x\n", 1, "missing required field `steps`"),
    "an unknown field": (TRIP.replace("task: unbook", "tusk: unbook"), 12, "unknown field `tusk`"),
    "a wrong type": (TRIP.replace("most: 2", "most: often"), 11, "expected `int`, got `str`"),
    "an unknown step type": (TRIP.replace("type: switch", "type: swish"), 14, "swish"),
    "an unknown step": (TRIP.replace("[flight]", "[fright]"), 13, "which does not exist"),
    "an invalid expression": (TRIP.replace("input.nights > 0", "input.nights >"), 13, "is not valid"),
    "an alias": ("name: &a x\nsteps: *a\n", 1, "anchors and aliases"),
    "an alias bomb": ("a: &a [x]\nb: &b [*a, *a]\nname: x\nsteps: [*b, *b]\n", 1, "anchors and aliases"),
    "a tag": ("name: !!python/object/apply:os.system [ls]\nsteps: []\n", 1, "tags are not supported"),
    "a cycle": (
        TRIP.replace("    task: book\n    args", "    task: book\n    depends_on: [hotel]\n    args").replace(
            "  - id: hotel\n", "  - id: hotel\n    depends_on: [flight]\n"
        ),
        8,
        "in a cycle",
    ),
    "a delay without an offset": (
        TRIP + "  - id: wait\n    type: delay\n    delay_until: 2026-01-01T00:00:00\n",
        20,
        "a time such as",
    ),
    "a NaN delay": (TRIP + "  - {id: wait, type: delay, delay_sec: .nan}\n", 20, "seconds from 0"),
    "too deep nesting": ("name: x\nsteps: " + "[" * 100 + "]" * 100 + "\n", 2, "nested deeper"),
    "a duplicate key of a step": (TRIP + "  - {id: a, id: b, task: x}\n", 20, "id"),
    "a duplicate key": ("name: x\nname: y\nsteps: []\n", 2, "name"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_workflow_file_is_refused_with_its_line(case):
    text, line, sentence = INVALID[case]
    with pytest.raises(InvalidInput) as refused:
        parse(text, "trip.yaml")
    assert refused.value.sentence.startswith(f"trip.yaml:{line}: ")
    assert sentence in refused.value.sentence


def test_oversized_or_undecodable_workflow_file_is_refused(tmp_path):
    for content in (b"#" * (1024 * 1024 + 1), b"name: \xff\n"):
        (tmp_path / "trip.yaml").write_bytes(content)
        with pytest.raises(InvalidInput, match=r"trip\.yaml"):
            read(tmp_path / "trip.yaml")


def test_workflow_example_of_the_guide_is_valid():
    page = (Path(__file__).parents[3] / "docs/howto/workflows.md").read_text()
    [example] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    spec = parse(example, "the guide")
    assert [step.id for step in spec.steps if step.compensate] == ["flight", "hotel"]
