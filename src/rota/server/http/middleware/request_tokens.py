"""Requests per second of each key: one token bucket for all servers, in Redis.

A server leases tokens in blocks and spends them on its own, so a busy key costs one round trip per block and not per
request. Leased tokens count as spent: all servers together admit at most `burst + rate * t` requests in `t` seconds,
plus those whose tokens were leased up to `LEASE_S` before. A refusal is remembered for at least `BLOCK_S`, so that a
client that ignores it does not reach Redis either.

While Redis is unavailable, requests are neither refused for that reason nor unlimited:

- Redis fails, or does not answer within `LEASE_TIMEOUT_S`: each server uses its share, buckets of its own with the rate
  and burst divided by the number of live servers;
- it is still away: one request every `RETRY_INTERVAL_S` tries it; all others use the share without waiting;
- it returns: servers lease again; if it returns empty, buckets are full, and a burst may be repeated once.

If a server dies, the tokens that it leased are lost; the bucket refills.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil
from typing import Final

import msgspec
import structlog
from redis.asyncio import Redis

from rota.infra.clock import Clock, SystemClock
from rota.infra.redis import RedisKeys, script
from rota.infra.telemetry import metrics
from rota.model.errors import RateLimited, RotaError

log = structlog.get_logger(__name__)
LEASE_S: Final = 1.0
BLOCK_S: Final = 0.05
"""A block holds the tokens of this time, at least one."""
LEASE_TIMEOUT_S: Final = 0.25
RETRY_INTERVAL_S: Final = 1.0
KEYS_MAX: Final = 4096
"""Keys whose state is kept; beyond that, idle ones are dropped."""

SHARED = metrics.gauge(
    "rota_http_rate_limit_shared",
    "1: the request limits of keys cover all servers; 0: Redis is unavailable, and each server uses its share.",
)


class LeasedTokens(msgspec.Struct, frozen=True, tag="leased"):
    tokens: int
    wait_ms: int


LEASE = script(__package__, "request_tokens", replies=LeasedTokens)


class TokenBuckets:
    """Token buckets of this process. Full ones carry no information and are dropped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tokens left per key, and the time of that count."""

    def take(self, key: str, rate: float, burst: float) -> float:
        """Take a token; returns 0, or the seconds until there is one."""
        now_s = self._clock.monotonic()
        tokens, at_s = self._buckets.get(key, (burst, now_s))
        left = min(burst, tokens + (now_s - at_s) * rate)
        if left < 1.0:
            return (1.0 - left) / rate
        if len(self._buckets) >= KEYS_MAX:
            self._drop_full(now_s, rate, burst)
        self._buckets[key] = (left - 1.0, now_s)
        return 0.0

    def _drop_full(self, now_s: float, rate: float, burst: float) -> None:
        self._buckets = {
            key: (left, at_s) for key, (left, at_s) in self._buckets.items() if left + (now_s - at_s) * rate < burst
        }


class KeyTokens:
    """The leased tokens of one key, or its refusal."""

    def __init__(self) -> None:
        self.left = 0
        self.until_s = 0.0
        """End of the lease."""
        self.refused_until_s = 0.0
        self.waiting = 0
        """Requests that wait for a lease."""
        self.lease_lock = asyncio.Lock()

    def spend(self, now_s: float) -> bool:
        if self.left < 1 or now_s >= self.until_s:
            return False
        self.left -= 1
        return True


class RequestTokens:
    """`rate` requests a second and bursts of `burst` per key, over all of `servers()` servers."""

    def __init__(
        self,
        client: Redis,
        rate: float,
        burst: int,
        servers: Callable[[], int],
        *,
        keys: RedisKeys | None = None,
        clock: Clock | None = None,
    ) -> None:
        assert rate > 0, "no limit needs no tokens"
        self._client = client
        self._rate = float(rate)
        self._burst = float(max(burst, 1))
        self._servers = servers
        self._names = keys or RedisKeys()
        self._clock = clock or SystemClock()
        self._by_key: dict[str, KeyTokens] = {}
        self._own_buckets: TokenBuckets | None = None
        """Used while Redis is away."""
        self._retry_at_s = 0.0
        SHARED.set(1)

    async def take(self, key: str) -> None:
        """Take a token for one request. Raises RateLimited, with the time to retry, when the key has none left."""
        tokens = self._tokens_of(key)
        if tokens.spend(self._clock.monotonic()):
            return
        if not self._asks_redis():
            self._take_own(key)
            return
        tokens.waiting += 1
        try:
            async with tokens.lease_lock:
                if not tokens.spend(self._clock.monotonic()):
                    await self._lease(key, tokens)
        finally:
            tokens.waiting -= 1

    async def _lease(self, key: str, tokens: KeyTokens) -> None:
        now_s = self._clock.monotonic()
        if now_s < tokens.refused_until_s:
            raise self._refusal(tokens.refused_until_s - now_s)
        want = min(int(self._burst), max(tokens.waiting, int(self._rate * BLOCK_S)))
        bucket = self._names.request_tokens(key)
        try:
            async with asyncio.timeout(LEASE_TIMEOUT_S):
                leased = await LEASE(self._client, bucket=bucket, rate=self._rate, burst=self._burst, want=want)
        except (RotaError, OSError) as error:
            self._fall_back(str(error) or "no answer in time")
            self._take_own(key)
            return
        self._resume()
        now_s = self._clock.monotonic()
        if not leased.tokens:
            tokens.refused_until_s = now_s + max(BLOCK_S, leased.wait_ms / 1000)
            raise self._refusal(leased.wait_ms / 1000)
        tokens.left, tokens.until_s = leased.tokens - 1, now_s + LEASE_S

    def _asks_redis(self) -> bool:
        """Whether this request may wait for Redis; while it is away, one every `RETRY_INTERVAL_S`."""
        if self._own_buckets is None:
            return True
        now_s = self._clock.monotonic()
        if now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + RETRY_INTERVAL_S
        return True

    def _take_own(self, key: str) -> None:
        if self._own_buckets is None:
            self._own_buckets = TokenBuckets(self._clock)
        servers = max(1, self._servers())
        wait_s = self._own_buckets.take(key, self._rate / servers, max(1.0, self._burst / servers))
        if wait_s:
            raise self._refusal(wait_s)

    def _fall_back(self, why: str) -> None:
        self._retry_at_s = self._clock.monotonic() + RETRY_INTERVAL_S
        if self._own_buckets is None:
            self._own_buckets = TokenBuckets(self._clock)
            SHARED.set(0)
            log.warning("rate_limit_fallback_started", servers=self._servers(), why=why)

    def _resume(self) -> None:
        if self._own_buckets is not None:
            self._own_buckets = None
            SHARED.set(1)
            log.info("rate_limit_fallback_ended")

    def _tokens_of(self, key: str) -> KeyTokens:
        tokens = self._by_key.get(key)
        if tokens is None:
            if len(self._by_key) >= KEYS_MAX:
                self._drop_idle()
            tokens = self._by_key[key] = KeyTokens()
        return tokens

    def _drop_idle(self) -> None:
        now_s = self._clock.monotonic()
        self._by_key = {
            key: tokens
            for key, tokens in self._by_key.items()
            if tokens.waiting or now_s < max(tokens.until_s, tokens.refused_until_s)
        }

    def _refusal(self, wait_s: float) -> RateLimited:
        seconds = max(1, ceil(wait_s))
        return RateLimited(
            f"This key has sent more than {self._rate:g} requests a second: try again in {seconds} s, or send many jobs"
            " in one request.",
            retry_after_s=seconds,
        )
