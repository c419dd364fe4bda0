"""Jobs with their layers, jobs in a list, frames on workers, and requests about a job. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from rota.model.ids import JobId, LayerId
from rota.model.job_states import FrameState, JobState
from rota.model.jobs.frame_ranges import FrameSet
from rota.model.jobs.submission import SubmissionDetails
from rota.model.jobs.work import WorkView
from rota.model.policy.decision import PolicyEffect, Remediation


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    id: LayerId
    number: int
    name: str
    queue: str
    work: WorkView
    input: bytes | None = None
    input_at: str | None = None
    frames: FrameSet
    counts: dict[FrameState, int]
    """Frames that WAIT, are booked on a worker (DISPATCHED), or have ended; states without frames are left out."""
    took_ms: int = 0


class JobHistoryEntry(msgspec.Struct, frozen=True):
    """When a job entered a state, and why."""

    state: JobState
    at: datetime
    reason: str | None = None


class PolicyDecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A policy decision about a job."""

    says: PolicyEffect
    rule: str
    """Empty: no rule matched, the default decided."""
    snapshot: str
    """Empty: the policy was unavailable (fail-open)."""
    reason: str
    constraints: dict[str, Any] = {}
    remediations: tuple[Remediation, ...] = ()


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    id: JobId
    show: str
    folder: str
    dept: str
    name: str
    topic: str
    priority: int
    state: JobState
    reason: str | None
    labels: dict[str, str]
    details: SubmissionDetails
    workflow_id: str | None
    submitted_at: datetime
    deadline_at: datetime | None
    wait_until: datetime | None
    run_at: datetime | None
    finished_at: datetime | None
    history: list[JobHistoryEntry]
    layers: list[Layer]
    policy: PolicyDecisionView | None = None
    """The latest policy decision; None: the policy was not consulted."""

    def frame_number(self, layer: LayerId, place: int) -> int:
        """The frame number, as submitted, of the frame with queue number `place` in a layer."""
        return next(each.frames.number(place) for each in self.layers if each.id == layer)


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a list."""

    id: JobId
    show: str
    name: str
    topic: str
    priority: int
    state: JobState
    reason: str | None
    labels: dict[str, str] = {}
    submitted_at: datetime
    finished_at: datetime | None
    frames: int
    succeeded: int
    ended: int


class JobPage(msgspec.Struct, frozen=True):
    items: list[JobSummary]
    next: JobId | None = None
    """Cursor of the next page: pass it as `after`. None: this was the last."""


class RunningFrameView(msgspec.Struct, frozen=True, kw_only=True):
    """A frame assigned to a worker."""

    layer: str
    frame: int
    """Its number as submitted."""
    attempt: int
    worker: str
    worker_id: UUID
    since: datetime


class CancelJobReply(msgspec.Struct, frozen=True):
    job: JobId
    state: JobState
    changed: bool
    """False if the job had already ended."""


class RemediateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    remediation: str = ""
    """The id of a suggested remediation; optional if there is only one."""
