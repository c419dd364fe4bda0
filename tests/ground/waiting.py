"""Waiting for something to become true, with a bound. Tests wait on conditions and signals, never on time."""

import asyncio
import inspect
import os
import time

POLL_S = 0.005
CLOSED_WITHIN_S = float(os.environ.get("TEST_CLOSED_WITHIN_S", "3"))


async def until(condition, *, within_s=10.0, what="the condition", every_s=POLL_S):
    """The first truthy value of `condition()` (sync or async); fails when there is none within `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {within_s} s (last seen: {value!r})")
        await asyncio.sleep(every_s)


def until_closed(nobody, server):
    """Closing takes the server a moment; who is still connected after that was forgotten."""
    deadline = time.monotonic() + CLOSED_WITHIN_S
    while not nobody():
        assert time.monotonic() < deadline, f"connections to {server} left open for {CLOSED_WITHIN_S} s"
        time.sleep(0.002)
