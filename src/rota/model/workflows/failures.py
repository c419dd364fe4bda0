"""How failures of jobs and child runs map to steps and runs. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from msgspec.structs import replace

from rota.model.job_states import JobState
from rota.model.workflows.run_state import JobEnded, RunState, StepState
from rota.model.workflows.spec import Trigger

STOPPED_MESSAGE: Final = "It was stopped."
DEADLINE_MESSAGE: Final = "It took longer than its deadline_s."
STEP_STATE_BY_JOB_STATE: Final = {
    JobState.FAILED: StepState.FAILED,
    JobState.TIMEOUT: StepState.TIMEOUT,
    JobState.CANCELLED: StepState.CANCELLED,
    JobState.DENIED: StepState.DENIED,
    JobState.OUTPUT_QUARANTINED: StepState.FAILED,
}
STEP_STATE_BY_RUN_STATE: Final = {
    RunState.FAILED: StepState.FAILED,
    RunState.TIMEOUT: StepState.TIMEOUT,
    RunState.CANCELLED: StepState.CANCELLED,
    RunState.DENIED: StepState.DENIED,
}
RUN_STATE_BY_STEP_STATE: Final = {step: run for run, step in STEP_STATE_BY_RUN_STATE.items()}
TRIGGER_BY_STEP_STATE: Final[dict[StepState, Trigger]] = {
    StepState.FAILED: "failed",
    StepState.TIMEOUT: "timeout",
    StepState.CANCELLED: "cancelled",
    StepState.DENIED: "denied",
}
_SEVERITY: Final[tuple[Trigger, ...]] = ("fatal", "quarantined", "denied", "timeout", "failed", "cancelled")


def worst_trigger(triggers: Iterable[Trigger], preferred: Collection[Trigger]) -> Trigger | None:
    """The trigger of a failure with several causes: preferably one that the workflow rolls back on."""
    return min(triggers, key=lambda each: (each not in preferred, _SEVERITY.index(each)), default=None)


def as_single_item(ended: JobEnded) -> JobEnded:
    """The result of a for_each with one item, in the form of several."""
    error = f"Item 0: {ended.error}" if ended.error else ""
    return replace(ended, value=[ended.value], error=error)
