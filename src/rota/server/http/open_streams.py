"""Answers that do not end by themselves, as far as the process must know of them: which key has which open.

A key that was revoked or has expired, or whose rights changed, loses its streams within `CHECK_S`, or, while nobody can
be asked about keys, after `UNSURE_S`. All streams of a key are asked about at once. They end at once when the server is
ending: `Streams.run` is the first service to drain.
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

STREAMS_ENDED = metrics.counter("rota_http_streams_ended", "Event streams that ended, by why.", labels=("reason",))


class OpenStream:
    """One that is open."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.reason = ""
        """Why it ends, once it does."""
        self._lasting: asyncio.Timeout | None = None

    def end(self, reason: str) -> None:
        """From outside, at any time."""
        if not self.reason:
            self.reason = reason
            if self._lasting is not None:
                self._lasting.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def cancel_on_end(self) -> AsyncIterator[None]:
        """What runs in it ends with the stream."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as self._lasting:
                    yield
        finally:
            self._lasting = None


class StreamRegistry:
    """Those of this process."""

    def __init__(self, check: KeyCheck, clock: Clock | None = None) -> None:
        self._check = check
        self._clock = clock or SystemClock()
        self._open: dict[str, set[OpenStream]] = defaultdict(set)
        self._sure_at: dict[str, float] = {}
        self._ending = False

    @contextmanager
    def open(self, key: str, actor: Actor) -> Iterator[OpenStream]:
        if self._ending:
            raise Unavailable("This server is ending: go on at another one.")
        stream = OpenStream(actor)
        self._sure_at.setdefault(key, self._clock.monotonic())
        self._open[key].add(stream)
        try:
            yield stream
        finally:
            self._open[key].discard(stream)
            if not self._open[key]:
                del self._open[key], self._sure_at[key]
            STREAMS_ENDED.labels(stream.reason or "left").inc()

    async def run(self, life: Lifecycle) -> None:
        """Ask about keys until the server ends, and end with it."""
        self._ending = False
        life.ready()
        try:
            while await life.pause(KEY_CHECK_INTERVAL_S):
                for key in list(self._open):
                    await self.check_key(key)
        finally:
            self._ending = True
            for streams in list(self._open.values()):
                _end_all(streams, "server_ending")

    async def check_key(self, key: str) -> None:
        """End what may not go on."""
        now_s = self._clock.monotonic()
        try:
            actor = await self._check.check(key)
        except Unauthenticated:
            _end_all(self._open.get(key, ()), "key_refused")
        except Unavailable:
            if now_s - self._sure_at.get(key, now_s) > KEY_UNVERIFIED_MAX_S:
                _end_all(self._open.get(key, ()), "key_unsure")
        else:
            if key in self._open:
                self._sure_at[key] = now_s
                _end_all([stream for stream in self._open[key] if stream.actor != actor], "rights_changed")


def _end_all(streams: Iterable[OpenStream], reason: str) -> None:
    for stream in tuple(streams):
        stream.end(reason)
