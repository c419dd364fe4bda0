"""When the loop looks again: at once where it matters, together where it can, and rarely when nothing is due."""

import asyncio

import pytest

from rota.agents.acquisition import Seen
from rota.agents.pacing import GAP_S, LOOK_S, Pace
from rota.agents.permits import Permits

INTERVAL_S = 1.0


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def waits_s(clock, seen, *, free=10, most=10, due_ms=None, steady=True):
    """How long after a cycle of no time the next one comes, if nobody says anything."""
    permits = Permits(most)
    permits.held = most - free
    pace = Pace(clock, permits, INTERVAL_S)
    began_at = pace.begin()
    pace._longest_s = LOOK_S if steady else INTERVAL_S
    if seen is not None:
        pace._server_ms, pace._read_at = seen.now_ms, began_at
        if seen.next_ms:
            pace.due(seen.next_ms)
    if due_ms is not None:
        pace.due(due_ms)
    return pace._moment(seen, began_at) - began_at


@pytest.mark.parametrize(
    ("seen", "given", "wanted_s"),
    [
        (Seen(now_ms=1000), {}, LOOK_S),
        (Seen(now_ms=1000, next_ms=3000), {}, 2.0),
        (Seen(now_ms=1000, next_ms=86_400_000), {}, LOOK_S),
        (Seen(now_ms=1000, next_ms=1010), {}, GAP_S),
        (Seen(now_ms=1000), {"due_ms": 2500}, 1.5),
        (Seen(now_ms=1000), {"steady": False}, INTERVAL_S),
        (Seen(now_ms=1000, ready=5, passed=5), {}, INTERVAL_S),
        (Seen(now_ms=1000, ready=9, mine=9, acquired=5), {"free": 5}, 0.0),
        (Seen(now_ms=1000, ready=9, mine=9, acquired=5), {"free": 1}, GAP_S),
        (Seen(now_ms=1000, ready=9, mine=9), {"free": 0}, INTERVAL_S),
        (Seen(now_ms=1000, ready=9000, mine=1000, acquired=1000, unseen=True), {"free": 5}, 0.0),
        (Seen(now_ms=1000, ready=9000, mine=1000, acquired=1000, unseen=True), {"free": 1}, GAP_S),
        (Seen(now_ms=1000, ready=9000, passed=1000, unseen=True), {}, INTERVAL_S),
        (None, {}, INTERVAL_S),
    ],
)
def test_the_next_look_comes_when_something_can_have_changed(clock, seen, given, wanted_s):
    assert waits_s(clock, seen, **given) == pytest.approx(wanted_s)


async def test_a_nudge_ends_the_wait_at_once(clock):
    pace = Pace(clock, Permits(1), INTERVAL_S)
    waiting = asyncio.create_task(pace.until_next(Seen(now_ms=1000), pace.begin()))
    await asyncio.sleep(0)
    pace.nudge()
    async with asyncio.timeout(5):
        await waiting
