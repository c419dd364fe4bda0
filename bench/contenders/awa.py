"""awa-pg: COPY, then its queue storage engine with one claimer that fetches ahead, and a handler per entry."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import awa  # type: ignore[import-not-found]

from bench.contenders.bodies import on_loop
from bench.contenders.serve import Body, fill_s, serve_loop_peer, work_commands

WORKERS = 256
CLAIM_BATCH = 256
UNFINISHED = ("scheduled", "available", "running", "retryable", "failed")


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

        client.task(Noop, kind="async", queue="first")(noop)
        await client.start([("first", 1)])
        await client.shutdown()
        await client.close()

    async def fill(self, url: str, kind: str, bodies: list[Body]) -> float:
        client = awa.AsyncClient(url, max_connections=10)

        async def put(batch: list[Body]) -> None:
            await client.enqueue_many_copy([Noop(**body) for body in batch], kind=kind, queue="bench")

        took_s = await fill_s(bodies, put)
        await client.close()
        return took_s

    def commands(self, kind: str, processes: int, each: int) -> list[list[str]]:  # noqa: ARG002
        return work_commands("bench.contenders.awa", processes, each)

    async def work(self, url: str, kind: str, each: int, stopped: asyncio.Event) -> None:
        client = awa.AsyncClient(url, max_connections=20)
        run = on_loop(kind, each)

        async def noop(job: Any) -> None:
            await run(job.args.frame)

        client.task(Noop, kind=kind, queue="bench")(noop)
        # Jobs of a command would wait so long after their claim that it rescues and runs some of them again.
        workers = each if kind == "command" else max(each, WORKERS)
        queue = {"name": "bench", "max_workers": workers, "claimers": 1, "claim_batch_size": CLAIM_BATCH}
        await client.start([queue])
        await stopped.wait()
        await client.shutdown(timeout_ms=10_000)
        await client.close()

    async def left(self, url: str) -> int:
        """Of each state it says only whether there are any."""
        client = awa.AsyncClient(url, max_connections=2)
        found = [len(await client.list_jobs(state=state, queue="bench", limit=1)) for state in UNFINISHED]
        await client.close()
        return sum(found)


if __name__ == "__main__":
    serve_loop_peer(Awa())
