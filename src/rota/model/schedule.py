"""When recurring work is due. Pure: the moment comes in, in milliseconds since 1970.

A *slot* is a moment of the schedule; a run may come later than its slot (a retry, a busy pool, an outage).
"""

from __future__ import annotations

from typing import Final, assert_never

import msgspec

from rota.model.errors import InvalidInput
from rota.model.units import format_duration

INTERVAL_MAX_MS: Final = 366 * 86_400_000
MOMENT_MAX_MS: Final = 253_402_300_799_000
"""The end of the year 9999."""


class Every(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="every"):
    interval_ms: int

    def __str__(self) -> str:
        return f"every {format_duration(self.interval_ms / 1000)}"


class At(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="at"):
    """Once."""

    at_ms: int

    def __str__(self) -> str:
        return "once"


Schedule = Every | At


def check(schedule: Schedule) -> None:
    """InvalidInput, with a sentence, for what can never be due."""
    match schedule:
        case Every(interval_ms):
            if not 1 <= interval_ms <= INTERVAL_MAX_MS:
                raise InvalidInput(f"An interval of {interval_ms} ms is not possible; use 1 ms to 366 days.")
        case At(at_ms):
            if not 0 <= at_ms <= MOMENT_MAX_MS:
                raise InvalidInput("A moment to run at lies between the years 1970 and 9999.")
        case _ as never:
            assert_never(never)


def first(schedule: Schedule, now_ms: int) -> int | None:
    """The first slot of something that is new at `now_ms`: an interval begins at once."""
    match schedule:
        case Every():
            return now_ms
        case At(at_ms):
            return at_ms
        case _ as never:
            assert_never(never)


def following(schedule: Schedule, after_ms: int) -> int | None:
    """The next slot after a run for `after_ms`, or acquired then."""
    match schedule:
        case Every(interval_ms):
            return after_ms + interval_ms
        case At(at_ms):
            return at_ms if at_ms > after_ms else None
        case _ as never:
            assert_never(never)
