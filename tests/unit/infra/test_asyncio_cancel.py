"""Cancellations that a library swallows take effect after all."""

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


async def test_a_swallowed_cancellation_is_raised():
    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_swallowed_timeout_is_a_timeout():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await guarded()


async def test_what_is_done_while_a_task_ends_is_left_alone():
    async def tidies():
        try:
            await asyncio.sleep(60)
        finally:
            with cancellable():
                await asyncio.sleep(0)
            tidied.append(True)

    tidied = []
    task = asyncio.create_task(tidies())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tidied
