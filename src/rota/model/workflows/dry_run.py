"""Dry run: the input a run would have, the order in which its steps may begin, and their jobs. No I/O.

`rota.workflow.dry_run` asks the policy about these jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from rota.model.cel_guard import CostMeter
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.workflows.cel import METER_KEY
from rota.model.workflows.compiler import CompiledStep, CompiledWorkflow, with_submitter
from rota.model.workflows.expressions import ExpressionError

RUN_ID: Final = "dry-run"
"""Stands for the id of the run: rules see that the job belongs to one."""


class StepGate(msgspec.Struct, frozen=True):
    """What the policy would decide now about the job of a step."""

    verdict: Literal["allow", "deny", "require_approval", "wait"]
    reason: str | None = None
    because: str | None = None
    """For people: the rule and its reason."""
    complete: bool = True
    """False: its input depends on results of other steps. The policy was asked about one frame without input."""


class DryRunStep(msgspec.Struct, frozen=True):
    id: str
    type: str
    after: list[str]
    """Its dependencies and its owner."""
    gate: StepGate | None = None
    """None: it submits no job, or no policy was asked."""


class WorkflowDryRun(msgspec.Struct, frozen=True):
    workflow: str
    input: dict[str, Any]
    """Including defaults."""
    steps: list[DryRunStep]


class StepJob(NamedTuple):
    """The job that a step would submit; `complete` as in `StepGate`."""

    submission: ValidatedSubmission
    complete: bool


def dry_run_workflow(
    flow: CompiledWorkflow, values: dict[str, Any], gates: Mapping[int, StepGate] | None = None
) -> WorkflowDryRun:
    """`gates` by the index of the step. Raises InvalidInput if a run could not be started with this input."""
    steps = [
        DryRunStep(step.id, step.spec.type, predecessors(flow, step.place), (gates or {}).get(step.place))
        for step in flow.steps
    ]
    return WorkflowDryRun(flow.spec.name, flow.inputs(values), steps)


def step_jobs(flow: CompiledWorkflow, values: dict[str, Any], actor: str, show: str) -> dict[int, StepJob]:
    """By the index of the step, the job that it would submit in a run started by `actor`. Raises InvalidInput."""
    run = {"id": RUN_ID, "workflow": flow.spec.name, "version": 0}
    scope = {"input": flow.inputs(values), "run": run, "steps": {}, METER_KEY: CostMeter()}
    scope["round"] = {"index": 0, "output": None}
    jobs = {step.place: _step_job(step, scope, actor, show) for step in flow.steps}
    return {place: job for place, job in jobs.items() if job is not None}


def _step_job(step: CompiledStep, scope: dict[str, Any], actor: str, show: str) -> StepJob | None:
    if step.plan is None:
        return None
    if not step.reads:
        try:
            if step.spec.for_each is not None and not step.items(scope):
                return None
            return StepJob(step.submission(scope, RUN_ID, actor, show), complete=True)
        except ExpressionError:
            pass  # the step of a run would fail; the policy is asked about what is known
    plan = msgspec.structs.replace(with_submitter(step.plan, actor, show), workflow_id=RUN_ID)
    return StepJob(plan, complete=False)


def predecessors(flow: CompiledWorkflow, place: int) -> list[str]:
    """Ids of the steps that a step waits for."""
    step = flow.steps[place]
    owner = [step.owner] if step.owner >= 0 else []
    return [flow.steps[each].id for each in (*step.depends_on, *owner)]
