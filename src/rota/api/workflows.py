"""Workflows and runs as people and programs see them. No I/O."""

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
    """False: the latest version says the same."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run is given."""

    input: dict[str, Any] = {}
    version: int = 0
    """Of the definition; 0: the latest."""
    key: str = ""
    """Two runs of one key are one run."""


class RunChangeResult(msgspec.Struct, frozen=True):
    run: RunId
    state: RunState
    changed: bool
    """False: it had ended before."""


class RollbackResult(msgspec.Struct, frozen=True):
    run: RunId
    entries: int
    """Jobs that are being undone."""


class RerunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step: str


class RunStartResult(msgspec.Struct, frozen=True):
    run: RunId
    version: int
    already: bool = False
    """Whether it was there before, under the same key."""


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
    """What undoes a job, and what has become of it."""

    job: UUID
    step: str
    state: str
    attempt: int
    undo: UUID | None = None
    error: str | None = None


class SagaView(msgspec.Struct, frozen=True):
    """What a run, or jobs that name the same `workflow_id`, have to undo; the last recorded first."""

    state: str
    reason: str | None
    entries: list[SagaEntryView]
