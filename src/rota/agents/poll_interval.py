"""When the loop looks again: rarely when nothing is due, at once when something is, and never for one agent at a time.

Between two cycles lie at least `GAP_S`, so that agents which become due one after the other are taken together; unless
somebody nudges, or agents wait and a quarter of the pool is free. Due times are on the clock of Redis, which the last
cycle has read; a wrong guess costs a look that finds nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rota.agents.acquisition import CycleResult
from rota.agents.concurrency_permits import PermitPool
from rota.infra.clock import Clock

POLL_INTERVAL_MIN_S: Final = 0.2
POLL_INTERVAL_MAX_S: Final = 5.0
"""Longest time without a look, whatever we believe to be due: others may have put something there."""


class PollPacer:
    def __init__(self, clock: Clock, permits: PermitPool, interval_s: float) -> None:
        self._clock = clock
        self._permits = permits
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self._nudged = False
        self._server_ms = 0
        self._read_at = 0.0
        self._due_at = float("inf")
        self._longest_s = POLL_INTERVAL_MAX_S

    def begin_cycle(self) -> float:
        """A cycle begins, now: what it does not see was told to Redis after this."""
        self._due_at = float("inf")
        return self._clock.monotonic()

    def wake(self) -> None:
        """Look now."""
        self._nudged = True
        self._changed.set()

    def on_permit_released(self) -> None:
        """There is room; it matters when agents wait for it."""
        self._changed.set()

    def on_due_time(self, due_ms: int) -> None:
        """Somebody waits until then, as we have just told Redis."""
        at = self._read_at + (due_ms - self._server_ms) / 1000
        if at < self._due_at:
            self._due_at = at
            self._changed.set()

    async def wait_for_next_cycle(self, seen: CycleResult | None, began_at: float, *, steady: bool = True) -> None:
        """After a cycle that began at `began_at`; it saw nothing if it failed. Unless all is `steady`, look often."""
        self._longest_s = POLL_INTERVAL_MAX_S if steady else self._interval_s
        if seen is not None and seen.now_ms:
            self._server_ms, self._read_at = seen.now_ms, began_at
            if seen.next_ms:
                self._due_at = min(self._due_at, began_at + (seen.next_ms - seen.now_ms) / 1000)
        while not self._nudged and (left_s := self._next_cycle_at(seen, began_at) - self._clock.monotonic()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
        self._nudged = False

    def _next_cycle_at(self, seen: CycleResult | None, began_at: float) -> float:
        if seen is None:
            return began_at + self._interval_s
        if seen.mine > seen.acquired or (seen.unseen and seen.acquired):
            if self._has_enough_permits():
                return began_at
            return began_at + (min(POLL_INTERVAL_MIN_S, self._interval_s) if self._permits.free else self._interval_s)
        # What is due and another's to take first is ours to take in an interval.
        waits = seen.passed or seen.ready > seen.acquired
        longest_s = self._interval_s if waits else max(self._longest_s, self._interval_s)
        return max(began_at + min(POLL_INTERVAL_MIN_S, self._interval_s), min(self._due_at, began_at + longest_s))

    def _has_enough_permits(self) -> bool:
        enough = max(1, self._permits.most // 4) if self._permits.bounded else 1
        return self._permits.free >= enough
