"""DBOS Transact: async workflows in one process, each with as many at once as it is fastest with here."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from dbos import DBOS  # type: ignore[import-not-found]

from bench.contenders.dbos_shape import SHAPE, STEPS, WIDTH
from bench.contenders.serve import Body, serve

AT_ONCE = {"linear": 10, "fan": 4}


@DBOS.step()  # type: ignore[untyped-decorator]
async def noop(_number: int) -> None:
    return None


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def linear(_number: int) -> None:
    for number in range(STEPS):
        await noop(number)


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def fan(_number: int) -> None:
    await asyncio.gather(*(noop(number) for number in range(WIDTH)))


class Dbos:
    async def prepare(self, url: str) -> None:
        """Its tables are made by launching."""
        _launch(url)
        DBOS.destroy()

    async def fill(self, _url: str, _bodies: list[Body]) -> float:
        return 0.0

    async def drain(self, url: str, n: int) -> float:
        shape = os.environ[SHAPE]
        workflow = {"linear": linear, "fan": fan}[shape]
        _launch(url)
        await _runs(workflow, AT_ONCE[shape], AT_ONCE[shape])
        began = time.perf_counter()
        await _runs(workflow, n, AT_ONCE[shape])
        seconds = time.perf_counter() - began
        DBOS.destroy()
        return seconds


async def _runs(workflow: Any, n: int, at_once: int) -> None:
    numbers = iter(range(n))

    async def start() -> None:
        for number in numbers:
            handle = await DBOS.start_workflow_async(workflow, number)
            await handle.get_result()

    await asyncio.gather(*(start() for _ in range(at_once)))


def _launch(url: str) -> None:
    quiet = {"log_level": "ERROR", "console_log_level": "ERROR", "enable_otlp": False, "run_admin_server": False}
    DBOS(config={"name": "bench", "system_database_url": url, "application_version": "1", **quiet})
    DBOS.launch()


if __name__ == "__main__":
    serve(Dbos())
