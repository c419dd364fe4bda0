"""Changes of limits that nobody pushes are found, and those that are pushed are not."""

from uuid import uuid4

import pytest

from rota.accounting.unpushed_limits import PATIENCE_S, PUSHED, UnpushedLimits
from rota.model.ids import ShowId

FILM, SHORT = ShowId(uuid4()), ShowId(uuid4())


@pytest.fixture
def unpushed():
    return UnpushedLimits()


def test_change_without_a_push_is_due_once_after_a_moment(unpushed):
    unpushed.notified(str(FILM), 10.0)
    assert not unpushed.take_due(10.0 + PATIENCE_S / 2)
    assert unpushed.take_due(10.0 + PATIENCE_S) == {FILM}
    assert not unpushed.take_due(20.0)


def test_pushed_change_is_not_due(unpushed):
    unpushed.notified(str(FILM), 10.0)
    unpushed.notified(str(SHORT), 10.0)
    unpushed.notified(f"{PUSHED}{FILM}", 10.1)
    assert unpushed.take_due(20.0) == {SHORT}


def test_changes_that_go_on_do_not_delay_the_first(unpushed):
    unpushed.notified(str(FILM), 10.0)
    unpushed.notified(str(FILM), 10.9)
    assert unpushed.take_due(11.0) == {FILM}


@pytest.mark.parametrize("payload", ["", "film", PUSHED])
def test_notification_sent_by_hand_is_ignored(unpushed, payload):
    unpushed.notified(payload, 10.0)
    assert not unpushed.take_due(20.0)
