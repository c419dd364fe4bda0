"""Registry of open event streams by key, so that they end when the key or the server does.

The streams of a key that was revoked, has expired or lost rights end within `KEY_CHECK_INTERVAL_S`, or after
`KEY_UNVERIFIED_MAX_S` while keys cannot be checked. One check covers all streams of a key. When the server stops, all
streams end immediately: `StreamRegistry.run` is the first service to drain.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from rota.infra.clock import Clock, SystemClock
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.access import Actor
from rota.model.errors import Unauthenticated, Unavailable
from rota.server.access import KeyCheck

KEY_CHECK_INTERVAL_S: Final = 2.0
KEY_UNVERIFIED_MAX_S: Final = 30.0

STREAMS_ENDED = metrics.counter("rota_http_streams_ended", "Event streams that ended, by reason.", labels=("reason",))


class OpenStream:
    """One open stream."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.reason = ""
        """Why it ended; empty while open."""
        self._timeout: asyncio.Timeout | None = None

    def end(self, reason: str) -> None:
        """End the stream; callable from any task at any time."""
        if not self.reason:
            self.reason = reason
            if self._timeout is not None:
                self._timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def cancel_on_end(self) -> AsyncIterator[None]:
        """Cancels the body when the stream ends."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as self._timeout:
                    yield
        finally:
            self._timeout = None


class StreamRegistry:
    """The open streams of this process."""

    def __init__(self, check: KeyCheck, clock: Clock | None = None) -> None:
        self._check = check
        self._clock = clock or SystemClock()
        self._open: dict[str, set[OpenStream]] = defaultdict(set)
        self._verified_at_s: dict[str, float] = {}
        self._stopping = False

    @contextmanager
    def open(self, key: str, actor: Actor) -> Iterator[OpenStream]:
        if self._stopping:
            raise Unavailable("This server is shutting down: connect to another one.")
        stream = OpenStream(actor)
        self._verified_at_s.setdefault(key, self._clock.monotonic())
        self._open[key].add(stream)
        try:
            yield stream
        finally:
            self._open[key].discard(stream)
            if not self._open[key]:
                del self._open[key], self._verified_at_s[key]
            STREAMS_ENDED.labels(stream.reason or "left").inc()

    async def run(self, life: Lifecycle) -> None:
        """Check keys periodically; end all streams when the server stops."""
        self._stopping = False
        life.ready()
        try:
            while await life.pause(KEY_CHECK_INTERVAL_S):
                for key in list(self._open):
                    await self.check_key(key)
        finally:
            self._stopping = True
            for streams in list(self._open.values()):
                _end_all(streams, "server_ending")

    async def check_key(self, key: str) -> None:
        """End the streams that `key` may no longer read."""
        now_s = self._clock.monotonic()
        try:
            actor = await self._check.check(key)
        except Unauthenticated:
            _end_all(self._open.get(key, ()), "key_refused")
        except Unavailable:
            if now_s - self._verified_at_s.get(key, now_s) > KEY_UNVERIFIED_MAX_S:
                _end_all(self._open.get(key, ()), "key_unsure")
        else:
            if key in self._open:
                self._verified_at_s[key] = now_s
                _end_all([stream for stream in self._open[key] if stream.actor != actor], "rights_changed")


def _end_all(streams: Iterable[OpenStream], reason: str) -> None:
    for stream in tuple(streams):
        stream.end(reason)
