"""Rota's queue as it comes: four shards, filled by several producers, worked off by one dispatcher."""

from __future__ import annotations

import asyncio
import secrets
import time
from uuid import UUID

import msgspec

from bench.contenders.serve import PRODUCERS, Body, Countdown, fill_s, serve
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.model.ids import ENTROPY_BYTES, JobId, LayerId, uuid7
from rota.queue import Queue, QueueEntry

QUEUE = "bench"
BATCH = 256
IN_FLIGHT = 4


class Rota:
    async def prepare(self, url: str) -> None:
        await migrate(url)

    async def fill(self, url: str, bodies: list[Body]) -> float:
        database = await Database.open(PostgresTarget(url=url, pool_min=PRODUCERS))
        queue = Queue(database)
        await queue.ensure_queue(QUEUE)
        ids = new_ids(2 * len(bodies))

        async def put(batch: list[Body]) -> None:
            await queue.enqueue([_entry(ids.pop(), ids.pop(), body) for body in batch])

        took_s = await fill_s(bodies, put)
        await database.close()
        return took_s

    async def drain(self, url: str, n: int) -> float:
        database = await Database.open(PostgresTarget(url=url, pool_min=IN_FLIGHT))
        queue = Queue(database)
        granted = (await Leases(database).acquire([f"dispatcher:{QUEUE}"], kind="dispatcher", ttl_s=300)).granted
        owner = await queue.register_owner(granted[0])
        lanes = [candidate.lane for candidate in await queue.candidates()]
        ran = Countdown(n)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for at in range(IN_FLIGHT):
                first = at % len(lanes)
                tasks.create_task(_work(queue, lanes[first:] + lanes[:first], owner, ran))
        took_s = time.perf_counter() - began
        ran.took_s()
        assert (await queue.counts_exact([QUEUE]))[QUEUE].completed == n
        await database.close()
        return took_s


def _entry(job: UUID, layer: UUID, body: Body) -> QueueEntry:
    return QueueEntry(queue=QUEUE, job=JobId(job), layer=LayerId(layer), payload=msgspec.json.encode(body))


async def _work(queue: Queue, lanes: list[int], owner: int, ran: Countdown) -> None:
    """A claim finds nothing when all is claimed, or when others are just claiming from every lane that has any."""
    while ran.left:
        claims = await queue.claim(lanes, BATCH, owner)
        if not claims:
            await asyncio.sleep(0.001)
        for claim in claims:
            for piece in claim.ranges():
                for _ in piece.frames:
                    await _noop(piece.payload, ran)
            ended = await queue.complete(claim.tokens)
            assert not ended.refused


async def _noop(_payload: bytes | None, ran: Countdown) -> None:
    ran.tick()


def new_ids(number: int) -> list[UUID]:
    """Whoever submits a job has made its ids before, so they are no part of queueing it."""
    now_ms = time.time_ns() // 1_000_000
    return [uuid7(now_ms, secrets.token_bytes(ENTROPY_BYTES)) for _ in range(number)]


if __name__ == "__main__":
    serve(Rota())
