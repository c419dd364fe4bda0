"""Velocity limits: how many jobs within how much time, counted in Redis for all who decide.

A limit lets `most` jobs through in any span of its window, by the clock of Redis. Each job is counted once, by its id:
asked about again within the window, it has its place still, so a lost reply or a second question costs nothing. A job
for which a limit has no place takes none of another, and comes again as the rule says.

The places of a limit are kept by rule and by what it counts by, so reading the policy anew forgets none. If Redis loses
them, as many may pass once more. While Redis does not answer nothing is let through: what would have been counted is
throttled (`Unavailable` is the caller's to know; see `rota.policy.kernel`).
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
"""Jobs of one script."""


class VelocityReply(msgspec.Struct, frozen=True, tag="counted"):
    over: tuple[int, ...]


COUNT = script(__package__, "velocity", replies=VelocityReply)


class VelocityCheck(msgspec.Struct, frozen=True):
    """Jobs that are counted under the same limits, which are in the order in which they speak."""

    limits: tuple[VelocityLimit, ...]
    jobs: tuple[JobId, ...]


class VelocityCounter:
    def __init__(self, client: Redis, keys: RedisKeys) -> None:
        self._client = client
        self._keys = keys

    async def find_exceeded(self, wanted: Sequence[VelocityCheck]) -> list[list[VelocityLimit | None]]:
        """For each job the limit that has no place for it; None: it has its places. Raises RedisUnavailable."""
        found: list[list[VelocityLimit | None]] = [[] for _ in wanted]
        for batch in _batches(wanted):
            windows: dict[str, int] = {}
            asked = [
                [[self._pack_limit(limit, windows) for limit in wanted[at].limits], [job.hex for job in jobs]]
                for at, jobs in batch
            ]
            counted = await COUNT(self._client, windows=list(windows), asked=asked)
            failpoints.after_send("velocity.counted")
            told = iter(counted.over)
            for at, jobs in batch:
                limits = wanted[at].limits
                found[at] += [limits[place - 1] if (place := next(told)) else None for _ in jobs]
        return found

    def _pack_limit(self, limit: VelocityLimit, windows: dict[str, int]) -> list[int]:
        window = self._keys.velocity(_window_name(limit))
        place = windows.setdefault(window, len(windows) + 1)
        return [place, limit.velocity.most, int(limit.velocity.window_s * 1000)]


def _window_name(limit: VelocityLimit) -> str:
    """Values are of any length and may be private; a key of Redis is neither."""
    return hashlib.sha256(f"{limit.rule}\0{limit.value}".encode()).hexdigest()[:32]


def _batches(wanted: Sequence[VelocityCheck]) -> list[list[tuple[int, tuple[JobId, ...]]]]:
    """Parts of `BATCH` jobs at most, each with the place of its question."""
    batches: list[list[tuple[int, tuple[JobId, ...]]]] = [[]]
    room = BATCH_MAX
    for at, each in enumerate(wanted):
        for begin in range(0, len(each.jobs), BATCH_MAX):
            part = each.jobs[begin : begin + BATCH_MAX]
            if len(part) > room:
                batches.append([])
                room = BATCH_MAX
            batches[-1].append((at, part))
            room -= len(part)
    return [batch for batch in batches if batch]
