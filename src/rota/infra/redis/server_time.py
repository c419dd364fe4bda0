"""The clock of the Redis server, as known to this process.

Replicas agree on time by reading one server's clock. A read costs a round trip, so the reading is cached for `cache_s`
and extrapolated with the local monotonic clock. The server is assumed to read its clock half-way through the round
trip.

Within one object time never goes backwards: when the server's clock does, `now_ms` stands still until the server has
caught up. While Redis is unavailable the last reading is extrapolated and `age_s` gives its age; only an object that
never reached Redis raises `RedisUnavailable`. If this machine suspends, its monotonic clock may stop and the time lags
until the next refresh; decisions based on this clock are therefore re-checked in a script with the server's own.
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
"""Delay after a failed refresh, so that an unavailable Redis does not block every caller."""
CLOCK_STEP_WARN_MS: Final = 1000
"""Log a warning when the server's clock goes back by more than this; less is measurement noise."""


class _ClockSample(msgspec.Struct, frozen=True):
    server_ms: float
    at_s: float


class RedisServerTime:
    """`await server_time.now_ms()`; one object per client, shared by all callers."""

    def __init__(self, client: redis.asyncio.Redis, clock: Clock, cache_s: float = 10.0) -> None:
        self._client = client
        self._clock = clock
        self._cache_s = cache_s
        self._sample: _ClockSample | None = None
        self._next_refresh_s = clock.monotonic()
        self._latest_ms = 0
        self._refreshing = asyncio.Lock()

    async def now_ms(self) -> int:
        """Unix time of the server in milliseconds; monotonic."""
        # With a sample at hand, do not wait for a concurrent refresh.
        if self._is_due() and not (self._sample and self._refreshing.locked()):
            async with self._refreshing:
                if self._is_due():
                    await self._refresh()
        return self._advance()

    def age_s(self) -> float:
        """Seconds since the last reading of the server's clock; infinite before the first."""
        return self._clock.monotonic() - self._sample.at_s if self._sample else float("inf")

    def _is_due(self) -> bool:
        return self._clock.monotonic() >= self._next_refresh_s

    async def _refresh(self) -> None:
        try:
            sample = await self._read_server_clock()
        except RedisUnavailable as error:
            if self._sample is None:
                raise
            self._next_refresh_s = self._clock.monotonic() + REFRESH_RETRY_S
            log.warning("server_time_stale", age_s=round(self.age_s(), 3), why=error.sentence)
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
            log.warning("server_clock_went_back", by_ms=round(back_ms))

    def _advance(self) -> int:
        assert self._sample is not None
        extrapolated = int(self._extrapolate_ms(self._sample, self._clock.monotonic()))
        self._latest_ms = max(self._latest_ms, extrapolated)
        return self._latest_ms

    def _extrapolate_ms(self, sample: _ClockSample, at_s: float) -> float:
        return sample.server_ms + (at_s - sample.at_s) * 1000
