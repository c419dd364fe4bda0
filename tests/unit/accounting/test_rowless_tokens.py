"""Tokens that only Redis counts: given up after a while, and compared again only while their show is refused."""

from uuid import uuid4

from rota.accounting.suspected_shows import FORGET_S, PAUSE_PER_DURATION, ROWLESS_S, SuspectedShows

SHOW = uuid4()


def test_token_is_given_up_when_it_had_no_row_for_a_while():
    shows = SuspectedShows()
    assert shows.rowless_before(SHOW, {1, 2}, 0.0) == []
    assert shows.set_rowless(SHOW, {1, 2}, 0.0, 0.0) == ROWLESS_S
    assert shows.rowless_before(SHOW, {1}, ROWLESS_S / 2) == []
    assert shows.rowless_before(SHOW, {1, 3}, ROWLESS_S) == [1]
    assert shows.set_rowless(SHOW, {1}, 0.0, ROWLESS_S) is None, "it is not new"


def test_token_that_had_a_row_meanwhile_begins_anew():
    shows = SuspectedShows()
    shows.set_rowless(SHOW, {1}, 0.0, 0.0)
    shows.set_rowless(SHOW, set(), 0.0, 1.0)
    assert shows.rowless_before(SHOW, {1}, 2 * ROWLESS_S) == []


def test_large_show_is_compared_again_after_a_pause_and_only_while_it_is_refused():
    shows = SuspectedShows()
    assert shows.set_rowless(SHOW, {1}, 2.0, 0.0) == 2.0 * PAUSE_PER_DURATION
    assert not shows.is_refused(SHOW, 0.0)
    shows.refused(SHOW, 1.0)
    assert shows.is_refused(SHOW, 1.0 + FORGET_S)
    assert not shows.is_refused(SHOW, 1.1 + FORGET_S)
