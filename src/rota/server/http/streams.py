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

CHECK_S: Final = 2.0
UNSURE_S: Final = 30.0

ENDED = metrics.counter("rota_http_streams_ended", "Event streams that ended, by why.", labels=("reason",))


class Stream:
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
    async def lasting(self) -> AsyncIterator[None]:
        """What runs in it ends with the stream."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as self._lasting:
                    yield
        finally:
            self._lasting = None


class Streams:
    """Those of this process."""

    def __init__(self, check: KeyCheck, clock: Clock | None = None) -> None:
        self._check = check
        self._clock = clock or SystemClock()
        self._open: dict[str, set[Stream]] = defaultdict(set)
        self._sure_at: dict[str, float] = {}
        self._ending = False

    @contextmanager
    def opened(self, key: str, actor: Actor) -> Iterator[Stream]:
        if self._ending:
            raise Unavailable("This server is ending: go on at another one.")
        stream = Stream(actor)
        self._sure_at.setdefault(key, self._clock.monotonic())
        self._open[key].add(stream)
        try:
            yield stream
        finally:
            self._open[key].discard(stream)
            if not self._open[key]:
                del self._open[key], self._sure_at[key]
            ENDED.labels(stream.reason or "left").inc()

    async def run(self, life: Lifecycle) -> None:
        """Ask about keys until the server ends, and end with it."""
        self._ending = False
        life.ready()
        try:
            while await life.pause(CHECK_S):
                for key in list(self._open):
                    await self.check(key)
        finally:
            self._ending = True
            for streams in list(self._open.values()):
                _end(streams, "server_ending")

    async def check(self, key: str) -> None:
        """End what may not go on."""
        now_s = self._clock.monotonic()
        try:
            actor = await self._check.check(key)
        except Unauthenticated:
            _end(self._open.get(key, ()), "key_refused")
        except Unavailable:
            if now_s - self._sure_at.get(key, now_s) > UNSURE_S:
                _end(self._open.get(key, ()), "key_unsure")
        else:
            if key in self._open:
                self._sure_at[key] = now_s
                _end([stream for stream in self._open[key] if stream.actor != actor], "rights_changed")


def _end(streams: Iterable[Stream], reason: str) -> None:
    for stream in tuple(streams):
        stream.end(reason)
