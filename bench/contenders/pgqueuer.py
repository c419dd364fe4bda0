"""PGQueuer through its API: pooled asyncpg driver, uvloop, all tables logged (its default)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
from pgqueuer import PgQueuer  # type: ignore[import-not-found]
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]

from bench.contenders.serve import PRODUCERS, Body, Countdown, fill_s, serve

BATCH = 1024


class Pgqueuer:
    async def prepare(self, url: str) -> None:
        connection = await asyncpg.connect(url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    async def fill(self, url: str, bodies: list[Body]) -> float:
        async with asyncpg.create_pool(url, min_size=PRODUCERS) as pool:
            queries = Queries(AsyncpgPoolDriver(pool))

            async def put(batch: list[Body]) -> None:
                payloads = [json.dumps(body).encode() for body in batch]
                await queries.enqueue(["noop"] * len(batch), payloads, [0] * len(batch))

            return await fill_s(bodies, put)

    async def drain(self, url: str, n: int) -> float:
        async with asyncpg.create_pool(url, min_size=4, max_size=10) as pool:
            worker = PgQueuer(AsyncpgPoolDriver(pool))
            ran = Countdown(n)

            async def noop(_job: Any) -> None:
                ran.tick()

            worker.entrypoint("noop")(noop)
            working = asyncio.create_task(worker.run(batch_size=BATCH))
            await ran.finished()
            worker.shutdown.set()
            await working
        return ran.took_s()


if __name__ == "__main__":
    serve(Pgqueuer())
