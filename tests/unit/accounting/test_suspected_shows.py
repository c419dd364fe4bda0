"""When a show that is refused is compared with PostgreSQL."""

from uuid import UUID

from rota.accounting.suspected_shows import FORGET_S, PATIENCE_S, PAUSE_PER_DURATION, SuspectedShows

SHOW, OTHER = UUID(int=1), UUID(int=2)


def refused_at(shows, *times_s, show=SHOW):
    return [time_s for time_s in times_s if shows.refused(show, time_s)]


def test_show_is_compared_when_it_is_still_refused_after_a_moment():
    assert refused_at(SuspectedShows(), 0.0, PATIENCE_S / 2, PATIENCE_S, PATIENCE_S + 0.1) == [PATIENCE_S]


def test_show_that_stays_refused_is_compared_again():
    times_s = [tenth / 10 for tenth in range(100)]
    assert refused_at(SuspectedShows(), *times_s) == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_refusals_of_another_show_or_long_ago_do_not_count():
    shows = SuspectedShows()
    assert refused_at(shows, 0.0, 0.5) == []
    assert refused_at(shows, 1.0, show=OTHER) == []
    assert refused_at(shows, 0.6 + FORGET_S, 100.0) == []


def test_show_whose_refusals_are_some_seconds_apart_is_compared():
    assert refused_at(SuspectedShows(), 0.0, 2.1, 4.2) == [2.1, 4.2]


def test_long_comparisons_are_rare():
    shows = SuspectedShows()
    assert refused_at(shows, 0.0, 1.0) == [1.0]
    shows.compared(SHOW, 1.0, 2.0)
    every_second = range(2, 2 * int(PAUSE_PER_DURATION))
    assert refused_at(shows, *every_second) == [2 + PAUSE_PER_DURATION, *range(54, 100, 2)]
