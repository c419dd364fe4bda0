"""Limits requests per second for each key (token bucket) and requests in flight over all keys.

A request that waits for a job to end or follows events does not count as in flight; the number of these is limited
separately. All state is local to the process, so a key has its full limit at each replica. Full buckets carry no
information and are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Final

from rota.infra.clock import Clock, SystemClock
from rota.infra.telemetry import metrics
from rota.model.errors import RateLimited

REQUESTS_IN_FLIGHT = metrics.gauge("rota_http_under_way", "API requests in flight.")
REQUESTS_WAITING = metrics.gauge("rota_http_waiting", "Requests that wait for a job to end or follow events.")
BUCKETS_MAX: Final = 4096
WAITING_MAX, WAITING_PER_KEY_MAX = 4096, 1024
WAITING_RETRY_S: Final = 5


class RateLimiter:
    """`rate` requests a second and bursts of `burst` per key; `in_flight_max` over all keys. 0 means no limit."""

    def __init__(self, rate: float, burst: int, in_flight_max: int, clock: Clock | None = None) -> None:
        self._rate = rate
        self._burst = float(max(burst, 1))
        self._in_flight_max = in_flight_max
        self._clock = clock or SystemClock()
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tokens left per key, and the time of that count."""
        self._in_flight = 0
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def admit(self, key: str) -> Iterator[RequestSlot]:
        """Hold a slot for one request. Raises RateLimited, with the time to retry, when a limit is reached."""
        if self._rate:
            self._take_token(key)
        self._begin_request()
        slot = RequestSlot(self, key)
        try:
            yield slot
        finally:
            if slot.is_waiting:
                self._end_wait(key)
            else:
                self._end_request()

    def begin_wait(self, key: str) -> None:
        if self._waiting.total() >= WAITING_MAX or self._waiting[key] >= WAITING_PER_KEY_MAX:
            raise RateLimited(
                f"Too many requests wait ({self._waiting[key]} of this key, {self._waiting.total()} of all keys):"
                " close some, or try again in a few seconds.",
                retry_after_s=WAITING_RETRY_S,
            )
        self._end_request()
        self._waiting[key] += 1
        REQUESTS_WAITING.set(self._waiting.total())

    def _end_wait(self, key: str) -> None:
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
        REQUESTS_WAITING.set(self._waiting.total())

    def _begin_request(self) -> None:
        if self._in_flight_max and self._in_flight >= self._in_flight_max:
            raise RateLimited(
                f"This server is already handling {self._in_flight} requests: try again in a second.", retry_after_s=1
            )
        self._in_flight += 1
        REQUESTS_IN_FLIGHT.set(self._in_flight)

    def _end_request(self) -> None:
        self._in_flight -= 1
        REQUESTS_IN_FLIGHT.set(self._in_flight)

    def _take_token(self, key: str) -> None:
        now_s = self._clock.monotonic()
        tokens, at_s = self._buckets.get(key, (self._burst, now_s))
        remaining = min(self._burst, tokens + (now_s - at_s) * self._rate)
        if remaining < 1.0:
            wait_s = ceil((1.0 - remaining) / self._rate)
            raise RateLimited(
                f"This key has sent more than {self._rate:g} requests a second: try again in {wait_s} s, or send many"
                " jobs in one request.",
                retry_after_s=wait_s,
            )
        if len(self._buckets) >= BUCKETS_MAX:
            self._drop_full_buckets(now_s)
        self._buckets[key] = (remaining - 1.0, now_s)

    def _drop_full_buckets(self, now_s: float) -> None:
        self._buckets = {
            key: (remaining, at_s)
            for key, (remaining, at_s) in self._buckets.items()
            if remaining + (now_s - at_s) * self._rate < self._burst
        }


class RequestSlot:
    """The slot of one admitted request."""

    def __init__(self, rate_limiter: RateLimiter, key: str) -> None:
        self._rate_limiter = rate_limiter
        self._key = key
        self.is_waiting = False

    def begin_wait(self) -> None:
        """Count the rest of the request as waiting, not in flight. Raises RateLimited if too many wait."""
        if not self.is_waiting:
            self._rate_limiter.begin_wait(self._key)
            self.is_waiting = True
