"""What one job costs a farm that has nothing else to do: CPU time of all processes, ten single jobs a second.

What the farm uses without any job is measured right before, and left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

from bench.e2e.deployment import Farm, farm, job_of
from bench.e2e.setup import Ground
from bench.report import Figure

PER_S: Final = 10
IDLE_S: Final = 5.0
SETTLE_S: Final = 1.0
BAR_MS: Final = 5.0


async def measure(ground: Ground, template: str, rounds: int, seconds: int) -> Iterator[Figure]:
    found: list[float] = []
    idle: list[float] = []
    await ground.postgres.create("lonely", template)
    async with farm(ground, "lonely") as running:
        await _spend_s(running, PER_S * 2)
        for _ in range(rounds):
            jobs = PER_S * seconds
            idle.append(await _idle_share(running))
            spent_s, took_s = await _spend_s(running, jobs)
            found.append((spent_s - idle[-1] * took_s) / jobs * 1e3)
    await ground.postgres.drop("lonely")
    return _figures(found, idle)


def _figures(found: list[float], idle: list[float]) -> Iterator[Figure]:
    note = f"{PER_S} jobs/s, a commit each; without what an idle farm uses"
    yield Figure("lonely_job_cpu_ms", found, bar=BAR_MS, note=note)
    yield Figure("idle_cpu", idle, note="cores that all processes use without any job")


async def _idle_share(running: Farm) -> float:
    before, began = _used_s(running), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    return (_used_s(running) - before) / (time.perf_counter() - began)


async def _spend_s(running: Farm, jobs: int) -> tuple[float, float]:
    """CPU seconds, and seconds. The ends are looked for afterwards, because looking costs CPU time too."""
    running.expect(jobs)
    before, began = _used_s(running), time.perf_counter()
    for number in range(jobs):
        await asyncio.sleep(began + number / PER_S - time.perf_counter())
        await running.submitter.submit([job_of(number)])
    await asyncio.sleep(SETTLE_S)
    spent_s, took_s = _used_s(running) - before, time.perf_counter() - began
    await running.ended()
    return spent_s, took_s


def _used_s(running: Farm) -> float:
    return sum(running.used_s().values())
