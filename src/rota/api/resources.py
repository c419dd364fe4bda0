"""Shows, subscriptions, pools, workers and queues, and requests that change them. No I/O.

Cores are whole cores. A cap of -1 means no cap. Fields omitted from a change stay unchanged.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec

Cores = int | float
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Tag = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[^\s\x00]+$")]


class ShowView(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    managed: bool
    """Whether its accounts are in Redis; otherwise in PostgreSQL."""
    max_jobs: int = -1
    """Limit of concurrent jobs."""


class SubscriptionView(msgspec.Struct, frozen=True, kw_only=True):
    """A show's share of a pool."""

    pool: str
    size: float
    """Guaranteed cores, and its weight where shows compete."""
    burst: float
    """Hard cap of its usage."""
    gpu_burst: int = -1
    used_cores: float = 0
    used_gpus: int = 0


class CapsView(msgspec.Struct, frozen=True, kw_only=True):
    """A folder or a department of a show."""

    name: str
    min_cores: float = 0
    max_cores: float = -1
    min_gpus: int = 0
    max_gpus: int = -1
    used_cores: float = 0
    used_gpus: int = 0


class ShowQuotaView(msgspec.Struct, frozen=True, kw_only=True):
    show: ShowView
    subscriptions: list[SubscriptionView]
    folders: list[CapsView]
    departments: list[CapsView]
    is_old: bool = False
    """Redis is unavailable: usage is as of the last reconciliation."""


PlacementName = Literal["fit", "spread", "pack"]


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    status: Literal["active", "draining", "inactive"] = "active"
    provides: tuple[str, ...] = ()
    description: str = ""
    placement: PlacementName = "fit"
    """Which of the workers with room gets a frame: the least used, that with the fewest frames, or the most used."""


class TopicView(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    pools: tuple[str, ...]
    """In order of preference: a frame runs in the first that can run it."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    pool: str
    state: Literal["up", "gone", "lost"]
    up_at: datetime
    ended_at: datetime | None = None
    slots: int
    cores: float
    gpus: int
    memory_mb: int
    labels: dict[str, str] = {}
    tasks: tuple[str, ...] = ()
    frames: int
    """Frames on it now."""
    used_cores: float
    used_gpus: int
    jobs: int


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """Frame counts; ended frames include pruned ones."""

    queue: str
    show: str | None = None
    topic: str | None = None
    paused: bool = False
    waiting: int = 0
    running: int = 0
    deferred: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    dead: int = 0


class ChangeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a change of a named object."""

    name: str
    changed: bool
    """False: it was in that state already."""


class NamedResource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: _Name


class ShowSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: _Name
    managed: bool = False


class ShowChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one field per request."""

    name: _Name | None = None
    managed: bool | None = None
    max_jobs: int | None = None


class CapsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: _Name
    min_cores: Cores | None = None
    max_cores: Cores | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None


class CapsChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_cores: Cores | None = None
    max_cores: Cores | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None


class JobCapsChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Caps of a job, or of one of its layers."""

    layer: str | None = None
    max_cores: Cores | None = None
    max_gpus: int | None = None


class SubscriptionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pool: _Name
    size: Cores
    burst: Cores
    gpu_burst: int = -1


class SubscriptionChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: Cores | None = None
    burst: Cores | None = None
    gpu_burst: int | None = None


class PoolChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provides: Annotated[tuple[_Tag, ...], msgspec.Meta(max_length=64)] | None = None
    description: Annotated[str, msgspec.Meta(max_length=1000, pattern=r"^[^\x00]*$")] | None = None
    placement: PlacementName | None = None


class DrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout_s: int = 300


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pools: tuple[_Name, ...]
