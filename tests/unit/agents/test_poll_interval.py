"""When the scheduler polls again: at once if work is left, batched where possible, rarely when nothing is due."""

import asyncio

import pytest

from rota.agents.acquisition import CycleResult
from rota.agents.concurrency_permits import PermitPool
from rota.agents.poll_interval import POLL_INTERVAL_MAX_S, POLL_INTERVAL_MIN_S, PollPacer
from tests.support.agents import ignore

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
    """Seconds from an instantaneous cycle to the next one when nothing wakes the pacer."""
    permits = PermitPool(most, ignore)
    permits.held = most - free
    pace = PollPacer(clock, permits, asyncio.Event(), INTERVAL_S)
    began_at = pace.begin_cycle()
    pace._longest_s = POLL_INTERVAL_MAX_S if steady else INTERVAL_S
    if seen is not None:
        pace._server_ms, pace._read_at = seen.now_ms, began_at
        if seen.next_ms:
            pace.on_due_time(seen.next_ms)
    if due_ms is not None:
        pace.on_due_time(due_ms)
    return pace._next_cycle_at(seen, began_at) - began_at


@pytest.mark.parametrize(
    ("seen", "given", "wanted_s"),
    [
        (CycleResult(now_ms=1000), {}, POLL_INTERVAL_MAX_S),
        (CycleResult(now_ms=1000, next_ms=3000), {}, 2.0),
        (CycleResult(now_ms=1000, next_ms=86_400_000), {}, POLL_INTERVAL_MAX_S),
        (CycleResult(now_ms=1000, next_ms=1010), {}, POLL_INTERVAL_MIN_S),
        (CycleResult(now_ms=1000), {"due_ms": 2500}, 1.5),
        (CycleResult(now_ms=1000), {"steady": False}, INTERVAL_S),
        (CycleResult(now_ms=1000, ready=5, passed=5), {}, INTERVAL_S),
        (CycleResult(now_ms=1000, ready=9, mine=9, acquired=5), {"free": 5}, 0.0),
        (CycleResult(now_ms=1000, ready=9, mine=9, acquired=5), {"free": 1}, POLL_INTERVAL_MIN_S),
        (CycleResult(now_ms=1000, ready=9, mine=9), {"free": 0}, INTERVAL_S),
        (CycleResult(now_ms=1000, ready=9000, mine=1000, acquired=1000, unseen=True), {"free": 5}, 0.0),
        (CycleResult(now_ms=1000, ready=9000, mine=1000, acquired=1000, unseen=True), {"free": 1}, POLL_INTERVAL_MIN_S),
        (CycleResult(now_ms=1000, ready=9000, passed=1000, unseen=True), {}, INTERVAL_S),
        (None, {}, INTERVAL_S),
    ],
)
def test_next_poll_comes_when_the_state_can_have_changed(clock, seen, given, wanted_s):
    assert waits_s(clock, seen, **given) == pytest.approx(wanted_s)


async def test_wake_ends_the_wait_at_once(clock):
    pace = PollPacer(clock, PermitPool(1, ignore), asyncio.Event(), INTERVAL_S)
    waiting = asyncio.create_task(pace.wait_for_next_cycle(CycleResult(now_ms=1000), pace.begin_cycle()))
    await asyncio.sleep(0)
    pace.wake()
    async with asyncio.timeout(5):
        await waiting


async def test_released_permit_ends_the_wait_of_agents_that_are_due(clock):
    changed = asyncio.Event()
    permits = PermitPool(1, changed.set)
    pace = PollPacer(clock, permits, changed, INTERVAL_S)
    [permit] = permits.take(1)
    due = CycleResult(now_ms=1000, ready=1, mine=1)
    waiting = asyncio.create_task(pace.wait_for_next_cycle(due, pace.begin_cycle()))
    await asyncio.sleep(0)
    assert not waiting.done()
    permit.release()
    async with asyncio.timeout(5):
        await waiting
