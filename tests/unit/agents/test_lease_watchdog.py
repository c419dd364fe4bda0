"""A run takes no step after its lease expires; a run that blocks the event loop past its lease ends the process."""

import asyncio
import threading

import pytest

from rota.agents import lease_watchdog
from rota.agents.lease_watchdog import CancelOnLeaseExpiry, EventLoopWatchdog
from rota.infra.clock import SystemClock
from tests.support.waiting import until


class LeaseExpired:
    def __init__(self):
        self.value = False

    def __call__(self):
        return self.value


@pytest.fixture
def lease_expired():
    return LeaseExpired()


async def test_run_within_its_lease_behaves_as_without_watchdog(lease_expired):
    async def body():
        await asyncio.sleep(0)
        return await asyncio.create_task(asyncio.sleep(0, "slept"))

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("no luck")

    assert await CancelOnLeaseExpiry(body(), lease_expired) == "slept"
    with pytest.raises(ValueError, match="no luck"):
        await CancelOnLeaseExpiry(fails(), lease_expired)


async def test_run_past_its_lease_is_cancelled_at_the_next_step_and_cleans_up(lease_expired):
    steps = []
    gate = asyncio.get_running_loop().create_future()

    async def body():
        try:
            await gate
            steps.append("went on")
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned")

    task = asyncio.create_task(_with_watchdog(body(), lease_expired))
    await asyncio.sleep(0)
    lease_expired.value = True
    gate.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["cleaned"]


async def test_run_not_started_before_lease_expiry_never_starts(lease_expired):
    began = []

    async def body():
        began.append(1)

    lease_expired.value = True
    with pytest.raises(asyncio.CancelledError):
        await CancelOnLeaseExpiry(body(), lease_expired)
    assert began == []


async def test_cancellation_from_outside_reaches_the_run(lease_expired):
    seen = []

    async def body():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            seen.append(error.args)
            raise

    task = asyncio.create_task(_with_watchdog(body(), lease_expired))
    await asyncio.sleep(0)
    task.cancel("stop")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [("stop",)]


async def test_watchdog_accepts_an_awaitable_that_is_not_a_coroutine(lease_expired):
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 7)
    assert await CancelOnLeaseExpiry(future, lease_expired) == 7


async def _with_watchdog(work, lease_expired):
    return await CancelOnLeaseExpiry(work, lease_expired)


def start_watchdog(loop, until_s, busy=True):
    ended = threading.Event()
    guard = EventLoopWatchdog(loop, SystemClock(), lambda: until_s, lambda: busy, lambda _status: ended.set())
    guard.start()
    return guard, ended


async def test_event_loop_blocked_past_the_lease_ends_the_process():
    _, ended = start_watchdog(asyncio.get_running_loop(), 0.0)
    assert ended.wait(10), "wait() blocks the event loop on purpose"


async def test_responsive_or_idle_event_loop_does_not_end_the_process():
    guard, ended = start_watchdog(asyncio.get_running_loop(), 0.0)
    answered = asyncio.Event()
    guard._loop_responds = _signalling(guard._loop_responds, asyncio.get_running_loop(), answered)
    await until(answered.is_set)
    guard.stop()
    idle, idle_ended = start_watchdog(asyncio.get_running_loop(), 0.0, busy=False)
    idle._busy = _signalling(lambda: False, asyncio.get_running_loop(), asked := asyncio.Event())
    await until(asked.is_set)
    idle.stop()
    assert not ended.is_set()
    assert not idle_ended.is_set()


def _signalling(ask, loop, event):
    def asked():
        found = ask()
        loop.call_soon_threadsafe(event.set)
        return found

    return asked


async def test_blocked_log_sink_does_not_delay_the_process_exit(monkeypatch):
    monkeypatch.setattr(lease_watchdog, "_log_blocked_loop", threading.Event().wait)
    _, ended = start_watchdog(asyncio.get_running_loop(), 0.0)
    assert ended.wait(10), "wait() blocks the event loop on purpose"
