"""Workflows from files: the same as in Python, and what is wrong has a line."""

import re
from pathlib import Path

import pytest

from rota.model.errors import InvalidInput
from rota.model.job import Compensation, RetrySpec
from rota.model.workflow import LoopSpec, StepSpec, SwitchSpec, WorkflowSpec
from rota.workflow.reading import parse

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


def test_yaml_says_the_same_as_python():
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


WRONG = {
    "nothing": ("", 1, "a workflow is a mapping"),
    "no YAML": ("name: [", 2, "no YAML"),
    "no steps": ("name: x\n", 1, "missing required field `steps`"),
    "an unknown field": (TRIP.replace("task: unbook", "tusk: unbook"), 12, "unknown field `tusk`"),
    "a wrong type": (TRIP.replace("most: 2", "most: often"), 11, "expected `int`, got `str`"),
    "an unknown type of step": (TRIP.replace("type: switch", "type: swish"), 14, "swish"),
    "an unknown step": (TRIP.replace("[flight]", "[fright]"), 13, "there is no such step"),
    "an expression": (TRIP.replace("input.nights > 0", "input.nights >"), 13, "cannot be read"),
    "an alias": ("name: &a x\nsteps: *a\n", 1, "anchors and aliases"),
    "a key twice": ("name: x\nname: y\nsteps: []\n", 2, "name"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_has_a_line(what):
    text, line, sentence = WRONG[what]
    with pytest.raises(InvalidInput) as refused:
        parse(text, "trip.yaml")
    assert refused.value.sentence.startswith(f"trip.yaml:{line}: ")
    assert sentence in refused.value.sentence


def test_the_example_of_the_guide_is_a_workflow():
    page = (Path(__file__).parents[2] / "docs/howto/workflows.md").read_text()
    [example] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    spec = parse(example, "the guide")
    assert [step.id for step in spec.steps if step.compensate] == ["flight", "hotel"]
