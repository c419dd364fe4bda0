"""PGQueuer on its fastest driver: pooled asyncpg, `unnest` into logged tables, a worker that fetches large batches.

Its cap on fetched jobs would make each batch as small as the concurrency, so bodies are bounded instead: a worker
fetches ahead, as those of other peers do.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
from pgqueuer import PgQueuer  # type: ignore[import-not-found]
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]

from bench.contenders.bodies import on_loop
from bench.contenders.serve import PRODUCERS, Body, fill_s, serve_loop_peer, work_commands

BATCH = 1024
UNFINISHED = "SELECT count(*) FROM pgqueuer"
"""Jobs that are done are moved to its log."""


class Pgqueuer:
    async def prepare(self, url: str) -> None:
        connection = await asyncpg.connect(url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    async def fill(self, url: str, kind: str, bodies: list[Body]) -> float:
        async with asyncpg.create_pool(url, min_size=PRODUCERS) as pool:
            queries = Queries(AsyncpgPoolDriver(pool))

            async def put(batch: list[Body]) -> None:
                payloads = [json.dumps(body).encode() for body in batch]
                await queries.enqueue([kind] * len(batch), payloads, [0] * len(batch))

            return await fill_s(bodies, put)

    def commands(self, kind: str, processes: int, each: int) -> list[list[str]]:  # noqa: ARG002
        return work_commands("bench.contenders.pgqueuer", processes, each)

    async def work(self, url: str, kind: str, each: int, stopped: asyncio.Event) -> None:
        run = on_loop(kind, each)

        async def noop(job: Any) -> None:
            await run(json.loads(job.payload)["frame"])

        async with asyncpg.create_pool(url, min_size=4, max_size=10) as pool:
            worker = PgQueuer(AsyncpgPoolDriver(pool))
            worker.entrypoint(kind)(noop)
            working = asyncio.create_task(worker.run(batch_size=BATCH))
            await stopped.wait()
            worker.shutdown.set()
            await working

    async def left(self, url: str) -> int:
        connection = await asyncpg.connect(url)
        try:
            return int(await connection.fetchval(UNFINISHED))
        finally:
            await connection.close()


if __name__ == "__main__":
    serve_loop_peer(Pgqueuer())
