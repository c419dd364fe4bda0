"""The clock of the Redis server, as this process knows it.

Replicas agree on time by asking one server. Asking costs a round trip, so the answer is kept for `cache_s` and carried
forward by this machine's monotonic clock. The server is taken to have read its clock half-way through the round trip.

Within one object time never goes back: when the server's clock does, ours stands still until the server has caught up.
While Redis is away the last answer is carried on, and `age_s` says how old it is; only an object that never reached
Redis raises `RedisUnavailable`. If this machine sleeps, its monotonic clock stands still too, and time is late until
the next refresh; whoever decides by this clock lets a script check again with the server's own.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import redis.asyncio
import structlog

from rota.infra.clock import Clock
from rota.infra.redis.failures import translate_errors
from rota.model.errors import RedisUnavailable

log = structlog.get_logger(__name__)

REFRESH_RETRY_S: Final = 1.0
"""How long a failed refresh is not repeated, so that an absent Redis does not make every caller wait."""
CLOCK_STEP_WARN_MS: Final = 1000
"""A server whose clock went back by more than this is worth a warning; less is measuring noise."""


class _ClockSample(msgspec.Struct, frozen=True):
    server_ms: float
    at_s: float


class RedisServerTime:
    """`await server_time.now_ms()`; one object per client, shared by all who use it."""

    def __init__(self, client: redis.asyncio.Redis, clock: Clock, cache_s: float = 10.0) -> None:
        self._client = client
        self._clock = clock
        self._cache_s = cache_s
        self._sample: _ClockSample | None = None
        self._next_refresh_s = clock.monotonic()
        self._latest_ms = 0
        self._refreshing = asyncio.Lock()

    async def now_ms(self) -> int:
        """Milliseconds since 1970 on the server's clock; never less than a call before."""
        # Whoever already has a sample does not wait for somebody else's refresh.
        if self._is_due() and not (self._sample and self._refreshing.locked()):
            async with self._refreshing:
                if self._is_due():
                    await self._refresh()
        return self._advance()

    def age_s(self) -> float:
        """Seconds since the server was last heard; infinite before the first time."""
        return self._clock.monotonic() - self._sample.at_s if self._sample else float("inf")

    def _is_due(self) -> bool:
        return self._clock.monotonic() >= self._next_refresh_s

    async def _refresh(self) -> None:
        try:
            sample = await self._read_server_clock()
        except RedisUnavailable as away:
            if self._sample is None:
                raise
            self._next_refresh_s = self._clock.monotonic() + REFRESH_RETRY_S
            log.warning("server_time_stale", age_s=round(self.age_s(), 3), why=away.sentence)
            return
        self._warn_of_step(sample)
        self._sample = sample
        self._next_refresh_s = sample.at_s + self._cache_s

    async def _read_server_clock(self) -> _ClockSample:
        sent_s = self._clock.monotonic()
        with translate_errors(self._client):
            seconds, micros = await self._client.time()
        return _ClockSample(seconds * 1000 + micros / 1000, (sent_s + self._clock.monotonic()) / 2)

    def _warn_of_step(self, sample: _ClockSample) -> None:
        if self._sample is None:
            return
        back_ms = self._extrapolate_ms(self._sample, sample.at_s) - sample.server_ms
        if back_ms > CLOCK_STEP_WARN_MS:
            log.warning("server_time_went_back", by_ms=round(back_ms))

    def _advance(self) -> int:
        assert self._sample is not None
        carried = int(self._extrapolate_ms(self._sample, self._clock.monotonic()))
        self._latest_ms = max(self._latest_ms, carried)
        return self._latest_ms

    def _extrapolate_ms(self, sample: _ClockSample, at_s: float) -> float:
        return sample.server_ms + (at_s - sample.at_s) * 1000
