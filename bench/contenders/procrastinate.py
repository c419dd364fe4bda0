"""Procrastinate on psycopg's binary build: many concurrent jobs, NOTIFY on, jobs deleted when done."""

from __future__ import annotations

import asyncio
from typing import Any

import procrastinate  # type: ignore[import-not-found]

from bench.contenders.bodies import on_loop
from bench.contenders.serve import Body, fill_s, serve_loop_peer, work_commands

CONCURRENCY = 50
"""Jobs fetched at once by a worker; bodies are bounded."""
UNFINISHED = "SELECT count(*) AS left FROM procrastinate_jobs"


class Procrastinate:
    async def prepare(self, url: str) -> None:
        async with _app(url).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def fill(self, url: str, kind: str, bodies: list[Body]) -> float:
        app = _app(url)

        async def noop(frame: int, scene: str) -> None:
            pass

        task = app.task(name=kind)(noop)
        async with app.open_async():
            return await fill_s(bodies, lambda batch: task.batch_defer_async(*batch))

    def commands(self, kind: str, processes: int, each: int) -> list[list[str]]:  # noqa: ARG002
        return work_commands("bench.contenders.procrastinate", processes, each)

    async def work(self, url: str, kind: str, each: int, stopped: asyncio.Event) -> None:
        app, run = _app(url), on_loop(kind, each)

        async def noop(frame: int, scene: str) -> None:  # noqa: ARG001
            await run(frame)

        app.task(name=kind)(noop)
        async with app.open_async():
            worker = app.run_worker_async(
                concurrency=CONCURRENCY, delete_jobs="always", install_signal_handlers=False, wait=True
            )
            working = asyncio.create_task(worker)
            await stopped.wait()
            working.cancel()
            await asyncio.wait([working])

    async def left(self, url: str) -> int:
        app = _app(url)
        async with app.open_async():
            row = await app.connector.execute_query_one_async(UNFINISHED)
        return int(row["left"])


def _app(url: str) -> Any:
    connector = procrastinate.PsycopgConnector(conninfo=url, min_size=4, max_size=CONCURRENCY)
    return procrastinate.App(connector=connector)


if __name__ == "__main__":
    serve_loop_peer(Procrastinate())
