"""What placement looks at in a job. Pure.

Frames whose placement class is the same are alike to every worker, so one plan speaks for all of them. Labels that say
nothing about placement (a department, a ticket number) are no part of it.

| label of a job | what it means |
|---|---|
| `preferred_pool` | only this pool, which must be mapped to the topic |
| `preferred_worker_id` | this worker first, by name or id, if it can; otherwise any |
| `placement.*`, `node.*` | the worker must have the same label with the same value |
| `constraint.*` | as above; `constraint.docker: "true"` is also met by the capability `docker` |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, Self

import msgspec

from rota.model.errors import InvalidInput

PREFERRED_POOL_LABEL: Final = "preferred_pool"
PREFERRED_WORKER_LABEL: Final = "preferred_worker_id"
CONSTRAINT_PREFIX: Final = "constraint."
PLACEMENT_LABEL_PREFIXES: Final = ("placement.", CONSTRAINT_PREFIX, "node.")


class Resources(msgspec.Struct, frozen=True):
    """What one frame takes of a worker, besides one of its places. Cores in hundredths."""

    cores: int = 100
    gpus: int = 0
    memory_mb: int = 0


class PlacementRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `rota.placement_class`. Make it with `class_of` or `stored`: both bring it into the one form."""

    topic: str
    requires: tuple[str, ...] = ()
    """Sorted, lower case."""
    labels: tuple[tuple[str, str], ...] = ()
    """Sorted by key."""
    preferred_pool: str | None = None
    preferred_worker: str | None = None
    need: Resources = Resources()

    @property
    def cores(self) -> int:
        return self.need.cores

    @property
    def gpus(self) -> int:
        return self.need.gpus

    @property
    def memory_mb(self) -> int:
        return self.need.memory_mb

    @classmethod
    def from_row(
        cls,
        *,
        topic: str,
        requires: Iterable[str],
        labels: Mapping[str, str],
        preferred_pool: str | None,
        preferred_worker: str | None,
        cores: int,
        gpus: int,
        memory_mb: int,
    ) -> Self:
        """Out of the columns of its row."""
        return cls(
            topic=topic,
            requires=normalize_capabilities(requires),
            labels=tuple(sorted(labels.items())),
            preferred_pool=preferred_pool,
            preferred_worker=preferred_worker,
            need=Resources(cores, gpus, memory_mb),
        )

    def digest(self) -> bytes:
        """The same for the same class on every machine and in every version that has these fields."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.astuple(self))).digest()


def requirements_of(
    topic: str,
    requires: Iterable[str] = (),
    labels: Mapping[str, str] | None = None,
    *,
    cores: int = 100,
    gpus: int = 0,
    memory_mb: int = 0,
) -> PlacementRequirements:
    """The class of a job's frames. All labels of the job may be given; only the hints above are taken."""
    if min(cores, gpus, memory_mb) < 0:
        raise InvalidInput("A frame cannot ask for less than nothing: give cores, gpus and memory_mb from 0 on.")
    given = labels or {}
    return PlacementRequirements(
        topic=topic,
        requires=normalize_capabilities(requires),
        labels=tuple(sorted((key, value) for key, value in given.items() if key.startswith(PLACEMENT_LABEL_PREFIXES))),
        preferred_pool=given.get(PREFERRED_POOL_LABEL, "").strip() or None,
        preferred_worker=given.get(PREFERRED_WORKER_LABEL, "").strip() or None,
        need=Resources(cores, gpus, memory_mb),
    )


def normalize_capabilities(words: Iterable[str]) -> tuple[str, ...]:
    """Capabilities in the one form in which they are compared."""
    return tuple(sorted({word.strip().lower() for word in words} - {""}))
