"""What counting costs where it hurts the most: one queue, one priority, one shard, and eight connections that complete
claims of it as fast as they can. Every way of counting has a database of its own; they take turns.

none            completing counts nothing at all: the throughput the others are compared with
ledger          a row appended by every batch; a fold per second of work is part of the time
scan            no counters; exact counts add up the rows of entries, claims and closures
scan_indexed    the same with covering indexes
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID

from bench.report import Figure
from bench.server import Server, opened, statement
from rota.infra.postgres import Database, Query
from rota.model.ids import JobId, LayerId
from rota.queue import CounterMode, MaintenanceIntervals, Queue, QueueEntry, storage
from rota.queue.queue import COMPLETE, OWNER_ADD
from rota.queue.tokens import CLAIM_MAX, masks_of

COST_BAR: Final = 0.1
CONNECTIONS: Final = 8
FRAMES: Final = 32
READS: Final = 15
QUEUE: Final = "skewed"
OWNER: Final = 1
FOLD_EVERY_S: Final = MaintenanceIntervals().fold_s

CLAIM_MANY = statement(
    "SELECT c.claim_id FROM generate_series(1, $2::int) AS i,"
    f" rota.queue_claim(ARRAY[$1::int], {FRAMES}, {OWNER} + 0 * i) AS c"
)
UNCOUNTED: Final = Path(__file__).with_name("uncounted.sql").read_text()
COVERING = "CREATE INDEX ON rota.queue_{0}s_{1} (claim_id) INCLUDE ({2})"


@dataclass(slots=True)
class Way:
    """One way of counting, with what was measured of it."""

    name: str
    mode: CounterMode
    extra: Sequence[str] = ()
    batches_per_s: list[float] = field(default_factory=list)
    read_ms: list[float] = field(default_factory=list)

    def counts(self) -> bool:
        return self.name != "none"


def ways() -> list[Way]:
    columns = {"claim": "lane_id, n", "closure": "outcome, n"}
    indexes = [
        COVERING.format(what, slot, named) for what, named in columns.items() for slot in range(storage.RING_SLOTS)
    ]
    return [
        Way("none", "scan", extra=[UNCOUNTED]),
        Way("ledger", "ledger"),
        Way("scan", "scan"),
        Way("scan_indexed", "scan", extra=indexes),
    ]


async def compare(server: Server, template: str, rounds: int, batches: int) -> Iterator[Figure]:
    compared = ways()
    async with AsyncExitStack() as open_ways:
        racks = [await open_ways.enter_async_context(_rack(server, template, way)) for way in compared]
        for _ in range(rounds):
            await server.checkpoint()
            # The first two are what the bar is about, and the noise between two rounds is larger than the bar.
            for rack in (*racks[:2], *racks):
                await rack.round(batches)
    return _figures({way.name: way for way in compared})


def _figures(by_name: dict[str, Way]) -> Iterator[Figure]:
    bare = by_name["none"].batches_per_s
    costs = [1 - ours / free for ours, free in zip(by_name["ledger"].batches_per_s, bare, strict=True)]
    note = f"share of throughput lost to counting; {CONNECTIONS} connections complete one lane"
    yield Figure("ledger_cost", costs, bar=COST_BAR, note=note)
    for way in by_name.values():
        yield Figure(f"{way.name}_batches_per_s", way.batches_per_s, note=f"completed, {FRAMES} frames each")
        if way.counts():
            yield Figure(f"{way.name}_exact_ms", way.read_ms, note="reading exact counts after that")


class Rack:
    """A database that counts in one way."""

    def __init__(self, way: Way, database: Database, lane: int) -> None:
        self._way = way
        self._database = database
        self._lane = lane
        self._queue = Queue(database)

    async def round(self, batches: int) -> None:
        claims = await self._claimed(batches)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for at in range(CONNECTIONS):
                tasks.create_task(self._complete(claims[at::CONNECTIONS]))
        took_s = time.perf_counter() - began
        if self._way.mode == "ledger":
            took_s += took_s / FOLD_EVERY_S * await self._fold_s()
        self._way.batches_per_s.append(batches / took_s)
        if self._way.counts():
            self._way.read_ms.append(statistics.median([await self._read_ms() for _ in range(READS)]))

    async def _claimed(self, batches: int) -> list[int]:
        job, layer = JobId(UUID(int=1)), LayerId(UUID(int=2))
        await self._queue.enqueue([QueueEntry(queue=QUEUE, job=job, layer=layer, frames=batches * FRAMES)])
        claims = [row["claim_id"] for row in await self._database.rows(CLAIM_MANY, self._lane, batches)]
        assert len(claims) == batches
        if self._way.mode == "ledger":
            await self._fold_s()
        return claims

    async def _complete(self, claims: Sequence[int]) -> None:
        for claim in claims:
            ids, masks = masks_of(range(claim * CLAIM_MAX, claim * CLAIM_MAX + FRAMES))
            refused = await self._database.rows(COMPLETE, ids, masks)
            assert not refused

    async def _fold_s(self) -> float:
        began = time.perf_counter()
        async with self._database.transaction() as tx:
            await storage.fold(tx, pinned=False)
        return time.perf_counter() - began

    async def _read_ms(self) -> float:
        began = time.perf_counter()
        await self._queue.counts_exact([QUEUE])
        return (time.perf_counter() - began) * 1000


@asynccontextmanager
async def _rack(server: Server, template: str, way: Way) -> AsyncIterator[Rack]:
    url = await server.create(f"counting_{way.name}", template)
    async with opened(url, connections=CONNECTIONS) as database:
        for text in way.extra:
            await database.run(Query(name="bench", purpose="", text=text))
        queue = Queue(database)
        await queue.ensure_queue(QUEUE, shards=1, priorities=[5])
        await queue.rebuild_counts(way.mode)
        await database.run(OWNER_ADD, OWNER, "bench")
        lane = await database.value(statement("SELECT lane_id FROM rota.queue_lanes"))
        yield Rack(way, database, lane)
