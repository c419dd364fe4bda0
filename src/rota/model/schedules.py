"""Schedules of recurring work: interval, cron and one-time. Pure: times are milliseconds since 1970, passed in.

A *slot* is a moment of the schedule; its run may start later (a retry, a busy pool, an outage).

Cron follows the wall clock of its time zone, as Debian's cron does: a time skipped in spring runs right after the clock
change, a time repeated in autumn runs once, and expressions for every n minutes are not affected.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, assert_never
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError

from rota.model.errors import InvalidInput
from rota.model.units import format_duration

INTERVAL_MAX_MS: Final = 366 * 86_400_000
MOMENT_MAX_MS: Final = 253_402_300_799_000
"""End of the year 9999."""
_REFERENCE_DAY: Final = datetime(2024, 1, 1, tzinfo=UTC)


class IntervalSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="every"):
    interval_ms: int

    def __str__(self) -> str:
        return f"every {format_duration(self.interval_ms / 1000)}"


class CronSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cron"):
    """Minute, hour, day, month and weekday. The last day is `L`, the second Monday `MON#2`, the last Friday `5L`."""

    expression: str
    zone: str = "UTC"

    def __str__(self) -> str:
        return f"cron {self.expression} ({self.zone})"


class OneTimeSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="at"):
    """A single run."""

    at_ms: int

    def __str__(self) -> str:
        return "once"


Schedule = IntervalSchedule | CronSchedule | OneTimeSchedule


def validate_schedule(schedule: Schedule) -> None:
    """Raises InvalidInput for a schedule that can never be due."""
    match schedule:
        case IntervalSchedule(interval_ms):
            if not 1 <= interval_ms <= INTERVAL_MAX_MS:
                raise InvalidInput(f"An interval of {interval_ms} ms is not valid: use 1 ms to 366 days.")
        case CronSchedule():
            _check_cron(schedule)
        case OneTimeSchedule(at_ms):
            if not 0 <= at_ms <= MOMENT_MAX_MS:
                raise InvalidInput("The time of a one-time schedule is out of range: use the years 1970 to 9999.")
        case _ as never:
            assert_never(never)


def first_slot(schedule: Schedule, now_ms: int) -> int | None:
    """The first slot of an agent created at `now_ms`; an interval starts immediately."""
    match schedule:
        case IntervalSchedule():
            return now_ms
        case CronSchedule():
            return _cron_after(schedule, now_ms)
        case OneTimeSchedule(at_ms):
            return at_ms
        case _ as never:
            assert_never(never)


def next_slot(schedule: Schedule, after_ms: int) -> int | None:
    """The slot that follows `after_ms`: the slot of the last run, or the time it was acquired."""
    match schedule:
        case IntervalSchedule(interval_ms):
            return after_ms + interval_ms
        case CronSchedule():
            return _cron_after(schedule, after_ms)
        case OneTimeSchedule(at_ms):
            return at_ms if at_ms > after_ms else None
        case _ as never:
            assert_never(never)


def slots_between(schedule: Schedule, from_ms: int, to_ms: int, most: int) -> list[int]:
    """The first `most` slots in [from_ms, to_ms). Slots of an interval are counted from `from_ms`."""
    if from_ms >= to_ms:
        return []
    if isinstance(schedule, OneTimeSchedule):
        return [schedule.at_ms] if from_ms <= schedule.at_ms < to_ms else []
    slot_ms = from_ms if isinstance(schedule, IntervalSchedule) else next_slot(schedule, from_ms - 1)
    found: list[int] = []
    while slot_ms is not None and slot_ms < to_ms and len(found) < most:
        found.append(slot_ms)
        slot_ms = next_slot(schedule, slot_ms)
    return found


def _cron_after(cron: CronSchedule, after_ms: int) -> int | None:
    """None: no slot within fifty years."""
    start = datetime.fromtimestamp(after_ms / 1000, ZoneInfo(cron.zone))
    for moment in CronSim(cron.expression, start):
        at_ms = round(moment.timestamp() * 1000)
        # In the repeated hour of autumn the first result may be before `after_ms`: that slot has already run.
        if at_ms > after_ms:
            return at_ms
    return None


def _check_cron(cron: CronSchedule) -> None:
    try:
        ZoneInfo(cron.zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidInput(
            f"{cron.zone[:60]!r} is not a known time zone: use a name such as Europe/Berlin or UTC."
        ) from None
    try:
        first = next(CronSim(cron.expression, _REFERENCE_DAY), None)
    except CronSimError as error:
        raise InvalidInput(
            f"{cron.expression[:60]!r} is not a valid cron expression ({error}): write minute, hour, day, month and"
            " weekday, such as 0 2 * * MON-FRI."
        ) from None
    if first is None:
        raise InvalidInput(f"The cron expression {cron.expression[:60]!r} never matches: check its day and month.")
