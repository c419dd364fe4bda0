"""Pace of the loop: polls rarely when nothing is due, immediately when something is, and batches agents.

Cycles are at least `POLL_INTERVAL_MIN_S` apart, so that agents that become due one after the other are batched, except
on a wake-up, or when agents wait and a quarter of the permits is free. Due times are on the clock of Redis as of the
last cycle; a wrong estimate costs an empty poll.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rota.agents.acquisition import CycleResult
from rota.agents.concurrency_permits import PermitPool
from rota.infra.clock import Clock

POLL_INTERVAL_MIN_S: Final = 0.2
POLL_INTERVAL_MAX_S: Final = 5.0
"""Longest time between polls, whatever is known to be due: other processes add agents too."""


class PollPacer:
    """`changed` is set when a permit is released, and here, when the next cycle may be earlier than planned."""

    def __init__(self, clock: Clock, permits: PermitPool, changed: asyncio.Event, interval_s: float) -> None:
        self._clock = clock
        self._permits = permits
        self._changed = changed
        self._interval_s = interval_s
        self._woken = False
        self._server_ms = 0
        self._read_at = 0.0
        self._due_at = float("inf")
        self._longest_s = POLL_INTERVAL_MAX_S

    def begin_cycle(self) -> float:
        """Start a cycle: due times written to Redis after this are tracked separately."""
        self._due_at = float("inf")
        return self._clock.monotonic()

    def wake(self) -> None:
        """Poll now."""
        self._woken = True
        self._changed.set()

    def on_due_time(self, due_ms: int) -> None:
        """An agent is due at this time, as just written to Redis."""
        at = self._read_at + (due_ms - self._server_ms) / 1000
        if at < self._due_at:
            self._due_at = at
            self._changed.set()

    async def wait_for_next_cycle(self, result: CycleResult | None, began_at: float, *, steady: bool = True) -> None:
        """Wait after a cycle that began at `began_at` (`result` is None if it failed). Polls often unless `steady`."""
        self._longest_s = POLL_INTERVAL_MAX_S if steady else self._interval_s
        if result is not None and result.now_ms:
            self._server_ms, self._read_at = result.now_ms, began_at
            if result.next_ms:
                self._due_at = min(self._due_at, began_at + (result.next_ms - result.now_ms) / 1000)
        while not self._woken and (remaining_s := self._next_cycle_at(result, began_at) - self._clock.monotonic()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(remaining_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
        self._woken = False

    def _next_cycle_at(self, result: CycleResult | None, began_at: float) -> float:
        if result is None:
            return began_at + self._interval_s
        if result.mine > result.acquired or (result.unseen and result.acquired):
            if self._has_enough_permits():
                return began_at
            return began_at + (min(POLL_INTERVAL_MIN_S, self._interval_s) if self._permits.free else self._interval_s)
        # A due agent of another member becomes ours after one interval.
        waits = result.passed or result.ready > result.acquired
        longest_s = self._interval_s if waits else max(self._longest_s, self._interval_s)
        return max(began_at + min(POLL_INTERVAL_MIN_S, self._interval_s), min(self._due_at, began_at + longest_s))

    def _has_enough_permits(self) -> bool:
        enough = max(1, self._permits.most // 4) if self._permits.bounded else 1
        return self._permits.free >= enough
