"""What a frame requires of a worker. Pure.

Frames with equal requirements (a placement class) are interchangeable for every worker, so one plan covers all of them.
Labels without a meaning for placement (a department, a ticket number) are not part of it.

| label of a job | meaning |
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


class Resources(msgspec.Struct, frozen=True, cache_hash=True):
    """What one frame uses of a worker, besides one slot. Cores in hundredths."""

    cores: int = 100
    gpus: int = 0
    memory_mb: int = 0


class PlacementRequirements(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A row of `rota.placement_class`. Create it with `requirements_of` or `from_row`: both normalize it."""

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
        """From the columns of its row."""
        return cls(
            topic=topic,
            requires=normalize_capabilities(requires),
            labels=tuple(sorted(labels.items())),
            preferred_pool=preferred_pool,
            preferred_worker=preferred_worker,
            need=Resources(cores, gpus, memory_mb),
        )

    def digest(self) -> bytes:
        """Equal for equal requirements on every machine and in every version with these fields."""
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
    """The requirements of a job's frames. Pass all labels of the job; only those listed above are used."""
    if min(cores, gpus, memory_mb) < 0:
        raise InvalidInput("A frame cannot require negative resources: give cores, gpus and memory_mb of at least 0.")
    all_labels = labels or {}
    return PlacementRequirements(
        topic=topic,
        requires=normalize_capabilities(requires),
        labels=tuple(
            sorted((key, value) for key, value in all_labels.items() if key.startswith(PLACEMENT_LABEL_PREFIXES))
        ),
        preferred_pool=all_labels.get(PREFERRED_POOL_LABEL, "").strip() or None,
        preferred_worker=all_labels.get(PREFERRED_WORKER_LABEL, "").strip() or None,
        need=Resources(cores, gpus, memory_mb),
    )


def normalize_capabilities(names: Iterable[str]) -> tuple[str, ...]:
    """Capabilities in canonical form: stripped, lower case, sorted, distinct."""
    return tuple(sorted({name.strip().lower() for name in names} - {""}))
