"""Whether a booking fits its five levels, and which limit says no: decided here, asked by explain and by the tests.

The same decision is made by `rota.ledger_fit` in PostgreSQL and by the booking script in Redis, next to the counters
they protect; property tests hold them to this one.

What a limit means:

| limit | missing | below 0 | 0 | above 0 |
|---|---|---|---|---|
| burst of a subscription, cores | refuses | refuses | refuses | at most this |
| burst of a subscription, GPUs | unlimited | unlimited | refuses | at most this |
| caps of folder, job, layer, point | unlimited | unlimited | unlimited | at most this |

Reaching a limit exactly fits. What is not asked for is not checked: frames without GPUs pass a GPU cap that is used
up. Cores are checked at every level before GPUs are, from the subscription to the point; the first that says no is
named. A limit may lie below what is booked already; then nothing is added until enough was released.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec


class Level(StrEnum):
    """Where a booking is counted, by the name of the thing in words; in the order of the checks."""

    SUBSCRIPTION = "subscription"
    FOLDER = "folder"
    JOB = "job"
    LAYER = "layer"
    POINT = "point"


class Resource(StrEnum):
    """What is counted: cores in hundredths, GPUs by the piece."""

    CORES = "cores"
    GPUS = "gpus"


LEVELS: Final = tuple(Level)
RESOURCES: Final = tuple(Resource)


class Ask(msgspec.Struct, frozen=True):
    """What one frame asks for."""

    cores: int
    gpus: int = 0

    def of(self, resource: Resource) -> int:
        return self.cores if resource is Resource.CORES else self.gpus


class Usage(msgspec.Struct, frozen=True):
    """What is booked at one level."""

    cores: int = 0
    gpus: int = 0

    def of(self, resource: Resource) -> int:
        return self.cores if resource is Resource.CORES else self.gpus

    def plus(self, ask: Ask, times: int = 1) -> Usage:
        return Usage(self.cores + times * ask.cores, self.gpus + times * ask.gpus)


class Limit(msgspec.Struct, frozen=True):
    """The limits of one level as stored; None where nothing is stored. Those of a subscription are its bursts."""

    cores: int | None = None
    gpus: int | None = None

    def of(self, resource: Resource) -> int | None:
        return self.cores if resource is Resource.CORES else self.gpus


class LevelStatus(msgspec.Struct, frozen=True):
    """One level as it stands."""

    limit: Limit = Limit()
    usage: Usage = Usage()


class Refusal(msgspec.Struct, frozen=True):
    """What said no: booked so far, the limit, and what the refused frame asked for on top."""

    table: Level
    resource: Resource
    current: int
    limit: int
    asked: int


class Fit(msgspec.Struct, frozen=True):
    """How many frames fit, and what refuses the next one; None when all do."""

    count: int
    refusal: Refusal | None = None


def effective_limit(level: Level, resource: Resource, limit: Limit) -> int | None:
    """The limit in force; None when there is none."""
    stored = limit.of(resource)
    if level is not Level.SUBSCRIPTION:
        return stored if stored is not None and stored > 0 else None
    if resource is Resource.CORES:
        return stored if stored is not None else 0
    return stored if stored is not None and stored >= 0 else None


def fits(standings: Mapping[Level, LevelStatus], ask: Ask, wanted: int) -> Fit:
    """How many of `wanted` equal frames may be booked, by one division per limit. Levels left out have no limits."""
    assert wanted >= 0, "a number of frames is never negative"
    assert min(ask.cores, ask.gpus) >= 0, "an ask is never negative"
    count, refusing = wanted, None
    for resource in RESOURCES:
        for level in LEVELS:
            room = _headroom(standings.get(level, LevelStatus()), level, resource, ask)
            if room is not None and room < count:
                count, refusing = room, (level, resource)
    return Fit(count, _refusal(standings, ask, count, *refusing) if refusing else None)


def _headroom(standing: LevelStatus, level: Level, resource: Resource, ask: Ask) -> int | None:
    """For how many more frames this limit has room; None when it does not matter."""
    limit = effective_limit(level, resource, standing.limit)
    if limit is None or ask.of(resource) == 0:
        return None
    return max(0, (limit - standing.usage.of(resource)) // ask.of(resource))


def _refusal(standings: Mapping[Level, LevelStatus], ask: Ask, count: int, level: Level, resource: Resource) -> Refusal:
    standing = standings.get(level, LevelStatus())
    limit = effective_limit(level, resource, standing.limit)
    assert limit is not None, "what is unlimited refuses nothing"
    return Refusal(level, resource, standing.usage.plus(ask, count).of(resource), limit, ask.of(resource))
