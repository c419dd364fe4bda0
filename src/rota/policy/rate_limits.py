"""Velocity limits: at most so many jobs per time window, counted in Redis across all kernels.

A limit admits `most` jobs in any sliding window, by the clock of Redis. Each job is counted once, by its id: a repeated
check within the window keeps its slot, so a lost reply or a retry costs nothing. A job that exceeds one limit takes no
slot of another, and is retried as the rule says.

Slots are keyed by rule and counted value, so a policy reload loses none. If Redis loses them, as many jobs may pass
once more. While Redis does not answer nothing passes: jobs that would be counted are throttled (this module raises
`Unavailable`; `rota.policy.kernel` throttles).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
from redis.asyncio import Redis

from rota.infra import failpoints
from rota.infra.redis import RedisKeys, script
from rota.model.ids import JobId
from rota.policy.evaluate import VelocityLimit

BATCH_MAX: Final = 1000
"""Jobs per script call."""


class VelocityReply(msgspec.Struct, frozen=True, tag="counted"):
    over: tuple[int, ...]


COUNT = script(__package__, "velocity", replies=VelocityReply)


class VelocityCheck(msgspec.Struct, frozen=True):
    """Jobs counted by the same limits; the first exceeded limit decides."""

    limits: tuple[VelocityLimit, ...]
    jobs: tuple[JobId, ...]


class VelocityCounter:
    def __init__(self, client: Redis, keys: RedisKeys) -> None:
        self._client = client
        self._keys = keys

    async def find_exceeded(self, checks: Sequence[VelocityCheck]) -> list[list[VelocityLimit | None]]:
        """For each job the limit that it exceeds; None: it has its slots. Raises RedisUnavailable."""
        found: list[list[VelocityLimit | None]] = [[] for _ in checks]
        for batch in _batches(checks):
            windows: dict[str, int] = {}
            packed = [
                [[self._pack_limit(limit, windows) for limit in checks[index].limits], [job.hex for job in jobs]]
                for index, jobs in batch
            ]
            counted = await COUNT(self._client, windows=list(windows), asked=packed)
            failpoints.after_send("velocity.counted")
            exceeded = iter(counted.over)
            for index, jobs in batch:
                limits = checks[index].limits
                found[index] += [limits[number - 1] if (number := next(exceeded)) else None for _ in jobs]
        return found

    def _pack_limit(self, limit: VelocityLimit, windows: dict[str, int]) -> list[int]:
        window = self._keys.velocity(_window_name(limit))
        number = windows.setdefault(window, len(windows) + 1)
        return [number, limit.velocity.most, int(limit.velocity.window_s * 1000)]


def _window_name(limit: VelocityLimit) -> str:
    """A hash, because values can be long and private, and Redis keys must be neither."""
    return hashlib.sha256(f"{limit.rule}\0{limit.value}".encode()).hexdigest()[:32]


def _batches(checks: Sequence[VelocityCheck]) -> list[list[tuple[int, tuple[JobId, ...]]]]:
    """Batches of at most `BATCH_MAX` jobs, each with the index of its check."""
    batches: list[list[tuple[int, tuple[JobId, ...]]]] = [[]]
    free = BATCH_MAX
    for index, each in enumerate(checks):
        for begin in range(0, len(each.jobs), BATCH_MAX):
            jobs = each.jobs[begin : begin + BATCH_MAX]
            if len(jobs) > free:
                batches.append([])
                free = BATCH_MAX
            batches[-1].append((index, jobs))
            free -= len(jobs)
    return [batch for batch in batches if batch]
