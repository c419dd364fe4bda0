"""Whether a booking fits the limits of its five levels, and which limit refuses it. Used by explain and by tests.

`rota.ledger_fit` in PostgreSQL and the booking script in Redis make the same decision next to the counters they
protect; property tests compare them with this module.

How a stored limit is interpreted:

| limit | missing | below 0 | 0 | above 0 |
|---|---|---|---|---|
| burst of a subscription, cores | refuses | refuses | refuses | at most this |
| burst of a subscription, GPUs | unlimited | unlimited | refuses | at most this |
| caps of folder, job, layer, point | unlimited | unlimited | unlimited | at most this |

Reaching a limit exactly fits. A resource that is not requested is not checked: frames without GPUs pass an exhausted
GPU cap. Cores are checked at every level before GPUs, in the order subscription to point; the first limit that refuses
is reported. A limit may be below current usage; then nothing is booked until enough is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec


class Level(StrEnum):
    """Where a booking is counted, in the order of the checks."""

    SUBSCRIPTION = "subscription"
    FOLDER = "folder"
    JOB = "job"
    LAYER = "layer"
    POINT = "point"


class Resource(StrEnum):
    """What is counted: cores in hundredths, GPUs as whole devices."""

    CORES = "cores"
    GPUS = "gpus"


LEVELS: Final = tuple(Level)
RESOURCES: Final = tuple(Resource)


class Ask(msgspec.Struct, frozen=True):
    """The resources one frame requests."""

    cores: int
    gpus: int = 0

    def of(self, resource: Resource) -> int:
        return self.cores if resource is Resource.CORES else self.gpus


class Usage(msgspec.Struct, frozen=True):
    """The resources booked at one level."""

    cores: int = 0
    gpus: int = 0

    def of(self, resource: Resource) -> int:
        return self.cores if resource is Resource.CORES else self.gpus

    def plus(self, ask: Ask, times: int = 1) -> Usage:
        return Usage(self.cores + times * ask.cores, self.gpus + times * ask.gpus)


class Limit(msgspec.Struct, frozen=True):
    """The stored limits of one level; None where nothing is stored. For a subscription these are its bursts."""

    cores: int | None = None
    gpus: int | None = None

    def of(self, resource: Resource) -> int | None:
        return self.cores if resource is Resource.CORES else self.gpus


class LevelStatus(msgspec.Struct, frozen=True):
    """Limits and usage of one level."""

    limit: Limit = Limit()
    usage: Usage = Usage()


class Refusal(msgspec.Struct, frozen=True):
    """The limit that refused a frame: current usage, the limit, and the amount the frame requested on top."""

    table: Level
    resource: Resource
    current: int
    limit: int
    asked: int


class Fit(msgspec.Struct, frozen=True):
    """How many frames fit, and the refusal of the next one; None if all fit."""

    count: int
    refusal: Refusal | None = None


def effective_limit(level: Level, resource: Resource, limit: Limit) -> int | None:
    """The limit in force; None if unlimited."""
    stored = limit.of(resource)
    if level is not Level.SUBSCRIPTION:
        return stored if stored is not None and stored > 0 else None
    if resource is Resource.CORES:
        return stored if stored is not None else 0
    return stored if stored is not None and stored >= 0 else None


def fits(levels: Mapping[Level, LevelStatus], ask: Ask, requested: int) -> Fit:
    """How many of `requested` equal frames may be booked, with one division per limit. Missing levels are unlimited."""
    assert requested >= 0, "a number of frames is never negative"
    assert min(ask.cores, ask.gpus) >= 0, "an ask is never negative"
    count, refusing = requested, None
    for resource in RESOURCES:
        for level in LEVELS:
            headroom = _headroom(levels.get(level, LevelStatus()), level, resource, ask)
            if headroom is not None and headroom < count:
                count, refusing = headroom, (level, resource)
    return Fit(count, _refusal(levels, ask, count, *refusing) if refusing else None)


def _headroom(status: LevelStatus, level: Level, resource: Resource, ask: Ask) -> int | None:
    """How many more frames this limit allows; None if it does not apply."""
    limit = effective_limit(level, resource, status.limit)
    if limit is None or ask.of(resource) == 0:
        return None
    return max(0, (limit - status.usage.of(resource)) // ask.of(resource))


def _refusal(levels: Mapping[Level, LevelStatus], ask: Ask, count: int, level: Level, resource: Resource) -> Refusal:
    status = levels.get(level, LevelStatus())
    limit = effective_limit(level, resource, status.limit)
    assert limit is not None, "an unlimited level cannot refuse"
    return Refusal(level, resource, status.usage.plus(ask, count).of(resource), limit, ask.of(resource))
