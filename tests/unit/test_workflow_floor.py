"""From which number on news is looked for: never above what may still appear for long."""

from rota.testing.clock import MovableClock
from rota.workflow.floor import LAG_S, LOOK_S, Floor


def test_all_news_is_looked_at_at_first_and_then_every_second():
    clock = MovableClock()
    floor = Floor(clock)
    floor.took(1000)
    clock.advance(LAG_S + 0.1)
    assert floor.since() == 0
    assert floor.since() == 1000
    clock.advance(LOOK_S)
    assert floor.since() == 0


def test_what_was_taken_lately_is_looked_behind():
    clock = MovableClock()
    floor = Floor(clock)
    floor.since()
    floor.took(1000)
    clock.advance(LOOK_S / 2)
    assert floor.since() == 0
    clock.advance(LAG_S)
    floor.took(5000)
    assert (floor.since(), floor.since()) == (0, 1000)


def test_news_that_appears_late_takes_the_floor_back():
    clock = MovableClock()
    floor = Floor(clock)
    floor.took(1000)
    clock.advance(LAG_S + 1)
    floor.took(10)
    clock.advance(LAG_S + 1)
    assert (floor.since(), floor.since()) == (0, 10)
