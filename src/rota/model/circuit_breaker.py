"""Circuit breaker: when to stop calling a failing service, and when to probe it again.

            enough failures                 open_ms later, at the next call
    CLOSED ─────────────────► OPEN ────────────────────────► HALF_OPEN
      ▲                        ▲            one failure          │
      │                        └─────────────────────────────────┤
      └──────────────────────────────────────────────────────────┘
                enough successes, or duration_ms without a failure

`step` is the whole state machine; time is an argument, in milliseconds. `infra/breaker/step.lua` implements it again
for breakers shared by replicas; a property test compares the two.

Invariants, all enforced by `step`:

* Every transition creates a new `generation`. A permit carries the generation it was granted under, and a report under
  any other is ignored: a call that began before a transition says nothing about the state after it.
* Half-open by count permits at most `probes_max` calls, minus cancelled ones. Every success or failure can end the
  phase; if probes never report (their process died), a new round begins `lost_after_ms` after the last permit. So it
  cannot get stuck.
* No phase lasts longer than its configured time from any moment on, even if the clock goes back or the configuration
  changes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

import msgspec

from rota.model.errors import InvalidSetting


class BreakerPhase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    ALLOW = "allow"
    SUCCESS = "success"
    FAILURE = "failure"
    CANCEL = "cancel"
    """The call ended without a result about the service."""
    PEEK = "peek"


class ConsecutiveFailures(msgspec.Struct, frozen=True):
    """Opens after this many consecutive failures; a success resets the count."""

    failures: int


class WindowedFailures(msgspec.Struct, frozen=True):
    """Opens after this many failures within `window_ms`, regardless of successes."""

    failures: int
    window_ms: int


class ProbesByCount(msgspec.Struct, frozen=True):
    """Half-open permits `probes_max` calls and closes after `successes` of them."""

    probes_max: int
    successes: int
    lost_after_ms: int = 10_000
    """Longer than a call can take: a probe without a report by then counts as lost."""


class ProbesByDuration(msgspec.Struct, frozen=True):
    """Half-open permits every call and closes after `duration_ms` without a failure."""

    duration_ms: int


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True):
    counting: ConsecutiveFailures | WindowedFailures
    open_ms: int
    probing: ProbesByCount | ProbesByDuration

    def __post_init__(self) -> None:
        spans = [self.open_ms]
        match self.counting:
            case WindowedFailures(window_ms=window_ms):
                spans.append(window_ms)
        match self.probing:
            case ProbesByCount(probes_max, successes, lost_after_ms):
                spans.append(lost_after_ms)
                if not 1 <= successes <= probes_max:
                    raise InvalidSetting(
                        f"A breaker cannot close after {successes} successes of {probes_max} probes:"
                        " require at least one and at most as many successes as probes."
                    )
            case ProbesByDuration(duration_ms):
                spans.append(duration_ms)
        if self.counting.failures < 1 or min(spans) < 1:
            raise InvalidSetting("A breaker's failures and times must each be at least 1.")


class BreakerState(msgspec.Struct, frozen=True):
    phase: BreakerPhase = BreakerPhase.CLOSED
    generation: int = 0
    failures: int = 0
    """Closed: counted so far. Otherwise: the failures that opened it, plus failed probes since."""
    failed_at_ms: tuple[int, ...] = ()
    """Closed and windowed: times of the failures, oldest first."""
    until_ms: int = 0
    """Open: when probing may begin. Half-open: when the round ends (by count: when silent probes count as lost)."""
    probes: int = 0
    successes: int = 0


class CallPermitted(msgspec.Struct, frozen=True, tag="granted"):
    """The call may proceed and must report under `generation`. It is a probe if `phase` is half-open."""

    was: BreakerPhase
    phase: BreakerPhase
    failures: int
    generation: int


class CallRejected(msgspec.Struct, frozen=True, tag="refused"):
    was: BreakerPhase
    phase: BreakerPhase
    failures: int
    retry_ms: int


class BreakerSnapshot(msgspec.Struct, frozen=True, tag="noted"):
    was: BreakerPhase
    phase: BreakerPhase
    failures: int
    retry_ms: int


BreakerResult = CallPermitted | CallRejected | BreakerSnapshot


def step(
    rules: BreakerConfig, state: BreakerState, event: BreakerEvent, generation: int, now_ms: int
) -> tuple[BreakerState, BreakerResult]:
    """The state after `event` at `now_ms`, and the result; `generation` is that of the reported permit."""
    was = state.phase
    state = _apply_elapsed_time(rules, state, now_ms)
    if event is BreakerEvent.ALLOW:
        return _allow(rules, state, now_ms, was)
    if event is not BreakerEvent.PEEK and generation == state.generation:
        state = _record_report(rules, state, event, now_ms)
    return state, BreakerSnapshot(was, state.phase, state.failures, _retry_ms(state, now_ms))


def fallback_state(rules: BreakerConfig, last: BreakerResult, age_ms: int, now_ms: int) -> BreakerState:
    """A local state to continue from, `age_ms` after the last result of a shared breaker that is now unreachable."""
    match last.phase:
        case BreakerPhase.CLOSED:
            # The times of the failures are unknown here, and a windowed count without them would never decrease.
            failures = last.failures if isinstance(rules.counting, ConsecutiveFailures) else 0
            return BreakerState(failures=failures)
        case BreakerPhase.OPEN:
            left_ms = 0 if isinstance(last, CallPermitted) else max(0, last.retry_ms - age_ms)
            return BreakerState(
                BreakerPhase.OPEN, _next_generation(BreakerState(), now_ms), last.failures, until_ms=now_ms + left_ms
            )
        case BreakerPhase.HALF_OPEN:
            return BreakerState(
                BreakerPhase.OPEN, _next_generation(BreakerState(), now_ms), last.failures, until_ms=now_ms
            )
        case _ as never:
            assert_never(never)


def _apply_elapsed_time(rules: BreakerConfig, state: BreakerState, now_ms: int) -> BreakerState:
    """`state` after the transitions that time alone causes."""
    latest_ms = now_ms + _phase_max_ms(rules, state.phase)
    if state.until_ms > latest_ms:
        return msgspec.structs.replace(state, until_ms=latest_ms)
    if (
        state.phase is BreakerPhase.HALF_OPEN
        and isinstance(rules.probing, ProbesByDuration)
        and now_ms >= state.until_ms
    ):
        return _close(state, now_ms)
    return state


def _allow(
    rules: BreakerConfig, state: BreakerState, now_ms: int, was: BreakerPhase
) -> tuple[BreakerState, BreakerResult]:
    if state.phase is not BreakerPhase.CLOSED:
        state, free = _admit_probe(rules, state, now_ms)
        if not free:
            return state, CallRejected(was, state.phase, state.failures, _retry_ms(state, now_ms))
    return state, CallPermitted(was, state.phase, state.failures, state.generation)


def _admit_probe(rules: BreakerConfig, state: BreakerState, now_ms: int) -> tuple[BreakerState, bool]:
    """`state` with one more probe in flight, and whether it was permitted."""
    if state.phase is BreakerPhase.OPEN:
        if now_ms < state.until_ms:
            return state, False
        state = _enter_half_open(rules, state, now_ms)
    match rules.probing:
        case ProbesByDuration():
            return state, True
        case ProbesByCount(probes_max, _, lost_after_ms):
            if state.probes >= probes_max and now_ms >= state.until_ms:
                state = _enter_half_open(rules, state, now_ms)
            if state.probes >= probes_max:
                return state, False
            return msgspec.structs.replace(state, probes=state.probes + 1, until_ms=now_ms + lost_after_ms), True
        case _ as never:
            assert_never(never)


def _record_report(rules: BreakerConfig, state: BreakerState, event: BreakerEvent, now_ms: int) -> BreakerState:
    match state.phase, event:
        case BreakerPhase.CLOSED, BreakerEvent.SUCCESS if isinstance(rules.counting, ConsecutiveFailures):
            return msgspec.structs.replace(state, failures=0)
        case BreakerPhase.CLOSED, BreakerEvent.FAILURE:
            return _count_failure(rules, state, now_ms)
        case BreakerPhase.HALF_OPEN, BreakerEvent.FAILURE:
            return _open(rules, state, state.failures + 1, now_ms)
        case BreakerPhase.HALF_OPEN, BreakerEvent.SUCCESS if isinstance(rules.probing, ProbesByCount):
            successes = state.successes + 1
            if successes >= rules.probing.successes:
                return _close(state, now_ms)
            return msgspec.structs.replace(state, successes=successes)
        case BreakerPhase.HALF_OPEN, BreakerEvent.CANCEL if isinstance(rules.probing, ProbesByCount):
            return msgspec.structs.replace(state, probes=max(0, state.probes - 1))
    return state


def _count_failure(rules: BreakerConfig, state: BreakerState, now_ms: int) -> BreakerState:
    failures = state.failures + 1
    recent: tuple[int, ...] = ()
    if isinstance(rules.counting, WindowedFailures):
        since_ms = now_ms - rules.counting.window_ms
        recent = (*(at for at in state.failed_at_ms if since_ms < at <= now_ms), now_ms)
        failures = len(recent)
    if failures >= rules.counting.failures:
        return _open(rules, state, failures, now_ms)
    return msgspec.structs.replace(state, failures=failures, failed_at_ms=recent)


def _close(state: BreakerState, now_ms: int) -> BreakerState:
    return BreakerState(BreakerPhase.CLOSED, _next_generation(state, now_ms))


def _open(rules: BreakerConfig, state: BreakerState, failures: int, now_ms: int) -> BreakerState:
    return BreakerState(BreakerPhase.OPEN, _next_generation(state, now_ms), failures, until_ms=now_ms + rules.open_ms)


def _enter_half_open(rules: BreakerConfig, state: BreakerState, now_ms: int) -> BreakerState:
    until_ms = now_ms + _phase_max_ms(rules, BreakerPhase.HALF_OPEN)
    return BreakerState(BreakerPhase.HALF_OPEN, _next_generation(state, now_ms), state.failures, until_ms=until_ms)


def _phase_max_ms(rules: BreakerConfig, phase: BreakerPhase) -> int:
    """Longest distance of `until_ms` from now in this phase."""
    match phase, rules.probing:
        case BreakerPhase.HALF_OPEN, ProbesByCount(lost_after_ms=lost_after_ms):
            return lost_after_ms
        case BreakerPhase.HALF_OPEN, ProbesByDuration(duration_ms):
            return duration_ms
        case BreakerPhase.OPEN, _:
            return rules.open_ms
    return 0


def _next_generation(state: BreakerState, now_ms: int) -> int:
    """A generation never used before, even if the state was lost (Redis flushed, breaker reset)."""
    return max(state.generation + 1, now_ms)


def _retry_ms(state: BreakerState, now_ms: int) -> int:
    return 0 if state.phase is BreakerPhase.CLOSED else max(0, state.until_ms - now_ms)
