"""What the schedules of APScheduler run. They name it, so it is found by import, also from a module that is run."""

from __future__ import annotations

from bench.contenders.serve import Countdown

RUNNING: list[Countdown] = []


async def noop() -> None:
    for countdown in RUNNING:
        countdown.tick()
