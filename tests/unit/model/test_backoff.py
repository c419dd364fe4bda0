"""Pauses between tries."""

import pytest

from rota.model.backoff import Backoff, DispatchBackoff


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_pauses_double_up_to_a_cap_and_are_spread_over_their_upper_half(chance):
    pauses = [Backoff(first_s=1.0, longest_s=8.0).pause_s(streak, chance) for streak in (1, 2, 3, 4, 5, 5000)]
    assert pauses == [whole * (0.5 + chance / 2) for whole in (1, 2, 4, 8, 8, 8)]


@pytest.mark.parametrize(
    ("attempt", "least_s", "most_s"),
    [(0, 1.0, 1.5), (1, 2.0, 2.5), (2, 4.0, 4.5), (5, 30.0, 30.0), (-1, 1.0, 1.5), (-(10**6), 1.0, 1.5)],
)
def test_a_failed_dispatch_is_tried_again_after_doubled_pauses_with_jitter_on_top(attempt, least_s, most_s):
    pauses = DispatchBackoff()
    assert pauses.pause_s(attempt, 0.0) == least_s
    assert pauses.pause_s(attempt, 0.999) == pytest.approx(most_s, abs=0.001)


@pytest.mark.parametrize("attempt", [50, 1023, 1024, 2**31, 10**30])
def test_the_cap_holds_for_the_jitter_too_and_for_any_number_of_attempts(attempt):
    assert DispatchBackoff().pause_s(attempt, 0.999) == 30.0
    assert DispatchBackoff(first_s=366 * 86400.0, longest_s=366 * 86400.0).pause_s(attempt, 0.5) == 366 * 86400.0


def test_pauses_of_a_dispatch_grow_with_every_failure_until_the_cap():
    pauses = [DispatchBackoff().pause_s(attempt, 0.5) for attempt in range(6)]
    assert pauses == sorted(set(pauses))
