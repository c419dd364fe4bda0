"""Agents (recurring work): specification, validation and the next due time. Pure.

`plan_next_run` computes the next due time from the outcome of the last run: `acquired + interval` after a success
(overdue slots collapse into one), a delay by failure class after a failure, immediately after a cancellation that was
not the agent's fault.

A backfill runs past slots one after the other, in between the scheduled ones, and has its own next run.
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
"""For agents without an interval that set no timeout."""
MISSED_SLOT_AGE_MS: Final = 60_000
"""A slot this old counts as missed, for agents with catch_up="skip"."""
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
    """Stopped from outside, for example because its replica shut down."""
    LOST = "LOST"
    """Its replica is gone; the outcome is unknown."""
    SKIPPED = "SKIPPED"
    """Its slot was missed, and the agent does not catch up."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    schedule: Schedule
    timeout_ms: int = 0
    """0: twice the interval."""
    error_interval_ms: int = 0
    """Delay after a failure; 0: as after a success."""
    catch_up: CatchUp = "one"
    overlap: Overlap = "skip"
    group: str = ""
    job: Submission | None = None
    """The job it submits; None: it is a function of the app that declares it."""

    @property
    def deadline_ms(self) -> int:
        """Longest duration of a run."""
        if self.timeout_ms:
            return self.timeout_ms
        return 2 * self.schedule.interval_ms if isinstance(self.schedule, IntervalSchedule) else DEFAULT_TIMEOUT_MS


class NextRun(msgspec.Struct, frozen=True):
    """The next run. `due_ms` None: never again."""

    due_ms: int | None
    slot_ms: int | None
    streak: int | None = 0
    """Consecutive failures; None: unchanged."""


class AgentRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, at `now_ms` of the Redis clock."""

    outcome: AgentOutcome
    acquired_ms: int
    now_ms: int
    slot_ms: int | None
    streak: int
    """Consecutive failures before this run."""
    failure: FailureClass | None = None
    backfill: bool = False


def validate_agent(spec: AgentSpec) -> AgentSpec:
    """`spec` if it can be run and identified; raises InvalidInput otherwise."""
    shown = spec.name if len(spec.name) <= 60 else spec.name[:57] + "..."
    if not 1 <= len(spec.name) <= NAME_MAX or _CONTROL.search(spec.name):
        raise InvalidInput(f"{shown!r} is not a valid agent name: use 1 to {NAME_MAX} characters on one line.")
    if _NUMBER.fullmatch(spec.name):
        raise InvalidInput(
            f"{shown!r} is not a valid agent name: add letters, since a number could be mistaken for a score."
        )
    if not _GROUP.fullmatch(spec.group):
        raise InvalidInput(
            f"{spec.group!r} is not a valid agent group: use up to 64 letters, digits, dots, hyphens and underscores."
        )
    for what, value in (("timeout", spec.timeout_ms), ("error interval", spec.error_interval_ms)):
        if not 0 <= value <= INTERVAL_MAX_MS:
            raise InvalidInput(f"The {what} of agent {shown!r} is {value} ms: use 0 to 366 days.")
    try:
        validate_schedule(spec.schedule)
    except InvalidInput as error:
        raise InvalidInput(f"Agent {shown!r}: {error.sentence}") from error
    return spec


def plan_first_run(spec: AgentSpec, now_ms: int, spread_ms: int = 0) -> NextRun:
    """First run of a new agent. `spread_ms` staggers many new interval agents; cron and one-time moments are kept."""
    slot_ms = first_slot(spec.schedule, now_ms)
    due_ms = slot_ms + spread_ms if slot_ms is not None and isinstance(spec.schedule, IntervalSchedule) else slot_ms
    return NextRun(due_ms, slot_ms)


def due_after_change_ms(spec: AgentSpec, now_ms: int) -> int | None:
    """Next due time after the schedule changed, computed from now."""
    return spec.schedule.at_ms if isinstance(spec.schedule, OneTimeSchedule) else next_slot(spec.schedule, now_ms)


def plan_run_after_resume(spec: AgentSpec, before: NextRun, now_ms: int) -> NextRun:
    """Next run of an agent that was paused: `catch_up` decides whether missed slots run once, each, or not at all."""
    due_ms = before.due_ms
    if due_ms is None or due_ms >= now_ms or spec.catch_up != "skip":
        return before
    next_ms = next_slot(spec.schedule, now_ms)
    return NextRun(next_ms, next_ms)


def is_missed(spec: AgentSpec, slot_ms: int | None, now_ms: int) -> bool:
    """Whether a run for this slot is too late and must be skipped."""
    return spec.catch_up == "skip" and slot_ms is not None and now_ms - slot_ms > MISSED_SLOT_AGE_MS


def plan_next_run(
    spec: AgentSpec, ended: AgentRunResult, backoff: FailureBackoffSettings, ratio: float, chance: float
) -> NextRun:
    """The next run after `ended`. `chance` in [0, 1) drives the jitter of `ratio`."""
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
    """The next slot of a backfill. A failed slot is not retried, unlike a scheduled one."""
    assert ended.slot_ms is not None, "a backfill is for a slot"
    return NextRun(ended.now_ms + delay_ms, next_slot(spec.schedule, ended.slot_ms), streak)


def _next_slot(spec: AgentSpec, ended: AgentRunResult, streak: int) -> NextRun:
    """Slots that passed during the run collapse into one, or run one by one with catch_up="all"."""
    if isinstance(spec.schedule, IntervalSchedule):
        after_ms = ended.acquired_ms
    else:
        after_ms = ended.slot_ms if spec.catch_up == "all" and ended.slot_ms is not None else ended.now_ms
    slot_ms = next_slot(spec.schedule, after_ms)
    return NextRun(None if slot_ms is None else max(slot_ms, ended.now_ms), slot_ms, streak)


def _delay_ms(spec: AgentSpec, failure: FailureClass, streak: int, backoff: FailureBackoffSettings) -> int | None:
    """Delay from the end of a failed run to the next; None: as after a success."""
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
    throttled = backoff.throttled
    delay = float(throttled.base_ms)
    for _ in range(streak - 1):
        if delay >= throttled.cap_ms or throttled.multiplier <= 1:
            break
        delay *= throttled.multiplier
    return round(min(delay, throttled.cap_ms))


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
