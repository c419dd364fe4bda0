"""What an agent is, and when it runs again. Pure.

A backfill runs slots that are past, one after the other, in between those of the schedule; its plan is one of its own.

`plan_after` decides the next due time from how the last run ended: `acquired + interval` after a success (overdue slots
become one), a delay by the kind of failure after a failure, at once for what was cancelled through no fault of its
own.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, Literal

import msgspec

from rota.model.errors import InvalidInput
from rota.model.failure_classes import FailureClass
from rota.model.jobs.submission import Submission
from rota.model.schedules import (
    INTERVAL_MAX_MS,
    IntervalSchedule,
    OneTimeSchedule,
    Schedule,
    first_slot,
    next_slot,
    validate_schedule,
)
from rota.model.settings.agents import FailureBackoffSettings

NAME_MAX: Final = 200
DEFAULT_TIMEOUT_MS: Final = 3_600_000
"""Of agents without an interval, unless they say otherwise."""
MISSED_SLOT_AGE_MS: Final = 60_000
"""A slot that is this late was missed, for agents that skip what they miss."""
STREAK_MAX: Final = 1_000_000
_GROUP = re.compile(r"[A-Za-z0-9_.-]{0,64}", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

CatchUp = Literal["skip", "one", "all"]
Overlap = Literal["skip", "queue"]


class AgentOutcome(StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    """Stopped from outside, as by the end of its replica."""
    LOST = "LOST"
    """Its replica is gone, and nobody knows what became of it."""
    SKIPPED = "SKIPPED"
    """It came too late for its slot, and its agent does not catch up."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    schedule: Schedule
    timeout_ms: int = 0
    """0: twice the interval."""
    error_interval_ms: int = 0
    """After a failure; 0: as after a success."""
    catch_up: CatchUp = "one"
    overlap: Overlap = "skip"
    group: str = ""
    job: Submission | None = None
    """What it submits; None: it is a function of the app that declares it."""

    @property
    def deadline_ms(self) -> int:
        """How long a run may take."""
        if self.timeout_ms:
            return self.timeout_ms
        return 2 * self.schedule.interval_ms if isinstance(self.schedule, IntervalSchedule) else DEFAULT_TIMEOUT_MS


class NextRun(msgspec.Struct, frozen=True):
    """What comes next. `due_ms` None: never again."""

    due_ms: int | None
    slot_ms: int | None
    streak: int | None = 0
    """None: as it was."""


class AgentRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, at `now_ms` on the clock of Redis."""

    outcome: AgentOutcome
    acquired_ms: int
    now_ms: int
    slot_ms: int | None
    streak: int
    """Failures in a row before it."""
    failure: FailureClass | None = None
    backfill: bool = False


def validate_agent(spec: AgentSpec) -> AgentSpec:
    """InvalidInput, with a sentence, for one that could not be run or told from others."""
    named = spec.name if len(spec.name) <= 60 else spec.name[:57] + "..."
    if not 1 <= len(spec.name) <= NAME_MAX or _CONTROL.search(spec.name):
        raise InvalidInput(f"{named!r} cannot name an agent: use 1 to {NAME_MAX} characters on one line.")
    if _NUMBER.fullmatch(spec.name):
        raise InvalidInput(f"{named!r} cannot name an agent: a number would be taken for a score; add a word to it.")
    if not _GROUP.fullmatch(spec.group):
        raise InvalidInput(f"{spec.group!r} cannot name a group of agents: use letters, digits, dots and hyphens.")
    for what, value in (("timeout", spec.timeout_ms), ("error interval", spec.error_interval_ms)):
        if not 0 <= value <= INTERVAL_MAX_MS:
            raise InvalidInput(f"The {what} of agent {named!r} is {value} ms; use up to 366 days.")
    try:
        validate_schedule(spec.schedule)
    except InvalidInput as wrong:
        raise InvalidInput(f"Agent {named!r}: {wrong.sentence}") from wrong
    return spec


def plan_first_run(spec: AgentSpec, now_ms: int, spread_ms: int = 0) -> NextRun:
    """For one that is new. `spread_ms` keeps many that are new at once apart; a moment that was chosen stays."""
    slot_ms = first_slot(spec.schedule, now_ms)
    due_ms = slot_ms + spread_ms if slot_ms is not None and isinstance(spec.schedule, IntervalSchedule) else slot_ms
    return NextRun(due_ms, slot_ms)


def due_after_change_ms(spec: AgentSpec, now_ms: int) -> int | None:
    """When one is due whose schedule has changed: by the new one, counted from now."""
    return spec.schedule.at_ms if isinstance(spec.schedule, OneTimeSchedule) else next_slot(spec.schedule, now_ms)


def plan_run_after_resume(spec: AgentSpec, before: NextRun, now_ms: int) -> NextRun:
    """For one that was paused: what it missed is run once, or one by one, or not at all, as it says itself."""
    due_ms = before.due_ms
    if due_ms is None or due_ms >= now_ms or spec.catch_up != "skip":
        return before
    next_ms = next_slot(spec.schedule, now_ms)
    return NextRun(next_ms, next_ms)


def is_missed(spec: AgentSpec, slot_ms: int | None, now_ms: int) -> bool:
    """Whether a run for this slot comes too late to be wanted."""
    return spec.catch_up == "skip" and slot_ms is not None and now_ms - slot_ms > MISSED_SLOT_AGE_MS


def plan_next_run(
    spec: AgentSpec, ended: AgentRunResult, backoff: FailureBackoffSettings, ratio: float, chance: float
) -> NextRun:
    """What comes after a run. `chance` in [0, 1) is for the jitter of `ratio`, and for nothing else."""
    match ended.outcome:
        case AgentOutcome.SUCCEEDED | AgentOutcome.SKIPPED:
            return _next_backfill_slot(spec, ended, 0, 0) if ended.backfill else _next_slot(spec, ended, 0)
        case AgentOutcome.CANCELLED | AgentOutcome.LOST:
            return NextRun(ended.now_ms, ended.slot_ms, ended.streak)
        case AgentOutcome.FAILED | AgentOutcome.TIMEOUT:
            streak = min(ended.streak + 1, STREAK_MAX)
            delay_ms = _delay_ms(spec, ended.failure or FailureClass.UNKNOWN, streak, backoff)
            if ended.backfill:
                return _next_backfill_slot(spec, ended, _jittered(delay_ms or 0, ratio, chance), streak)
            if delay_ms is None:
                return _next_slot(spec, ended, streak)
            return NextRun(ended.now_ms + _jittered(delay_ms, ratio, chance), ended.slot_ms, streak)


def _next_backfill_slot(spec: AgentSpec, ended: AgentRunResult, delay_ms: int, streak: int) -> NextRun:
    """The slot that a backfill goes on with. One that failed is not tried again, as by the schedule."""
    assert ended.slot_ms is not None, "a backfill is for a slot"
    return NextRun(ended.now_ms + delay_ms, next_slot(spec.schedule, ended.slot_ms), streak)


def _next_slot(spec: AgentSpec, ended: AgentRunResult, streak: int) -> NextRun:
    """Slots that passed while it ran become one, or are taken one by one by whoever wants all."""
    if isinstance(spec.schedule, IntervalSchedule):
        after_ms = ended.acquired_ms
    else:
        after_ms = ended.slot_ms if spec.catch_up == "all" and ended.slot_ms is not None else ended.now_ms
    slot_ms = next_slot(spec.schedule, after_ms)
    return NextRun(None if slot_ms is None else max(slot_ms, ended.now_ms), slot_ms, streak)


def _delay_ms(spec: AgentSpec, failure: FailureClass, streak: int, backoff: FailureBackoffSettings) -> int | None:
    """From the end of a failed run to the next; None: as if it had succeeded."""
    if backoff.enabled:
        match failure:
            case FailureClass.PERMANENT_FORBIDDEN:
                return backoff.permanent_forbidden_backoff_ms
            case FailureClass.THROTTLED:
                return _throttle_delay_ms(streak, backoff)
            case FailureClass.TRANSIENT | FailureClass.SERVER_ERROR:
                if streak <= backoff.max_immediate_retries:
                    return 0
            case FailureClass.UNKNOWN:
                pass
    if spec.error_interval_ms:
        return spec.error_interval_ms
    return spec.schedule.interval_ms if isinstance(spec.schedule, IntervalSchedule) else None


def _throttle_delay_ms(streak: int, backoff: FailureBackoffSettings) -> int:
    wanted = backoff.throttled
    delay = float(wanted.base_ms)
    for _ in range(streak - 1):
        if delay >= wanted.cap_ms or wanted.multiplier <= 1:
            break
        delay *= wanted.multiplier
    return round(min(delay, wanted.cap_ms))


def _jittered(delay_ms: int, ratio: float, chance: float) -> int:
    return round(delay_ms * (1 + ratio * (2 * chance - 1)))


__all__ = [
    "AgentOutcome",
    "AgentRunResult",
    "AgentSpec",
    "CatchUp",
    "IntervalSchedule",
    "NextRun",
    "OneTimeSchedule",
    "Overlap",
    "Schedule",
    "due_after_change_ms",
    "is_missed",
    "plan_first_run",
    "plan_next_run",
    "plan_run_after_resume",
    "validate_agent",
]
