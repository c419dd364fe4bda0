"""Time, passed in.

Whoever needs the hour, a duration or a pause takes a `Clock`, so that a test can hold time still or let it
jump. `now_ms` is the wall clock of this machine: good for showing and for comparing with itself, never for
deciding who holds what (that is the clock of PostgreSQL or Redis). Durations come from `monotonic`, which
no clock change moves. A paused process wakes to a `monotonic` that has jumped; code that waited must look
again before it acts.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970 in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment; only differences mean anything."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """This machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
