"""Waiting for something to become true, with a bound. Tests wait on conditions and signals, never on time."""

import asyncio
import inspect
import os
import time

POLL_S = 0.005
POLL_MAX_S = 0.03
"""A condition that asks a server is asked less and less often: the asking is not to be the load."""
CLOSED_WITHIN_S = float(os.environ.get("TEST_CLOSED_WITHIN_S", "3"))


async def until(condition, *, within_s=10.0, what="the condition", every_s=POLL_S):
    """The first truthy value of `condition()` (sync or async); fails when there is none within `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        asked = inspect.isawaitable(value)
        if asked:
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {within_s} s (last seen: {value!r})")
        await asyncio.sleep(every_s)
        if asked:
            every_s = max(every_s, min(every_s * 1.25, POLL_MAX_S))


def until_closed(nobody, server):
    """Closing takes the server a moment; who is still connected after that was forgotten."""
    deadline = time.monotonic() + CLOSED_WITHIN_S
    while not nobody():
        assert time.monotonic() < deadline, f"connections to {server} left open for {CLOSED_WITHIN_S} s"
        time.sleep(0.002)
