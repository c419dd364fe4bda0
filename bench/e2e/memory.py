"""Whether the server's memory stays as it is: layers and single jobs without a pause, for ten minutes.

The slope is the straight line through what was resident, after a third of the time in which caches fill.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Final

from bench.e2e.cpu import memory_mb
from bench.e2e.deployment import Farm, farm
from bench.e2e.setup import Ground
from bench.report import Figure

FULL_S: Final = 600.0
LAYER: Final = 20_000
JOBS: Final = 2_000
SAMPLE_S: Final = 1.0
BAR: Final = 0.5

Sample = tuple[float, float]
"""Minutes since the start, resident megabytes."""


async def measure(ground: Ground, template: str, seconds: float) -> Iterator[Figure]:
    await ground.postgres.create("memory", template)
    async with farm(ground, "memory") as running:
        sampling = asyncio.create_task(_sampled(running.pids["server"]))
        frames = await _work(running, seconds)
        sampling.cancel()
        samples = await sampling
    await ground.postgres.drop("memory")
    return _figures(samples, frames, seconds)


async def _work(running: Farm, seconds: float) -> int:
    """How many frames that were."""
    deadline = time.monotonic() + seconds
    frames = 0
    while time.monotonic() < deadline:
        frames += (await running.frames(LAYER)).n + (await running.jobs(JOBS)).n
    return frames


async def _sampled(pid: int) -> list[Sample]:
    """Until cancelled."""
    samples: list[Sample] = []
    began = time.monotonic()
    try:
        while True:
            samples.append(((time.monotonic() - began) / 60, memory_mb(pid)))
            await asyncio.sleep(SAMPLE_S)
    except asyncio.CancelledError:
        return samples


def _figures(samples: list[Sample], frames: int, seconds: float) -> Iterator[Figure]:
    minutes, resident = zip(*samples[len(samples) // 3 :], strict=True)
    slope = statistics.linear_regression(minutes, resident).slope
    note = f"over {seconds / 60:g} minutes and {frames:,} frames, the first third left out"
    yield Figure("memory_slope_mb_per_min", [slope], bar=BAR if seconds >= FULL_S else None, note=note)
    yield Figure("server_memory_mb", resident, note="resident")
