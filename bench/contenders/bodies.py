"""What a job of a contender does, by kind: the same on all sides, and each marks that it ran.

async     a coroutine function that returns at once
sync      a plain function that returns at once
command   starts the command `true` and waits for it to succeed
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

from bench.contenders.marks import mark

KINDS = ("async", "sync", "command")
COMMAND = ("true",)


def run_sync(number: int) -> None:
    mark(number)


def run_command(number: int) -> None:
    subprocess.run(COMMAND, check=True)
    mark(number)


BLOCKING: dict[str, Callable[[int], None]] = {"sync": run_sync, "command": run_command}
"""For peers that run a job in a thread or a process."""


def on_loop(kind: str, at_once: int) -> Callable[[int], Coroutine[Any, Any, None]]:
    """For peers that run a job on an event loop: at most so many bodies at once, however many jobs were fetched.

    Blocking code runs in a thread, as these peers advise. That is also their fastest way to run a command: asyncio's
    own took six times as long.
    """
    free = asyncio.Semaphore(at_once)
    blocking = BLOCKING.get(kind)

    async def bounded(number: int) -> None:
        async with free:
            if blocking is None:
                await _run_async(number)
            else:
                await asyncio.to_thread(blocking, number)

    return bounded


async def _run_async(number: int) -> None:
    mark(number)
