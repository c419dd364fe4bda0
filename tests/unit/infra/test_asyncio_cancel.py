"""`cancellable` restores cancellations that a library swallows."""

import asyncio

import pytest

from rota.infra.asyncio_cancel import cancellable


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
