"""Scenarios of the circuit breaker state machine. Properties of all event sequences are in tests/property."""

import pytest

from rota.model.circuit_breaker import (
    BreakerConfig,
    BreakerEvent,
    BreakerPhase,
    BreakerSnapshot,
    BreakerState,
    CallPermitted,
    CallRejected,
    ConsecutiveFailures,
    ProbesByCount,
    ProbesByDuration,
    WindowedFailures,
    fallback_state,
    step,
)
from rota.model.errors import InvalidSetting

SAFETY = BreakerConfig(
    counting=ConsecutiveFailures(3), open_ms=30_000, probing=ProbesByCount(3, successes=2, lost_after_ms=10_000)
)
AGENTS = BreakerConfig(counting=WindowedFailures(5, window_ms=10_000), open_ms=30_000, probing=ProbesByDuration(5_000))


class Scenario:
    """A breaker with a clock that the test advances."""

    def __init__(self, rules):
        self.rules = rules
        self.state = BreakerState()
        self.now = 1_000_000

    def advance(self, ms):
        self.now += ms
        return self

    def apply(self, event, generation=0):
        self.state, verdict = step(self.rules, self.state, event, generation, self.now)
        return verdict

    def permit(self):
        verdict = self.apply(BreakerEvent.ALLOW)
        assert isinstance(verdict, CallPermitted), verdict
        return verdict.generation

    def rejected_for_ms(self):
        verdict = self.apply(BreakerEvent.ALLOW)
        assert isinstance(verdict, CallRejected), verdict
        return verdict.retry_ms

    def report(self, event, generation):
        self.apply(event, generation)
        return self.state.phase

    def fail(self, times=1):
        for _ in range(times):
            self.report(BreakerEvent.FAILURE, self.permit())
        return self.state.phase

    def succeed(self):
        return self.report(BreakerEvent.SUCCESS, self.permit())


def opened(rules):
    scenario = Scenario(rules)
    assert scenario.fail(rules.counting.failures) is BreakerPhase.OPEN
    return scenario


def half_opened(rules):
    scenario = opened(rules).advance(rules.open_ms)
    return scenario, scenario.permit()


def test_breaker_opens_after_three_consecutive_failures():
    scenario = Scenario(SAFETY)
    assert scenario.fail(2) is BreakerPhase.CLOSED
    assert scenario.fail() is BreakerPhase.OPEN


def test_success_resets_consecutive_failures():
    scenario = Scenario(SAFETY)
    scenario.fail(2)
    scenario.succeed()
    assert scenario.fail(2) is BreakerPhase.CLOSED


def test_open_period_starts_at_the_trip_and_rejections_carry_the_remaining_time():
    scenario = Scenario(SAFETY)
    scenario.fail(2)
    scenario.advance(29_000).fail()
    assert scenario.rejected_for_ms() == 30_000
    assert scenario.advance(29_999).rejected_for_ms() == 1
    assert scenario.advance(1).permit()
    assert scenario.state.phase is BreakerPhase.HALF_OPEN


def test_breaker_opens_after_five_failures_in_the_window_despite_successes():
    scenario = Scenario(AGENTS)
    for _ in range(4):
        scenario.fail()
        scenario.advance(2_400).succeed()
    assert scenario.fail() is BreakerPhase.OPEN


def test_failures_older_than_the_window_do_not_count():
    scenario = Scenario(AGENTS)
    scenario.fail(4)
    assert scenario.advance(10_000).fail(4) is BreakerPhase.CLOSED
    assert scenario.state.failures == 4


def test_sliding_window_counts_failures_across_boundaries():
    scenario = Scenario(AGENTS)
    scenario.advance(9_000).fail(3)
    assert scenario.advance(2_000).fail(2) is BreakerPhase.OPEN


def test_half_open_breaker_permits_three_probes():
    scenario, _ = half_opened(SAFETY)
    scenario.permit()
    scenario.permit()
    assert scenario.rejected_for_ms() == 10_000


def test_two_successful_probes_close_the_breaker_and_reset_failures():
    scenario, probe = half_opened(SAFETY)
    assert scenario.report(BreakerEvent.SUCCESS, probe) is BreakerPhase.HALF_OPEN
    assert scenario.succeed() is BreakerPhase.CLOSED
    assert scenario.state.failures == 0


def test_failed_probe_reopens_the_breaker_for_the_whole_period():
    scenario, probe = half_opened(SAFETY)
    scenario.report(BreakerEvent.SUCCESS, probe)
    assert scenario.fail() is BreakerPhase.OPEN
    assert scenario.rejected_for_ms() == 30_000
    assert scenario.state.failures == 4


def test_cancelled_probe_frees_its_slot():
    scenario, probe = half_opened(SAFETY)
    scenario.permit()
    scenario.permit()
    scenario.report(BreakerEvent.CANCEL, probe)
    scenario.permit()
    scenario.rejected_for_ms()


def test_lost_probes_expire_and_do_not_block_the_breaker():
    scenario, lost = half_opened(SAFETY)
    scenario.permit()
    scenario.advance(4_000).permit()
    assert scenario.advance(9_999).rejected_for_ms() == 1
    fresh = scenario.advance(1).permit()
    assert fresh != lost
    assert scenario.report(BreakerEvent.SUCCESS, lost) is BreakerPhase.HALF_OPEN
    assert scenario.state.successes == 0


def test_probing_by_duration_permits_every_call_and_closes_after_the_period():
    scenario, _ = half_opened(AGENTS)
    for _ in range(20):
        scenario.permit()
    scenario.advance(4_999)
    assert scenario.apply(BreakerEvent.PEEK) == BreakerSnapshot(BreakerPhase.HALF_OPEN, BreakerPhase.HALF_OPEN, 5, 1)
    assert scenario.advance(1).apply(BreakerEvent.PEEK) == BreakerSnapshot(
        BreakerPhase.HALF_OPEN, BreakerPhase.CLOSED, 0, 0
    )


def test_probing_by_duration_reopens_after_one_failure():
    scenario, probe = half_opened(AGENTS)
    assert scenario.advance(4_999).report(BreakerEvent.FAILURE, probe) is BreakerPhase.OPEN


@pytest.mark.parametrize("event", [BreakerEvent.SUCCESS, BreakerEvent.FAILURE, BreakerEvent.CANCEL])
def test_report_from_before_a_transition_is_ignored(event):
    scenario = Scenario(SAFETY)
    early = scenario.permit()
    scenario.fail(3)
    scenario.advance(30_000).permit()
    before = scenario.state
    scenario.report(event, early)
    assert scenario.state == before


def test_late_failure_is_not_counted_after_recovery():
    scenario = Scenario(SAFETY)
    early = scenario.permit()
    scenario.fail(3)
    scenario.advance(30_000).succeed()
    assert scenario.succeed() is BreakerPhase.CLOSED
    for _ in range(3):
        assert scenario.report(BreakerEvent.FAILURE, early) is BreakerPhase.CLOSED


def test_generation_is_not_reused_after_the_state_was_lost():
    scenario, probe = half_opened(SAFETY)
    scenario.state = BreakerState()
    scenario.advance(1)
    scenario.fail(3)
    scenario.advance(30_000).permit()
    assert scenario.state.generation > probe


def test_clock_set_back_does_not_extend_the_open_period():
    scenario = opened(SAFETY).advance(-3_600_000)
    assert scenario.rejected_for_ms() == 30_000
    assert scenario.advance(30_000).permit()


def test_clock_set_back_does_not_extend_the_expiry_of_lost_probes():
    scenario, _ = half_opened(SAFETY)
    scenario.permit()
    scenario.permit()
    assert scenario.advance(-3_600_000).rejected_for_ms() == 10_000
    assert scenario.advance(10_000).permit()


def test_step_result_names_the_previous_and_the_new_phase():
    scenario = opened(SAFETY)
    assert scenario.apply(BreakerEvent.ALLOW).was is BreakerPhase.OPEN
    verdict = scenario.advance(30_000).apply(BreakerEvent.ALLOW)
    assert (verdict.was, verdict.phase) == (BreakerPhase.OPEN, BreakerPhase.HALF_OPEN)
    verdict = scenario.apply(BreakerEvent.ALLOW)
    assert (verdict.was, verdict.phase) == (BreakerPhase.HALF_OPEN, BreakerPhase.HALF_OPEN)


def resumed(seen, age_ms, rules=SAFETY):
    scenario = Scenario(rules)
    scenario.state = fallback_state(rules, seen, age_ms, scenario.now)
    return scenario


def test_fallback_stays_open_for_the_remaining_time():
    scenario = resumed(CallRejected(BreakerPhase.OPEN, BreakerPhase.OPEN, 3, retry_ms=20_000), age_ms=5_000)
    assert scenario.rejected_for_ms() == 15_000


def test_fallback_continues_the_shared_failure_count():
    scenario = resumed(CallPermitted(BreakerPhase.CLOSED, BreakerPhase.CLOSED, failures=2, generation=9), age_ms=100)
    assert scenario.fail() is BreakerPhase.OPEN


def test_fallback_after_half_open_probes_at_once_with_the_same_cap():
    scenario = resumed(
        CallPermitted(BreakerPhase.HALF_OPEN, BreakerPhase.HALF_OPEN, failures=3, generation=9), age_ms=100
    )
    assert [scenario.permit() for _ in range(3)]
    scenario.rejected_for_ms()


@pytest.mark.parametrize(
    "rules",
    [
        {"counting": ConsecutiveFailures(0)},
        {"counting": WindowedFailures(5, window_ms=0)},
        {"open_ms": 0},
        {"probing": ProbesByCount(3, successes=4)},
        {"probing": ProbesByCount(3, successes=0)},
        {"probing": ProbesByCount(3, successes=2, lost_after_ms=0)},
        {"probing": ProbesByDuration(0)},
    ],
)
def test_breaker_config_that_cannot_work_is_refused(rules):
    given = {"counting": ConsecutiveFailures(3), "open_ms": 1000, "probing": ProbesByDuration(5_000)}
    with pytest.raises(InvalidSetting):
        BreakerConfig(**{**given, **rules})
