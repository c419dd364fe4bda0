"""From which number on news is looked for: never above what may still appear for long."""

from rota.testing.clock import MovableClock
from rota.workflow.inbox_cursor import LAG_S, POLL_INTERVAL_S, InboxCursor


def test_all_news_is_looked_at_at_first_and_then_every_second():
    clock = MovableClock()
    floor = InboxCursor(clock)
    floor.record_taken(1000)
    clock.advance(LAG_S + 0.1)
    assert floor.position() == 0
    assert floor.position() == 1000
    clock.advance(POLL_INTERVAL_S)
    assert floor.position() == 0


def test_what_was_taken_lately_is_looked_behind():
    clock = MovableClock()
    floor = InboxCursor(clock)
    floor.position()
    floor.record_taken(1000)
    clock.advance(POLL_INTERVAL_S / 2)
    assert floor.position() == 0
    clock.advance(LAG_S)
    floor.record_taken(5000)
    assert (floor.position(), floor.position()) == (0, 1000)


def test_news_that_appears_late_takes_the_floor_back():
    clock = MovableClock()
    floor = InboxCursor(clock)
    floor.record_taken(1000)
    clock.advance(LAG_S + 1)
    floor.record_taken(10)
    clock.advance(LAG_S + 1)
    assert (floor.position(), floor.position()) == (0, 10)
