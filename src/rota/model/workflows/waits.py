"""What a run waits for by its own account, so that somebody can look whether it is there. No I/O."""

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
    """Places and attempts."""
    nothing: bool = False
    """No step of it runs, and nobody has paused it: whatever could begin should have."""


def run_waits(flow: CompiledWorkflow, now: RunStatus, state: RunState) -> RunWaits:
    live = [
        (flow.steps[place].spec.type, step)
        for place, step in enumerate(now.steps)
        if step.state in (StepState.RUNNING, StepState.STOPPING)
    ]
    timers = [(place, step.attempt) for place, step in enumerate(now.steps) if step.timed]
    if flow.spec.timeout_s and now.ends_as is None:
        timers.append((RUN_TIMER, 0))
    undoing = state is RunState.COMPENSATING

    def named(kind: str) -> tuple[UUID, ...]:
        return tuple(step.job for is_of, step in live if is_of == kind and step.job is not None)

    return RunWaits(
        jobs=named("job"),
        runs=named("workflow"),
        approvals=named("approval"),
        timers=() if undoing else tuple(timers),
        nothing=not undoing and not now.paused and all(kind == "parallel" for kind, _ in live),
    )
