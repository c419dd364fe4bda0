"""Procrastinate on psycopg's binary build: many concurrent jobs, NOTIFY on, jobs deleted when done."""

from __future__ import annotations

import asyncio
from typing import Any

import procrastinate  # type: ignore[import-not-found]

from bench.contenders.serve import Body, Countdown, fill_s, serve

CONCURRENCY = 50


class Procrastinate:
    async def prepare(self, url: str) -> None:
        async with _app(url).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def fill(self, url: str, bodies: list[Body]) -> float:
        app = _app(url)

        async def noop(frame: int, scene: str) -> None:
            pass

        task = app.task(name="noop")(noop)
        async with app.open_async():
            return await fill_s(bodies, lambda batch: task.batch_defer_async(*batch))

    async def drain(self, url: str, n: int) -> float:
        app = _app(url)
        ran = Countdown(n)

        async def noop(frame: int, scene: str) -> None:  # noqa: ARG001
            ran.tick()

        app.task(name="noop")(noop)
        async with app.open_async():
            worker = app.run_worker_async(
                concurrency=CONCURRENCY, delete_jobs="always", install_signal_handlers=False, wait=False
            )
            working = asyncio.create_task(worker)
            await ran.finished()
            await working
        return ran.took_s()


def _app(url: str) -> Any:
    connector = procrastinate.PsycopgConnector(conninfo=url, min_size=4, max_size=CONCURRENCY)
    return procrastinate.App(connector=connector)


if __name__ == "__main__":
    serve(Procrastinate())
