"""A clock that moves only when a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rota.model.errors import InvalidInput


class MovableClock:
    """`Clock` for tests. `sleep` returns immediately and moves the clock."""

    def __init__(self, now: datetime | None = None) -> None:
        self._now = now or datetime.now(UTC)

    @property
    def now(self) -> datetime:
        return self._now

    def now_ms(self) -> int:
        return round(self._now.timestamp() * 1000)

    def monotonic(self) -> float:
        return self._now.timestamp()

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, by: float | timedelta) -> None:
        """Moves the clock forward; a number is in seconds."""
        span = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if span < timedelta():
            raise InvalidInput(f"The clock cannot go back by {-span}: create another one.")
        self._now += span

    def move_to(self, moment: datetime) -> None:
        self.advance(moment - self._now)
