"""Limits requests per second for each key over all servers, and requests in flight on this server.

`request_tokens` counts the requests of a key for all servers. Requests in flight, which protect this process, and
requests that wait for a job to end or follow events are counted here; a request that waits is not in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from rota.infra.telemetry import metrics
from rota.model.errors import RateLimited
from rota.server.http.middleware.request_tokens import RequestTokens

REQUESTS_IN_FLIGHT = metrics.gauge("rota_http_under_way", "API requests in flight.")
REQUESTS_WAITING = metrics.gauge("rota_http_waiting", "Requests that wait for a job to end or follow events.")
WAITING_MAX, WAITING_PER_KEY_MAX = 4096, 1024
WAITING_RETRY_S: Final = 5


class RateLimiter:
    """`tokens` limits the rate of each key, None: no limit; `in_flight_max` over all keys, 0: no limit."""

    def __init__(self, tokens: RequestTokens | None, in_flight_max: int) -> None:
        self._tokens = tokens
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def admit(self, key: str) -> AsyncIterator[RequestSlot]:
        """Hold a slot for one request. Raises RateLimited, with the time to retry, when a limit is reached."""
        if self._tokens is not None:
            await self._tokens.take(key)
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
