"""Shows whose bookings and ends meet a lock: when they are tried, and how long they count as locked."""

from uuid import UUID

import pytest

from rota.accounting.show_isolation import ATTEMPT_BACKOFF, RECENT_S, LockedShows
from rota.model.errors import PostgresBusy

SHOW, OTHER = UUID(int=1), UUID(int=2)


class ManualClock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def locked(clock):
    shows = LockedShows(clock)
    with pytest.raises(PostgresBusy), shows.attempt(SHOW):
        raise PostgresBusy("a lock")
    return shows


def test_locked_show_is_blocked_until_its_pause_is_over_and_during_an_attempt(locked, clock):
    assert locked.blocks(SHOW)
    assert not locked.blocks(OTHER)
    clock.now_s += ATTEMPT_BACKOFF.longest_s
    assert not locked.blocks(SHOW)
    with locked.attempt(SHOW):
        assert locked.blocks(SHOW)
    assert not locked


def test_show_without_further_attempts_does_not_count_as_locked_for_long(locked, clock):
    assert SHOW in locked
    clock.now_s += ATTEMPT_BACKOFF.longest_s + RECENT_S
    assert SHOW not in locked
