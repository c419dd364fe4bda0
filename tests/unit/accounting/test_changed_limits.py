"""Each change of limits is due once, a moment later; notifications of pushes are not changes."""

from uuid import UUID

import pytest

from rota.accounting.changed_limits import COPY_DELAY_S, ChangedLimits
from rota.model.ids import ShowId

FILM, SHORT = ShowId(UUID(int=1)), ShowId(UUID(int=2))


@pytest.fixture
def changed():
    return ChangedLimits()


def test_change_is_due_once_after_a_moment(changed):
    changed.notified(str(FILM), 10.0)
    assert not changed.take_due(10.0 + COPY_DELAY_S / 2)
    assert changed.take_due(10.0 + COPY_DELAY_S) == {FILM}
    assert not changed.take_due(20.0)


def test_changes_that_go_on_do_not_delay_the_first(changed):
    changed.notified(str(FILM), 10.0)
    changed.notified(str(FILM), 10.9)
    changed.notified(str(SHORT), 10.9)
    assert changed.take_due(11.0) == {FILM}


@pytest.mark.parametrize("payload", [f"pushed:{FILM}", f"released:{FILM}", "", "film"])
def test_other_notifications_are_no_changes(changed, payload):
    changed.notified(str(SHORT), 10.0)
    changed.notified(payload, 10.0)
    assert changed.take_due(20.0) == {SHORT}


def test_push_of_another_change_does_not_end_the_wait(changed):
    """It may have pushed its own limit only."""
    changed.notified(str(FILM), 10.0)
    changed.notified(f"pushed:{FILM}", 10.1)
    assert changed.take_due(11.0) == {FILM}
