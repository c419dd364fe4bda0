"""DBOS Transact in one process, each shape in the way and with as many runs at once as it is fastest with here.

Steps in a row are plain functions on threads; steps at once are coroutines that are awaited together.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

from dbos import DBOS  # type: ignore[import-not-found]

from bench.contenders.dbos_shape import SHAPE, STEPS, WIDTH
from bench.contenders.serve import Body, serve

AT_ONCE = {"linear": 10, "fan": 4}


@DBOS.step()  # type: ignore[untyped-decorator]
def step(_number: int) -> None:
    return None


@DBOS.step()  # type: ignore[untyped-decorator]
async def async_step(_number: int) -> None:
    return None


@DBOS.workflow()  # type: ignore[untyped-decorator]
def linear(_number: int) -> None:
    for number in range(STEPS):
        step(number)


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def fan(_number: int) -> None:
    await asyncio.gather(*(async_step(number) for number in range(WIDTH)))


class Dbos:
    async def prepare(self, url: str) -> None:
        """Its tables are made by launching."""
        _launch(url)
        DBOS.destroy()

    async def fill(self, _url: str, _bodies: list[Body]) -> float:
        return 0.0

    async def drain(self, url: str, n: int) -> float:
        shape = os.environ[SHAPE]
        _launch(url)
        await _runs(shape, AT_ONCE[shape])
        began = time.perf_counter()
        await _runs(shape, n)
        seconds = time.perf_counter() - began
        DBOS.destroy()
        return seconds


async def _runs(shape: str, n: int) -> None:
    numbers = iter(range(n))
    works = [_work_on_threads if shape == "linear" else _work for _ in range(AT_ONCE[shape])]
    await asyncio.gather(*(work(numbers) for work in works))


async def _work(numbers: Iterator[int]) -> None:
    for number in numbers:
        handle = await DBOS.start_workflow_async(fan, number)
        await handle.get_result()


async def _work_on_threads(numbers: Iterator[int]) -> None:
    for number in numbers:
        await asyncio.to_thread(linear, number)


def _launch(url: str) -> None:
    quiet = {"log_level": "ERROR", "console_log_level": "ERROR", "enable_otlp": False, "run_admin_server": False}
    DBOS(config={"name": "bench", "system_database_url": url, "application_version": "1", **quiet})
    DBOS.launch()


if __name__ == "__main__":
    serve(Dbos())
