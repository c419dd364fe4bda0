"""A run that is not started: what it would be given, and in which order its steps may begin. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from rota.model.workflow_check import Flow


class DryStep(msgspec.Struct, frozen=True):
    id: str
    type: str
    after: list[str]
    """Steps that come before it, and the one that has it begin."""


class DryRun(msgspec.Struct, frozen=True):
    workflow: str
    input: dict[str, Any]
    """With defaults."""
    steps: list[DryStep]


def dry_run(flow: Flow, given: dict[str, Any]) -> DryRun:
    """InvalidInput if a run could not be started with this."""
    steps = [DryStep(step.id, step.spec.type, before(flow, step.place)) for step in flow.steps]
    return DryRun(flow.spec.name, flow.inputs(given), steps)


def before(flow: Flow, place: int) -> list[str]:
    """Names of the steps that a step waits for."""
    step = flow.steps[place]
    owner = [step.owner] if step.owner >= 0 else []
    return [flow.steps[each].id for each in (*step.depends_on, *owner)]
