"""One job after the other on an idle `rota up`: submitted by the SDK, its result awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from bench.defaults.up import up
from bench.queue.depth import quantile
from bench.report import Figure
from rota.sdk.task import Task

BAR_MS: Final = 8.0
FIRST: Final = 20
"""Left out: connections and plans are made, and processes started."""


async def measure(rounds: int, jobs: int) -> Iterator[Figure]:
    found: dict[str, list[list[float]]] = {"async": [], "sync": []}
    async with up() as instance:
        tasks = {"async": instance.tasks.run_async, "sync": instance.tasks.run_sync}
        for task in tasks.values():
            await _times_ms(task, FIRST)
        for _ in range(rounds):
            for kind, task in tasks.items():
                found[kind].append(await _times_ms(task, jobs))
    return _figures(found)


def _figures(found: dict[str, list[list[float]]]) -> Iterator[Figure]:
    note = "an async task: `await task.submit(...)`, then `await job.result()`, one after the other"
    yield Figure("roundtrip_p50_ms", _quantiles(found["async"], 0.5), bar=BAR_MS, note=note)
    yield Figure("roundtrip_p99_ms", _quantiles(found["async"], 0.99), note="the same")
    yield Figure("roundtrip_sync_p50_ms", _quantiles(found["sync"], 0.5), note="a sync task")
    yield Figure("roundtrip_sync_p99_ms", _quantiles(found["sync"], 0.99), note="a sync task")


async def _times_ms(task: Task[..., None], jobs: int) -> list[float]:
    found: list[float] = []
    for number in range(jobs):
        began = time.perf_counter()
        job = await task.submit(frame=number, scene="shots/010/comp.blend")
        await job.result()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def _quantiles(rounds: list[list[float]], share: float) -> list[float]:
    return [quantile(each, share) for each in rounds]
