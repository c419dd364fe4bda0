"""awa-pg: COPY, then its queue storage engine with one claimer and a handler per entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import awa  # type: ignore[import-not-found]

from bench.contenders.serve import Body, Countdown, fill_s, serve

WORKERS = 256
CLAIM_BATCH = 256


@dataclass
class Noop:
    frame: int
    scene: str


class Awa:
    async def prepare(self, url: str) -> None:
        """A fresh database takes to queue storage when the first worker starts on it."""
        client = awa.AsyncClient(url, max_connections=5)
        await client.migrate()

        async def noop(_job: Any) -> None:
            pass

        client.task(Noop, kind="noop", queue="first")(noop)
        await client.start([("first", 1)])
        await client.shutdown()
        await client.close()

    async def fill(self, url: str, bodies: list[Body]) -> float:
        client = awa.AsyncClient(url, max_connections=10)

        async def put(batch: list[Body]) -> None:
            await client.enqueue_many_copy([Noop(**body) for body in batch], kind="noop", queue="bench")

        took_s = await fill_s(bodies, put)
        await client.close()
        return took_s

    async def drain(self, url: str, n: int) -> float:
        client = awa.AsyncClient(url, max_connections=20)
        ran = Countdown(n)

        async def noop(_job: Any) -> None:
            ran.tick()

        client.task(Noop, kind="noop", queue="bench")(noop)
        queue = {"name": "bench", "max_workers": WORKERS, "claimers": 1, "claim_batch_size": CLAIM_BATCH}
        await client.start([queue])
        await ran.finished()
        await client.shutdown(timeout_ms=10_000)
        await client.close()
        return ran.took_s()


if __name__ == "__main__":
    serve(Awa())
