"""The breaker's machine, told as stories. What holds for every sequence of events is in tests/property."""

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


class Story:
    """A machine with a clock that moves only when told."""

    def __init__(self, rules):
        self.rules = rules
        self.state = BreakerState()
        self.now = 1_000_000

    def later(self, ms):
        self.now += ms
        return self

    def turn(self, event, generation=0):
        self.state, verdict = step(self.rules, self.state, event, generation, self.now)
        return verdict

    def grant(self):
        verdict = self.turn(BreakerEvent.ALLOW)
        assert isinstance(verdict, CallPermitted), verdict
        return verdict.generation

    def refusal(self):
        verdict = self.turn(BreakerEvent.ALLOW)
        assert isinstance(verdict, CallRejected), verdict
        return verdict.retry_ms

    def report(self, event, generation):
        self.turn(event, generation)
        return self.state.phase

    def fail(self, times=1):
        for _ in range(times):
            self.report(BreakerEvent.FAILURE, self.grant())
        return self.state.phase

    def succeed(self):
        return self.report(BreakerEvent.SUCCESS, self.grant())


def opened(rules):
    story = Story(rules)
    assert story.fail(rules.counting.failures) is BreakerPhase.OPEN
    return story


def half_opened(rules):
    story = opened(rules).later(rules.open_ms)
    return story, story.grant()


def test_three_failures_in_a_row_open_it():
    story = Story(SAFETY)
    assert story.fail(2) is BreakerPhase.CLOSED
    assert story.fail() is BreakerPhase.OPEN


def test_a_success_between_starts_the_row_anew():
    story = Story(SAFETY)
    story.fail(2)
    story.succeed()
    assert story.fail(2) is BreakerPhase.CLOSED


def test_open_is_counted_from_the_trip_and_says_how_long_to_wait():
    story = Story(SAFETY)
    story.fail(2)
    story.later(29_000).fail()
    assert story.refusal() == 30_000
    assert story.later(29_999).refusal() == 1
    assert story.later(1).grant()
    assert story.state.phase is BreakerPhase.HALF_OPEN


def test_five_failures_within_the_window_open_it_whatever_succeeds_between():
    story = Story(AGENTS)
    for _ in range(4):
        story.fail()
        story.later(2_400).succeed()
    assert story.fail() is BreakerPhase.OPEN


def test_failures_older_than_the_window_do_not_count():
    story = Story(AGENTS)
    story.fail(4)
    assert story.later(10_000).fail(4) is BreakerPhase.CLOSED
    assert story.state.failures == 4


def test_the_window_slides_so_that_no_boundary_hides_failures():
    story = Story(AGENTS)
    story.later(9_000).fail(3)
    assert story.later(2_000).fail(2) is BreakerPhase.OPEN


def test_half_open_lets_three_probes_through_and_no_more():
    story, _ = half_opened(SAFETY)
    story.grant()
    story.grant()
    assert story.refusal() == 10_000


def test_two_successes_close_it_and_forget_the_failures():
    story, probe = half_opened(SAFETY)
    assert story.report(BreakerEvent.SUCCESS, probe) is BreakerPhase.HALF_OPEN
    assert story.succeed() is BreakerPhase.CLOSED
    assert story.state.failures == 0


def test_one_failed_probe_opens_it_for_the_whole_time_again():
    story, probe = half_opened(SAFETY)
    story.report(BreakerEvent.SUCCESS, probe)
    assert story.fail() is BreakerPhase.OPEN
    assert story.refusal() == 30_000
    assert story.state.failures == 4


def test_a_cancelled_probe_gives_its_place_back():
    story, probe = half_opened(SAFETY)
    story.grant()
    story.grant()
    story.report(BreakerEvent.CANCEL, probe)
    story.grant()
    story.refusal()


def test_probes_that_never_report_do_not_wedge_it():
    story, lost = half_opened(SAFETY)
    story.grant()
    story.later(4_000).grant()
    assert story.later(9_999).refusal() == 1
    fresh = story.later(1).grant()
    assert fresh != lost
    assert story.report(BreakerEvent.SUCCESS, lost) is BreakerPhase.HALF_OPEN
    assert story.state.successes == 0


def test_by_duration_every_call_goes_through_and_surviving_closes():
    story, _ = half_opened(AGENTS)
    for _ in range(20):
        story.grant()
    story.later(4_999)
    assert story.turn(BreakerEvent.PEEK) == BreakerSnapshot(BreakerPhase.HALF_OPEN, BreakerPhase.HALF_OPEN, 5, 1)
    assert story.later(1).turn(BreakerEvent.PEEK) == BreakerSnapshot(BreakerPhase.HALF_OPEN, BreakerPhase.CLOSED, 0, 0)


def test_by_duration_one_failure_opens_it_again():
    story, probe = half_opened(AGENTS)
    assert story.later(4_999).report(BreakerEvent.FAILURE, probe) is BreakerPhase.OPEN


@pytest.mark.parametrize("event", [BreakerEvent.SUCCESS, BreakerEvent.FAILURE, BreakerEvent.CANCEL])
def test_a_call_from_before_a_transition_changes_nothing_after_it(event):
    story = Story(SAFETY)
    early = story.grant()
    story.fail(3)
    story.later(30_000).grant()
    before = story.state
    story.report(event, early)
    assert story.state == before


def test_a_late_failure_does_not_count_in_a_breaker_that_has_recovered():
    story = Story(SAFETY)
    early = story.grant()
    story.fail(3)
    story.later(30_000).succeed()
    assert story.succeed() is BreakerPhase.CLOSED
    for _ in range(3):
        assert story.report(BreakerEvent.FAILURE, early) is BreakerPhase.CLOSED


def test_a_generation_is_not_used_again_when_the_state_was_lost():
    story, probe = half_opened(SAFETY)
    story.state = BreakerState()
    story.later(1)
    story.fail(3)
    story.later(30_000).grant()
    assert story.state.generation > probe


def test_a_clock_that_goes_back_an_hour_does_not_keep_it_open_for_an_hour():
    story = opened(SAFETY).later(-3_600_000)
    assert story.refusal() == 30_000
    assert story.later(30_000).grant()


def test_a_clock_that_goes_back_does_not_wedge_lost_probes():
    story, _ = half_opened(SAFETY)
    story.grant()
    story.grant()
    assert story.later(-3_600_000).refusal() == 10_000
    assert story.later(10_000).grant()


def test_the_step_that_makes_a_transition_says_so():
    story = opened(SAFETY)
    assert story.turn(BreakerEvent.ALLOW).was is BreakerPhase.OPEN
    verdict = story.later(30_000).turn(BreakerEvent.ALLOW)
    assert (verdict.was, verdict.phase) == (BreakerPhase.OPEN, BreakerPhase.HALF_OPEN)
    verdict = story.turn(BreakerEvent.ALLOW)
    assert (verdict.was, verdict.phase) == (BreakerPhase.HALF_OPEN, BreakerPhase.HALF_OPEN)


def resumed_story(seen, age_ms, rules=SAFETY):
    story = Story(rules)
    story.state = fallback_state(rules, seen, age_ms, story.now)
    return story


def test_alone_it_stays_open_for_the_time_that_was_left():
    story = resumed_story(CallRejected(BreakerPhase.OPEN, BreakerPhase.OPEN, 3, retry_ms=20_000), age_ms=5_000)
    assert story.refusal() == 15_000


def test_alone_it_keeps_counting_where_the_shared_count_stood():
    story = resumed_story(CallPermitted(BreakerPhase.CLOSED, BreakerPhase.CLOSED, failures=2, generation=9), age_ms=100)
    assert story.fail() is BreakerPhase.OPEN


def test_alone_after_half_open_it_probes_at_once_under_the_same_cap():
    story = resumed_story(
        CallPermitted(BreakerPhase.HALF_OPEN, BreakerPhase.HALF_OPEN, failures=3, generation=9), age_ms=100
    )
    assert [story.grant() for _ in range(3)]
    story.refusal()


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
def test_rules_under_which_it_could_never_work_are_refused(rules):
    given = {"counting": ConsecutiveFailures(3), "open_ms": 1000, "probing": ProbesByDuration(5_000)}
    with pytest.raises(InvalidSetting):
        BreakerConfig(**{**given, **rules})
