"""Which pools may run a topic, and in which order. Pure.

- An exact topic wins over globs (`*` matches any text), the glob with the most literal characters over other globs.
- Pools of a topic are used in order: a later one only when the earlier ones are full or without workers.
- A pool provides capabilities; a job that requires others does not run there.
- A draining or inactive pool takes no new frames. A draining one counts as inactive after its timeout.
- If no topic is configured at all, every topic maps to the pool `local`, if it exists: `rota up` creates it. The first
  configured topic ends that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from rota.model.ids import PoolId

DEFAULT_POOL: Final = "local"
ANY_TOPIC: Final = "*"
DRAIN_TIMEOUT_S: Final = 300
DRAIN_TIMEOUT_MAX_S: Final = 3600


class PoolStatus(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    INACTIVE = "inactive"


class PlacementPolicy(StrEnum):
    """Which of the workers with free resources gets a frame."""

    FIT = "fit"
    """The one that is used least, by the part of its scarcest resource; machines with GPUs last for frames without."""
    SPREAD = "spread"
    """The one with the fewest frames and the lowest load."""
    PACK = "pack"
    """The one that is used most, so that others stay empty."""


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a pool. `provides` is sorted, lower case."""

    name: str
    provides: tuple[str, ...] = ()
    status: PoolStatus = PoolStatus.ACTIVE
    description: str = ""
    drain_started_ms: int | None = None
    drain_timeout_s: int = DRAIN_TIMEOUT_S
    placement: PlacementPolicy = PlacementPolicy.FIT

    def status_at(self, now_ms: int) -> PoolStatus:
        """The status at a time: a drain past its timeout counts as inactive."""
        if self.status is not PoolStatus.DRAINING or self.drain_started_ms is None:
            return self.status
        over = now_ms >= self.drain_started_ms + self.drain_timeout_s * 1000
        return PoolStatus.INACTIVE if over else PoolStatus.DRAINING


class Pool(msgspec.Struct, frozen=True):
    """A pool of accounting with its configuration."""

    id: PoolId
    spec: PoolSpec

    @property
    def name(self) -> str:
        return self.spec.name

    def satisfies(self, requires: tuple[str, ...]) -> bool:
        return set(requires) <= set(self.spec.provides)


class Routes(msgspec.Struct, frozen=True):
    """The whole configuration, from one read. Topics name only existing pools."""

    topics: Mapping[str, tuple[str, ...]] = {}
    pools: Mapping[str, Pool] = {}

    @property
    def uses_default_pool(self) -> bool:
        """Whether nothing is configured, and all topics go to the pool `local`."""
        return not self.topics and DEFAULT_POOL in self.pools

    def pattern_for(self, topic: str) -> str | None:
        """The topic or glob that applies to `topic`."""
        if topic in self.topics:
            return topic
        if self.uses_default_pool:
            return ANY_TOPIC
        globs = [pattern for pattern in self.topics if ANY_TOPIC in pattern and matches(pattern, topic)]
        return max(globs, key=specificity, default=None)

    def pools_for(self, topic: str) -> tuple[Pool, ...]:
        """Pools in the order of use; empty when the topic is not mapped."""
        pattern = self.pattern_for(topic)
        if pattern is None:
            return ()
        names = self.topics.get(pattern, (DEFAULT_POOL,))
        return tuple(self.pools[name] for name in names if name in self.pools)


def matches(pattern: str, topic: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), topic, re.DOTALL) is not None


def specificity(pattern: str) -> tuple[int, int, str]:
    """Sort key of globs: literal characters, then fewer stars, then the alphabet, so that replicas agree."""
    stars = pattern.count("*")
    return len(pattern) - stars, -stars, pattern
