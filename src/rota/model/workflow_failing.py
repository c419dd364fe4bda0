"""How steps and runs fail by what they depend on. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from msgspec.structs import replace

from rota.model.lifecycle import JobState
from rota.model.workflow import Trigger
from rota.model.workflow_run import JobEnded, RunState, StepState

STOPPED: Final = "It was stopped."
TOO_LONG: Final = "It took longer than its deadline_s."
OF_JOBS: Final = {
    JobState.FAILED: StepState.FAILED,
    JobState.TIMEOUT: StepState.TIMEOUT,
    JobState.CANCELLED: StepState.CANCELLED,
    JobState.DENIED: StepState.DENIED,
    JobState.OUTPUT_QUARANTINED: StepState.FAILED,
}
OF_RUNS: Final = {
    RunState.FAILED: StepState.FAILED,
    RunState.TIMEOUT: StepState.TIMEOUT,
    RunState.CANCELLED: StepState.CANCELLED,
    RunState.DENIED: StepState.DENIED,
}
RUN_ENDS: Final = {step: run for run, step in OF_RUNS.items()}
TRIGGERS: Final[dict[StepState, Trigger]] = {
    StepState.FAILED: "failed",
    StepState.TIMEOUT: "timeout",
    StepState.CANCELLED: "cancelled",
    StepState.DENIED: "denied",
}
_GRAVITY: Final[tuple[Trigger, ...]] = ("fatal", "quarantined", "denied", "timeout", "failed", "cancelled")


def gravest(triggers: Iterable[Trigger], wanted: Collection[Trigger]) -> Trigger | None:
    """How a failure counts that follows from several: as one that its workflow undoes things for, if it can."""
    return min(triggers, key=lambda each: (each not in wanted, _GRAVITY.index(each)), default=None)


def of_one_item(news: JobEnded) -> JobEnded:
    """The only item of a for_each is an item like any other."""
    error = f"Item 0: {news.error}" if news.error else ""
    return replace(news, value=[news.value], error=error)
