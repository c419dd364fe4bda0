"""The inbox cursor: the position from which events are read, never above one that may still appear."""

from rota.testing.clock import MovableClock
from rota.workflow.inbox_cursor import LAG_S, POLL_INTERVAL_S, InboxCursor


def test_cursor_reads_the_whole_inbox_at_first_and_then_once_per_poll_interval():
    clock = MovableClock()
    cursor = InboxCursor(clock)
    cursor.record_taken(1000)
    clock.advance(LAG_S + 0.1)
    assert cursor.position() == 0
    assert cursor.position() == 1000
    clock.advance(POLL_INTERVAL_S)
    assert cursor.position() == 0


def test_cursor_stays_behind_recently_taken_events():
    clock = MovableClock()
    cursor = InboxCursor(clock)
    cursor.position()
    cursor.record_taken(1000)
    clock.advance(POLL_INTERVAL_S / 2)
    assert cursor.position() == 0
    clock.advance(LAG_S)
    cursor.record_taken(5000)
    assert (cursor.position(), cursor.position()) == (0, 1000)


def test_late_event_moves_the_cursor_back():
    clock = MovableClock()
    cursor = InboxCursor(clock)
    cursor.record_taken(1000)
    clock.advance(LAG_S + 1)
    cursor.record_taken(10)
    clock.advance(LAG_S + 1)
    assert (cursor.position(), cursor.position()) == (0, 10)
