"""Time, passed in.

Code that needs the time, a duration or a sleep takes a `Clock`, so that tests can stop or advance time. `now_ms` is
this machine's wall clock: for display and comparison with itself, never for deciding ownership (use the clock of
PostgreSQL or Redis). Durations come from `monotonic`, which clock changes do not affect. In a resumed process
`monotonic` has jumped: code that waited must check its conditions again before it acts.
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
        """Seconds since an arbitrary fixed point; only differences are meaningful."""
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
