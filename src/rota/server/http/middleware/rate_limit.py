"""How much is taken at once: from each key so many requests a second, and from all together so many under way.

What waits for a job to end, or follows events, is not under way meanwhile, and of these there are only so many, too.
All is kept in this process alone, so with several replicas a key has as much at each. Buckets of keys that are full
again tell nothing and are forgotten.
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

REQUESTS_IN_FLIGHT = metrics.gauge("rota_http_under_way", "Requests to the API that are being answered.")
REQUESTS_WAITING = metrics.gauge("rota_http_waiting", "Requests that wait for a job to end or follow events.")
BUCKETS_MAX: Final = 4096
WAITING_MAX, WAITING_PER_KEY_MAX = 4096, 1024
WAITING_RETRY_S: Final = 5


class RateLimiter:
    """`rate` requests a second of a key, `burst` of them at once; `most` under way of all keys. 0 is no limit."""

    def __init__(self, rate: float, burst: int, most: int, clock: Clock | None = None) -> None:
        self._rate = rate
        self._burst = float(max(burst, 1))
        self._most = most
        self._clock = clock or SystemClock()
        self._buckets: dict[str, tuple[float, float]] = {}
        """What each key had left, and when."""
        self._under_way = 0
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def admit(self, key: str) -> Iterator[RequestSlot]:
        """Raises RateLimited, which says when to come again, unless there is room for one more."""
        if self._rate:
            self._take_token(key)
        self._begin_request()
        turn = RequestSlot(self, key)
        try:
            yield turn
        finally:
            if turn.is_aside:
                self._end_wait(key)
            else:
                self._end_request()

    def begin_wait(self, key: str) -> None:
        if self._waiting.total() >= WAITING_MAX or self._waiting[key] >= WAITING_PER_KEY_MAX:
            raise RateLimited(
                f"{self._waiting[key]} requests of this key wait for news already, of all keys"
                f" {self._waiting.total()}: end some, or try again in a few seconds.",
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
        if self._most and self._under_way >= self._most:
            raise RateLimited(
                f"This server is answering {self._under_way} requests already: try again in a second.", retry_after_s=1
            )
        self._under_way += 1
        REQUESTS_IN_FLIGHT.set(self._under_way)

    def _end_request(self) -> None:
        self._under_way -= 1
        REQUESTS_IN_FLIGHT.set(self._under_way)

    def _take_token(self, key: str) -> None:
        now_s = self._clock.monotonic()
        had, at_s = self._buckets.get(key, (self._burst, now_s))
        left = min(self._burst, had + (now_s - at_s) * self._rate)
        if left < 1.0:
            wait_s = ceil((1.0 - left) / self._rate)
            raise RateLimited(
                f"This key has sent more than {self._rate:g} requests a second: try again in {wait_s} s, or send many"
                " jobs in one request.",
                retry_after_s=wait_s,
            )
        if len(self._buckets) >= BUCKETS_MAX:
            self._drop_full_buckets(now_s)
        self._buckets[key] = (left - 1.0, now_s)

    def _drop_full_buckets(self, now_s: float) -> None:
        self._buckets = {
            key: (left, at_s)
            for key, (left, at_s) in self._buckets.items()
            if left + (now_s - at_s) * self._rate < self._burst
        }


class RequestSlot:
    """A request that is under way."""

    def __init__(self, pressure: RateLimiter, key: str) -> None:
        self._pressure = pressure
        self._key = key
        self.is_aside = False

    def begin_wait(self) -> None:
        """To wait for news, for the rest of it; raises RateLimited when too many do."""
        if not self.is_aside:
            self._pressure.begin_wait(self._key)
            self.is_aside = True
