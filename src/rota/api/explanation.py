"""Explanations of jobs. No I/O.

Cores are whole cores. Lists are bounded: the largest or the first entries are included.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal
from uuid import UUID

import msgspec

from rota.model.ids import JobId, LayerId
from rota.model.job_states import FrameState, JobState
from rota.model.jobs.submission import AfterFailed
from rota.model.reasons import Reason, Tier

HOLDERS_MAX: Final = 5
RUNNING_MAX: Final = 20
LAYERS_MAX: Final = 20
"""Layers that are explained; others appear only in the counts."""

RefuserKind = Literal["pool", "show", "subscription", "folder", "dept", "job", "layer", "queue", "policy", "server"]


class ExcludedWorker(msgspec.Struct, frozen=True):
    """A worker that gets no such frames, and why."""

    worker: UUID
    name: str
    pool: str
    why: str


class Refuser(msgspec.Struct, frozen=True):
    """The limit or object that refuses, by name; a subscription is named as in `film in local`."""

    kind: RefuserKind
    name: str


class LimitAmounts(msgspec.Struct, frozen=True):
    """`have` is in use, one more frame or job needs `need`, and the sum must not exceed `limit`."""

    resource: Literal["cores", "gpus", "jobs"]
    have: float
    need: float
    limit: float


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A user of the resource that is missing."""

    kind: Literal["job", "layer", "show"]
    id: UUID
    name: str
    frames: int = 0
    cores: float = 0.0
    gpus: int = 0


class BlockingJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that must end first; a job of another show is named by its id."""

    id: JobId
    name: str
    state: JobState
    reason: str | None
    if_failed: AfterFailed
    """What happens to the waiting job unless this one succeeds."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause that keeps frames from starting."""

    tier: Tier
    code: Reason
    sentence: str
    remedy: str
    layer: str | None = None
    """None when it concerns the whole job."""
    refuser: Refuser | None = None
    amounts: LimitAmounts | None = None
    holders: tuple[Holder, ...] = ()
    waits_for: tuple[BlockingJob, ...] = ()
    considered: int = 0
    """Number of workers considered in its pools."""
    passed: tuple[ExcludedWorker, ...] = ()
    """Workers among them that were rejected, and why."""
    next_at: datetime | None = None
    """Time of the next try, where known."""
    next_try: str = ""


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Work that goes first. `ahead` counts the layer's own queue; None where there is too much to count."""

    ahead: int | None = None
    queues_before: int = 0
    frames_before: int = 0
    """In other queues that are dispatched first."""


class StartEstimate(msgspec.Struct, frozen=True):
    """Seconds until the next frame starts; None where unknown. `basis` gives the reason."""

    in_s: float | None
    basis: str


class WaitingLayerView(msgspec.Struct, frozen=True, kw_only=True):
    """A layer with waiting frames."""

    id: LayerId
    name: str
    queue: str
    counts: dict[FrameState, int]
    waiting: int
    deferred: int = 0
    """Waiting frames that are not due yet."""
    parked: int = 0
    """Frames of its job that are parked until the job may run more."""
    starts: int = 0
    """Frames that dispatch would start now, if they were first in order."""
    refused_by: Reason | None = None
    """The reason that refuses the next frame; None: not refused, or not checked."""
    reasons: tuple[Cause, ...] = ()
    position: QueuePosition = QueuePosition()
    start: StartEstimate = StartEstimate(None, "")


class RunningFramesView(msgspec.Struct, frozen=True, kw_only=True):
    """Frames of a layer on one worker."""

    layer: str
    worker: str
    frames: int
    since: datetime
    """Time of the first booking."""


class FrameFailureView(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a job that failed."""

    layer: str
    frame: int
    """Frame number, as submitted."""
    attempt: int
    state: str
    code: str | None
    error: str | None
    worker: str | None
    at: datetime


class JobExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is not running, or how it ended."""

    job: JobId
    name: str
    show: str
    state: JobState
    reason: str | None
    sentence: str
    """Summary in one sentence."""
    waiting: int
    on_workers: int
    reasons: tuple[Cause, ...] = ()
    """Causes of the job and all its layers; the one to fix first comes first."""
    layers: tuple[WaitingLayerView, ...] = ()
    running: tuple[RunningFramesView, ...] = ()
    first_failure: FrameFailureView | None = None
    deadline_at: datetime | None = None
    wait_until: datetime | None = None
    known_by: Literal["server", "postgres"] = "server"
    not_known: str = ""
    """What the responder could not determine."""
