"""Delays between retries."""

import pytest

from rota.model.backoff import Backoff, DispatchBackoff


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_backoff_doubles_up_to_the_cap_with_jitter_over_the_upper_half(chance):
    delays = [Backoff(first_s=1.0, longest_s=8.0).pause_s(streak, chance) for streak in (1, 2, 3, 4, 5, 5000)]
    assert delays == [whole * (0.5 + chance / 2) for whole in (1, 2, 4, 8, 8, 8)]


@pytest.mark.parametrize(
    ("attempt", "least_s", "most_s"),
    [(0, 1.0, 1.5), (1, 2.0, 2.5), (2, 4.0, 4.5), (5, 30.0, 30.0), (-1, 1.0, 1.5), (-(10**6), 1.0, 1.5)],
)
def test_dispatch_backoff_doubles_with_jitter_added(attempt, least_s, most_s):
    backoff = DispatchBackoff()
    assert backoff.pause_s(attempt, 0.0) == least_s
    assert backoff.pause_s(attempt, 0.999) == pytest.approx(most_s, abs=0.001)


@pytest.mark.parametrize("attempt", [50, 1023, 1024, 2**31, 10**30])
def test_dispatch_backoff_cap_includes_jitter_for_any_attempt(attempt):
    assert DispatchBackoff().pause_s(attempt, 0.999) == 30.0
    assert DispatchBackoff(first_s=366 * 86400.0, longest_s=366 * 86400.0).pause_s(attempt, 0.5) == 366 * 86400.0


def test_dispatch_backoff_grows_with_every_attempt_until_the_cap():
    delays = [DispatchBackoff().pause_s(attempt, 0.5) for attempt in range(6)]
    assert delays == sorted(set(delays))
