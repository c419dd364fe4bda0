"""What an explanation is made of. No I/O.

Cores are in cores, for people. Lists are bounded: where there are more, the greatest or the first are told.
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
from rota.placement import ExcludedWorker

HOLDERS_MAX: Final = 5
RUNNING_MAX: Final = 20
LAYERS_MAX: Final = 20
"""Layers that are looked into; of the others only their counts are told."""

RefuserKind = Literal["pool", "show", "subscription", "folder", "dept", "job", "layer", "queue", "policy", "server"]


class Refuser(msgspec.Struct, frozen=True):
    """Who says no, by name; a subscription goes by its pool."""

    kind: RefuserKind
    name: str


class LimitAmounts(msgspec.Struct, frozen=True):
    """`have` is in use now, one more frame or job takes `need`, and together they must not pass `limit`."""

    resource: Literal["cores", "gpus", "jobs"]
    have: float
    need: float
    limit: float


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who uses what is missing."""

    kind: Literal["job", "layer", "show"]
    id: UUID
    name: str
    frames: int = 0
    cores: float = 0.0
    gpus: int = 0


class BlockingJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that must end first; one of another show goes by its id."""

    id: JobId
    name: str
    state: JobState
    reason: str | None
    if_failed: AfterFailed
    """What becomes of the one that waits, unless this one succeeds."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that stands in the way."""

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
    """Workers of its pools that were looked at."""
    passed: tuple[ExcludedWorker, ...] = ()
    """Those of them that get nothing of it, and why."""
    next_at: datetime | None = None
    """When it is tried again, where that is known."""
    next_try: str = ""


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """What goes first. `ahead` is in the layer's own queue, None where it is too far away to be counted."""

    ahead: int | None = None
    queues_before: int = 0
    frames_before: int = 0
    """Of other queues whose turn comes first."""


class StartEstimate(msgspec.Struct, frozen=True):
    """In how many seconds the next frame starts; None where nobody can know. `basis` says why."""

    in_s: float | None
    basis: str


class WaitingLayerView(msgspec.Struct, frozen=True, kw_only=True):
    """A layer with frames that wait."""

    id: LayerId
    name: str
    queue: str
    counts: dict[FrameState, int]
    waiting: int
    deferred: int = 0
    """Of those waiting: their time has not come."""
    parked: int = 0
    """Of its job: put aside until there is room for the job again."""
    starts: int = 0
    """Frames that dispatch would start now, if it were their turn."""
    refused_by: Reason | None = None
    """With which word dispatch refuses the next frame; None: it does not, or it does not come to that."""
    reasons: tuple[Cause, ...] = ()
    position: QueuePosition = QueuePosition()
    start: StartEstimate = StartEstimate(None, "")


class RunningFramesView(msgspec.Struct, frozen=True, kw_only=True):
    """Frames of a layer on one worker."""

    layer: str
    worker: str
    frames: int
    since: datetime
    """When the first of them was booked."""


class FrameFailureView(msgspec.Struct, frozen=True, kw_only=True):
    """The frame of a job that failed first."""

    layer: str
    frame: int
    """Its number as it was submitted."""
    attempt: int
    state: str
    code: str | None
    error: str | None
    worker: str | None
    at: datetime


class JobExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is not running, or what became of it."""

    job: JobId
    name: str
    show: str
    state: JobState
    reason: str | None
    sentence: str
    """The answer in one sentence."""
    waiting: int
    on_workers: int
    reasons: tuple[Cause, ...] = ()
    """Of the job and of all its layers; what is to be mended first comes first."""
    layers: tuple[WaitingLayerView, ...] = ()
    running: tuple[RunningFramesView, ...] = ()
    first_failure: FrameFailureView | None = None
    deadline_at: datetime | None = None
    wait_until: datetime | None = None
    known_by: Literal["server", "postgres"] = "server"
    not_known: str = ""
    """What whoever answered could not see."""
