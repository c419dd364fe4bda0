"""Workflow definitions, runs and sagas. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from rota.model.ids import RunId, ShowId
from rota.model.workflows.run_state import HistoryEvent, RunState, StepState


class WorkflowSummary(msgspec.Struct, frozen=True):
    """A definition in a list."""

    show: str
    name: str
    version: int
    steps: int
    runs: int
    description: str = ""


class WorkflowDeclareResult(msgspec.Struct, frozen=True):
    workflow: str
    version: int
    changed: bool
    """False: the latest version is identical."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to start a run."""

    input: dict[str, Any] = {}
    version: int = 0
    """Of the definition; 0: the latest."""
    key: str = ""
    """Idempotency key: a second start with the same key returns the first run."""


class RunChangeResult(msgspec.Struct, frozen=True):
    run: RunId
    state: RunState
    changed: bool
    """False: it had ended before."""


class RollbackResult(msgspec.Struct, frozen=True):
    run: RunId
    entries: int
    """Number of jobs being undone."""


class RerunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step: str


class RunStartResult(msgspec.Struct, frozen=True):
    run: RunId
    version: int
    already: bool = False
    """Whether the run existed already under the same key."""


class WorkflowStepView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str
    state: StepState
    attempt: int
    job: UUID | None = None
    reason: str = ""
    due_at: datetime | None = None
    output: Any = None


class WorkflowRunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a list."""

    id: RunId
    show: str
    workflow: str
    version: int
    state: RunState
    error: str | None
    started_at: datetime
    ended_at: datetime | None


class WorkflowRunView(WorkflowRunSummary, frozen=True, kw_only=True):
    input: dict[str, Any]
    output: Any
    parent: RunId | None
    show_id: ShowId
    steps: list[WorkflowStepView]


class RunTimelineEntry(msgspec.Struct, frozen=True):
    at: datetime
    happened: HistoryEvent


class SagaEntryView(msgspec.Struct, frozen=True, kw_only=True):
    """A compensation: the job that it undoes, and its state."""

    job: UUID
    step: str
    state: str
    attempt: int
    undo: UUID | None = None
    error: str | None = None


class SagaView(msgspec.Struct, frozen=True):
    """Compensations of a run, or of jobs with the same `workflow_id`; last recorded first."""

    state: str
    reason: str | None
    entries: list[SagaEntryView]
