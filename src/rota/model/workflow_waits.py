"""What a run waits for by its own account, so that somebody can look whether it is there. No I/O."""

from __future__ import annotations

from uuid import UUID

import msgspec

from rota.model.workflow_advance import OF_RUN
from rota.model.workflow_check import Flow
from rota.model.workflow_run import RunNow, RunState, StepState


class Waits(msgspec.Struct, frozen=True):
    jobs: tuple[UUID, ...] = ()
    runs: tuple[UUID, ...] = ()
    approvals: tuple[UUID, ...] = ()
    timers: tuple[tuple[int, int], ...] = ()
    """Places and attempts."""
    nothing: bool = False
    """No step of it runs, and nobody has paused it: whatever could begin should have."""


def waits_for(flow: Flow, now: RunNow, state: RunState) -> Waits:
    live = [
        (flow.steps[place].spec.type, step)
        for place, step in enumerate(now.steps)
        if step.state in (StepState.RUNNING, StepState.STOPPING)
    ]
    timers = [(place, step.attempt) for place, step in enumerate(now.steps) if step.timed]
    if flow.spec.timeout_s and now.ends_as is None:
        timers.append((OF_RUN, 0))
    undoing = state is RunState.COMPENSATING

    def named(kind: str) -> tuple[UUID, ...]:
        return tuple(step.job for is_of, step in live if is_of == kind and step.job is not None)

    return Waits(
        jobs=named("job"),
        runs=named("workflow"),
        approvals=named("approval"),
        timers=() if undoing else tuple(timers),
        nothing=not undoing and not now.paused and all(kind == "parallel" for kind, _ in live),
    )
