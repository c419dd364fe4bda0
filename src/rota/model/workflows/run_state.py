"""State of a workflow run, its inbox messages, and transitions. No I/O.

`RunStatus` is stored in the run's row. An `InboxMessage` is something that happened to the run; a `Transition` is what
the transaction that processes the messages must do.
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
"""Nesting of runs."""


class StepState(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    """Asked to stop, without a result yet: it may still succeed."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    DENIED = "DENIED"
    SKIPPED = "SKIPPED"
    """By its own `when`: dependents continue."""
    PASSED = "PASSED"
    """On a branch that was not chosen: steps that depend on it alone are passed over, too."""

    @property
    def ended(self) -> bool:
        return self not in _LIVE_STEP_STATES


_LIVE_STEP_STATES = frozenset({StepState.WAITING, StepState.RUNNING, StepState.STOPPING})


class RunState(StrEnum):
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    """Only for time to pass or for approvals."""
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
    """What it runs or last ran: a job, a child run, or its approval."""
    reason: str = ""
    timed: bool = False
    """Whether it has a timer."""
    trigger: Trigger | None = None
    """How it failed, if its state alone does not say."""
    stopped: bool = False
    """It was asked to stop: however it ends, it does not count as failed."""


class RunStatus(msgspec.Struct, array_like=True):
    """The state of a run."""

    steps: list[StepStatus]
    ends_as: RunState | None = None
    """Set once the run is ending: nothing begins any more."""
    trigger: Trigger | None = None
    error: str = ""
    paused: bool = False


class RunInfo(msgspec.Struct, frozen=True):
    """The constant facts of a run."""

    id: UUID
    workflow: str
    version: int
    input: dict[str, Any]
    actor: str = ""
    """The submitter of its jobs."""
    show: str = ""
    """The current name of its show; default: that of the definition."""


class RunBegan(msgspec.Struct, frozen=True):
    """The first message of a run."""


class JobEnded(msgspec.Struct, frozen=True):
    job: UUID
    state: JobState
    value: Any = None
    error: str = ""
    fatal: bool = False
    mapped: bool = False
    """Whether value and error are already those of several frames."""
    partly: bool = False
    """It did not succeed, but some of its frames did: these are compensated like any other work."""

    @property
    def has_effects(self) -> bool:
        """Whether it did something that has to be compensated."""
        return self.partly or self.state in (JobState.SUCCEEDED, JobState.OUTPUT_QUARANTINED)


class ChildRunEnded(msgspec.Struct, frozen=True):
    """A run that a step started has ended."""

    run: UUID
    state: RunState
    output: Any = None
    error: str = ""
    trigger: Trigger | None = None


class ApprovalDecided(msgspec.Struct, frozen=True):
    """The outcome of a step's approval, including its expiry."""

    approval: UUID
    state: ApprovalState
    value: Any = None
    error: str = ""


class SagaEnded(msgspec.Struct, frozen=True):
    """Compensation has ended, completely or as far as possible."""


class TimerFired(msgspec.Struct, frozen=True):
    """A timer of a step; place -1: of the whole run."""

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
    """An entry of the run's history."""

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
    """A job to submit for a step; its id becomes `job` of the step."""

    place: int
    plan: ValidatedSubmission


class StartChildRun(msgspec.Struct, frozen=True):
    """A child run to start for a step."""

    place: int
    workflow: str
    input: dict[str, Any]


class RequestApproval(msgspec.Struct, frozen=True):
    """An approval to request; its id becomes `job` of the step."""

    place: int
    text: str


class RecordCompensation(msgspec.Struct, frozen=True):
    """A compensation to record."""

    place: int
    job: UUID
    context: Any = None
    """Input of the compensation, if its definition has one."""
    error: str = ""
    """Why the input could not be evaluated."""


class Transition(msgspec.Struct):
    """What a transaction does for one run, besides storing its status."""

    starts: list[SubmitJob] = []
    children: list[StartChildRun] = []
    stops: list[UUID] = []
    """Jobs to cancel."""
    stop_runs: list[UUID] = []
    asks: list[RequestApproval] = []
    withdrawn: list[int] = []
    """Steps whose approval is withdrawn."""
    timers: list[Timer] = []
    untimed: list[tuple[int, int]] = []
    values: list[tuple[int, Any]] = []
    undos: list[RecordCompensation] = []
    notes: list[tuple[int, str]] = []
    happened: list[HistoryEvent] = []
    output: Any = None
