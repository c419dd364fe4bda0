"""What the status of a run says it waits for, so that a reconciler can check that it exists. No I/O."""

from __future__ import annotations

from uuid import UUID

import msgspec

from rota.model.workflows.compiler import CompiledWorkflow
from rota.model.workflows.run_state import RunState, RunStatus, StepState
from rota.model.workflows.state_machine import RUN_TIMER


class RunWaits(msgspec.Struct, frozen=True):
    jobs: tuple[UUID, ...] = ()
    runs: tuple[UUID, ...] = ()
    approvals: tuple[UUID, ...] = ()
    timers: tuple[tuple[int, int], ...] = ()
    """(step index, attempt) pairs."""
    nothing: bool = False
    """No step is running and the run is not paused: it should have progressed."""


def run_waits(flow: CompiledWorkflow, status: RunStatus, state: RunState) -> RunWaits:
    live = [
        (flow.steps[place].spec.type, step)
        for place, step in enumerate(status.steps)
        if step.state in (StepState.RUNNING, StepState.STOPPING)
    ]
    timers = [(place, step.attempt) for place, step in enumerate(status.steps) if step.timed]
    if flow.spec.timeout_s and status.ends_as is None:
        timers.append((RUN_TIMER, 0))
    undoing = state is RunState.COMPENSATING

    def named(kind: str) -> tuple[UUID, ...]:
        return tuple(step.job for step_type, step in live if step_type == kind and step.job is not None)

    return RunWaits(
        jobs=named("job"),
        runs=named("workflow"),
        approvals=named("approval"),
        timers=() if undoing else tuple(timers),
        nothing=not undoing and not status.paused and all(kind == "parallel" for kind, _ in live),
    )
