"""Dry run: the input a run would have, and the order in which its steps may begin. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from rota.model.workflows.compiler import CompiledWorkflow


class DryRunStep(msgspec.Struct, frozen=True):
    id: str
    type: str
    after: list[str]
    """Its dependencies and its owner."""


class WorkflowDryRun(msgspec.Struct, frozen=True):
    workflow: str
    input: dict[str, Any]
    """Including defaults."""
    steps: list[DryRunStep]


def dry_run_workflow(flow: CompiledWorkflow, values: dict[str, Any]) -> WorkflowDryRun:
    """Raises InvalidInput if a run could not be started with this input."""
    steps = [DryRunStep(step.id, step.spec.type, predecessors(flow, step.place)) for step in flow.steps]
    return WorkflowDryRun(flow.spec.name, flow.inputs(values), steps)


def predecessors(flow: CompiledWorkflow, place: int) -> list[str]:
    """Ids of the steps that a step waits for."""
    step = flow.steps[place]
    owner = [step.owner] if step.owner >= 0 else []
    return [flow.steps[each].id for each in (*step.depends_on, *owner)]
