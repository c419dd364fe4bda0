"""A run of a workflow: where each step is, what may happen to it, and what follows. No I/O.

`RunNow` is what a run's row holds. `News` is what happened to it, `Moves` what is to be done in the transaction that
takes the news up.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.model.approvals import ApprovalState
from rota.model.job_states import JobState
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.workflows.spec import Trigger

RUN_DEPTH_MAX: Final = 16
"""Runs inside runs."""


class StepState(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    """Told to stop, and not heard of since: it may have succeeded all the same."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    DENIED = "DENIED"
    SKIPPED = "SKIPPED"
    """By its own `when`: what depends on it goes on."""
    PASSED = "PASSED"
    """On a way that was not taken: what depends on it alone is not taken, either."""

    @property
    def ended(self) -> bool:
        return self not in _LIVE_STEP_STATES


_LIVE_STEP_STATES = frozenset({StepState.WAITING, StepState.RUNNING, StepState.STOPPING})


class RunState(StrEnum):
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    """For time to pass or for people to agree, and nothing else."""
    PAUSED = "PAUSED"
    COMPENSATING = "COMPENSATING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    DENIED = "DENIED"

    @property
    def ended(self) -> bool:
        return self not in (RunState.RUNNING, RunState.WAITING, RunState.PAUSED, RunState.COMPENSATING)


class StepStatus(msgspec.Struct, array_like=True, gc=False):
    state: StepState = StepState.WAITING
    attempt: int = 0
    """How often it began: more than once in a loop."""
    job: UUID | None = None
    """What it runs, or ran last: a job, or another run; or the approval that it asks for."""
    reason: str = ""
    timed: bool = False
    """Whether it has a timer."""
    trigger: Trigger | None = None
    """How it failed, where its state alone does not say."""
    stopped: bool = False
    """It was told to stop: however it ends, it has not failed."""


class RunStatus(msgspec.Struct, array_like=True):
    """The state of a run."""

    steps: list[StepStatus]
    ends_as: RunState | None = None
    """It is being ended: nothing begins any more."""
    trigger: Trigger | None = None
    error: str = ""
    paused: bool = False


class RunInfo(msgspec.Struct, frozen=True):
    """What does not change about a run."""

    id: UUID
    workflow: str
    version: int
    input: dict[str, Any]
    actor: str = ""
    """Who submits its jobs."""
    show: str = ""
    """The name that its show has now; that of the definition when left out."""


class RunBegan(msgspec.Struct, frozen=True):
    """The first news of a run."""


class JobEnded(msgspec.Struct, frozen=True):
    job: UUID
    state: JobState
    value: Any = None
    error: str = ""
    fatal: bool = False
    mapped: bool = False
    """Whether its value and error are those of several frames already."""
    partly: bool = False
    """It did not succeed, but some of its frames have: that is undone like any other work."""


class ChildRunEnded(msgspec.Struct, frozen=True):
    """A run that a step had started."""

    run: UUID
    state: RunState
    output: Any = None
    error: str = ""
    trigger: Trigger | None = None


class ApprovalDecided(msgspec.Struct, frozen=True):
    """What people said of a step, or that they did not in time."""

    approval: UUID
    state: ApprovalState
    value: Any = None
    error: str = ""


class SagaEnded(msgspec.Struct, frozen=True):
    """What the run had done is undone, or as much of it as could be."""


class TimerFired(msgspec.Struct, frozen=True):
    """A timer of a step; -1: of the run as a whole."""

    place: int
    attempt: int


class CancelRun(msgspec.Struct, frozen=True):
    reason: str = "cancelled"


class PauseRun(msgspec.Struct, frozen=True):
    by: str = ""


class ResumeRun(msgspec.Struct, frozen=True):
    pass


InboxMessage = (
    RunBegan | JobEnded | ChildRunEnded | ApprovalDecided | SagaEnded | TimerFired | CancelRun | PauseRun | ResumeRun
)


class HistoryEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An entry of the history."""

    what: str
    step: str = ""
    attempt: int = 0
    job: UUID | None = None
    why: str = ""


class Timer(msgspec.Struct, frozen=True):
    place: int
    attempt: int
    due_ms: int


class SubmitJob(msgspec.Struct, frozen=True):
    """A job to submit for a step; `job` of the step becomes its id."""

    place: int
    plan: ValidatedSubmission


class StartChildRun(msgspec.Struct, frozen=True):
    """A run to start for a step."""

    place: int
    workflow: str
    input: dict[str, Any]


class RequestApproval(msgspec.Struct, frozen=True):
    """An approval to ask for; `job` of the step becomes its id."""

    place: int
    text: str


class RecordCompensation(msgspec.Struct, frozen=True):
    """A compensation to record."""

    place: int
    job: UUID
    context: Any = None
    """What its compensation is called with, where its definition says so."""
    error: str = ""
    """Why that could not be made out."""


class Transition(msgspec.Struct):
    """What a transaction does for one run, besides writing its state."""

    starts: list[SubmitJob] = []
    children: list[StartChildRun] = []
    stops: list[UUID] = []
    """Jobs that are told to end."""
    stop_runs: list[UUID] = []
    asks: list[RequestApproval] = []
    withdrawn: list[int] = []
    """Steps whose approval is not wanted any more."""
    timers: list[Timer] = []
    untimed: list[tuple[int, int]] = []
    values: list[tuple[int, Any]] = []
    undos: list[RecordCompensation] = []
    notes: list[tuple[int, str]] = []
    happened: list[HistoryEvent] = []
    output: Any = None
