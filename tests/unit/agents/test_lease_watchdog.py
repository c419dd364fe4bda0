"""No body takes a step past the lease, and one that blocks the loop past it takes the process with it."""

import asyncio
import threading

import pytest

from rota.agents import lease_watchdog
from rota.agents.lease_watchdog import CancelOnLeaseExpiry, EventLoopWatchdog
from rota.infra.clock import SystemClock
from tests.support.waiting import until


class Over:
    def __init__(self):
        self.holds = False

    def __call__(self):
        return self.holds


@pytest.fixture
def over():
    return Over()


async def test_a_body_goes_on_as_without_it_while_the_lease_lives(over):
    async def body():
        await asyncio.sleep(0)
        return await asyncio.create_task(asyncio.sleep(0, "slept"))

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("no luck")

    assert await CancelOnLeaseExpiry(body(), over) == "slept"
    with pytest.raises(ValueError, match="no luck"):
        await CancelOnLeaseExpiry(fails(), over)


async def test_past_the_lease_the_next_step_is_a_cancellation_and_cleaning_goes_on(over):
    steps = []
    gate = asyncio.get_running_loop().create_future()

    async def body():
        try:
            await gate
            steps.append("went on")
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned")

    task = asyncio.create_task(_leashed(body(), over))
    await asyncio.sleep(0)
    over.holds = True
    gate.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["cleaned"]


async def test_a_body_that_was_not_begun_before_the_end_of_the_lease_never_is(over):
    began = []

    async def body():
        began.append(1)

    over.holds = True
    with pytest.raises(asyncio.CancelledError):
        await CancelOnLeaseExpiry(body(), over)
    assert began == []


async def test_a_cancellation_from_outside_reaches_the_body_as_ever(over):
    seen = []

    async def body():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            seen.append(error.args)
            raise

    task = asyncio.create_task(_leashed(body(), over))
    await asyncio.sleep(0)
    task.cancel("stop")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [("stop",)]


async def test_what_is_awaited_need_not_be_a_coroutine(over):
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 7)
    assert await CancelOnLeaseExpiry(future, over) == 7


async def _leashed(work, over):
    return await CancelOnLeaseExpiry(work, over)


def guarded(loop, until_s, busy=True):
    ended = threading.Event()
    guard = EventLoopWatchdog(loop, SystemClock(), lambda: until_s, lambda: busy, lambda _status: ended.set())
    guard.start()
    return guard, ended


async def test_a_loop_that_is_blocked_past_the_lease_ends_the_process():
    _, ended = guarded(asyncio.get_running_loop(), 0.0)
    assert ended.wait(10), "this blocks the loop"


async def test_a_loop_that_answers_and_one_without_bodies_are_left_alone():
    guard, ended = guarded(asyncio.get_running_loop(), 0.0)
    answered = asyncio.Event()
    guard._loop_responds = _noting(guard._loop_responds, asyncio.get_running_loop(), answered)
    await until(answered.is_set)
    guard.stop()
    idle, nobody = guarded(asyncio.get_running_loop(), 0.0, busy=False)
    idle._busy = _noting(lambda: False, asyncio.get_running_loop(), asked := asyncio.Event())
    await until(asked.is_set)
    idle.stop()
    assert not ended.is_set()
    assert not nobody.is_set()


def _noting(ask, loop, event):
    def asked():
        found = ask()
        loop.call_soon_threadsafe(event.set)
        return found

    return asked


async def test_a_log_that_nobody_reads_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr(lease_watchdog, "_log_blocked_loop", threading.Event().wait)
    _, ended = guarded(asyncio.get_running_loop(), 0.0)
    assert ended.wait(10), "this blocks the loop"
