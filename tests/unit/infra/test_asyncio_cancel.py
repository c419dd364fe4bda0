"""`cancellable` restores cancellations that a library swallows."""

import asyncio
from contextlib import suppress

import pytest

from rota.infra.asyncio_cancel import cancellable, run_within


async def swallows():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "done"


async def guarded():
    with cancellable():
        return await swallows()


async def test_swallowed_cancellation_is_raised():
    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_swallowed_timeout_is_raised_as_timeout():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await guarded()


async def test_awaits_during_cleanup_are_not_cancelled_again():
    async def cleans_up():
        try:
            await asyncio.sleep(60)
        finally:
            with cancellable():
                await asyncio.sleep(0)
            cleaned_up.append(True)

    cleaned_up = []
    task = asyncio.create_task(cleans_up())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned_up


async def swallow(cancellations, ended):
    for _ in range(cancellations):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(True)


@pytest.mark.parametrize("cancellations", [0, 1, 3])
async def test_work_that_swallows_cancellations_ends_at_its_time_limit(cancellations):
    ended = []
    with pytest.raises(TimeoutError):
        await run_within(swallow(cancellations, ended), 0.01)
    assert ended == [True]


async def test_cancelled_caller_waits_for_work_that_swallows_cancellations():
    ended = []
    caller = asyncio.create_task(run_within(swallow(2, ended), 60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]


async def test_work_in_time_returns_its_result_or_error():
    async def fail():
        raise ValueError("no luck")

    assert await run_within(asyncio.sleep(0, "done"), 60.0) == "done"
    with pytest.raises(ValueError, match="no luck"):
        await run_within(fail(), 60.0)
