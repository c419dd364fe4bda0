"""Bounded waits for a condition. Tests wait for conditions and signals, never for a fixed time."""

import asyncio
import inspect
import os
import time

POLL_S = 0.005
POLL_MAX_S = 0.03
"""Async conditions query a server, so their poll interval grows up to this, to limit the load."""
CLOSED_WITHIN_S = float(os.environ.get("TEST_CLOSED_WITHIN_S", "3"))


async def until(condition, *, within_s=10.0, what="the condition", every_s=POLL_S):
    """The first truthy value of `condition()` (sync or async); fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        is_async = inspect.isawaitable(value)
        if is_async:
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {within_s} s (last seen: {value!r})")
        await asyncio.sleep(every_s)
        if is_async:
            every_s = max(every_s, min(every_s * 1.25, POLL_MAX_S))


def until_closed(is_closed, server):
    """Wait until the server has closed all connections; one that stays open is a leak."""
    deadline = time.monotonic() + CLOSED_WITHIN_S
    while not is_closed():
        assert time.monotonic() < deadline, f"connections to {server} left open for {CLOSED_WITHIN_S} s"
        time.sleep(0.002)
