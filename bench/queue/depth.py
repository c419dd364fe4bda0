"""What a million costs: claiming out of a million waiting frames, and counting a million that have ended.

Every frame has an entry of its own. Slots are opened as upkeep opens them; nothing is pruned, so all stay, and nothing
is ever analysed. The last thousand deltas are left pending, more than a second of work at full speed leaves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bench.report import Figure
from bench.server import Server, opened, statement
from rota.infra.postgres import Database
from rota.queue import Queue, storage
from rota.queue.queue import OWNER_ADD

SMALL: Final = 10_000
LARGE: Final = 1_000_000
BATCH: Final = 256
FILL: Final = 5_000
QUEUE: Final = "deep"
OWNER: Final = 1
PENDING_BATCHES: Final = 500

FILL_ONCE = statement(
    """SELECT rota.queue_enqueue(ARRAY['deep'], ARRAY[5]::smallint[], ARRAY[NULL]::text[], ARRAY[$2::int],
         array_agg(lpad(to_hex($1 + i), 32, '0')::uuid), array_agg(lpad(to_hex($1 + i), 32, 'f')::uuid),
         array_agg(0), array_agg(1), array_agg(1::smallint), array_agg(convert_to(rpad(i::text, 75, 'x'), 'UTF8')),
         false)
       FROM generate_series(1, $2::int) AS i, (SELECT $1::bigint) AS given"""
)
CLAIM_AND_COMPLETE = statement(
    f"""WITH claimed AS MATERIALIZED (
         SELECT c.claim_id, c.n FROM generate_series(1, $2::int) AS i,
           rota.queue_claim(ARRAY[$1::int], {BATCH}, {OWNER} + 0 * i) AS c
       ), masks AS (
         SELECT array_agg(claim_id) AS ids, array_agg(repeat('1', n)::varbit) AS bits, sum(n) AS n FROM claimed
       )
       SELECT n, (SELECT count(*) FROM rota.insert_done_rows_tx(ids, bits)) AS refused FROM masks"""
)
COUNT_STAR = statement("SELECT count(*) FROM rota.ready_entries WHERE lane_id = $1::int")
SCAN = statement("SELECT completed FROM rota.queue_counts_scan() WHERE queue = 'deep'")


@dataclass(slots=True)
class Samples:
    claims: list[float] = field(default_factory=list)
    claim_small_ms: list[float] = field(default_factory=list)
    claim_large_ms: list[float] = field(default_factory=list)
    exact_ms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    star_ms: list[float] = field(default_factory=list)
    scan_ms: list[float] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        yield Figure("exact_p99_ms_at_1m", self.exact_ms, bar=10, note="queue_counts_exact, 1,000 deltas pending")
        note = "COUNT(*) of the same frames / queue_counts_exact, medians"
        yield Figure("exact_vs_count_star", self.ratios, bar=100, higher_is_better=True, note=note)
        note = f"p95 of claiming {BATCH} out of 1,000,000 / out of 10,000 waiting"
        yield Figure("claim_p95_1m_vs_10k", self.claims, bar=2, note=note)
        yield Figure("claim_p95_ms_at_10k", self.claim_small_ms)
        yield Figure("claim_p95_ms_at_1m", self.claim_large_ms)
        yield Figure("count_star_ms_at_1m", self.star_ms)
        yield Figure("scan_ms_at_1m", self.scan_ms, note="the same counts added up from the rows, as in mode scan")


class Depth:
    """A database with a lane that is kept at the same depth."""

    def __init__(self, database: Database, depth: int) -> None:
        self.database = database
        self.queue = Queue(database)
        self.depth = depth
        self.lane = 0
        self._filled = 0

    async def fill(self) -> None:
        await self.queue.ensure_queue(QUEUE, shards=1, priorities=[5])
        await self.database.run(OWNER_ADD, OWNER, "bench")
        self.lane = await self.database.value(statement("SELECT lane_id FROM rota.queue_lanes"))
        for _ in range(0, self.depth, FILL):
            await self._add(FILL)
            await self._keep_house()
        assert (await self.queue.counts_exact())[QUEUE].waiting == self.depth

    async def claim_ms(self) -> float:
        """One call, timed; then as many frames are put in as were taken out."""
        began = time.perf_counter()
        claims = await self.queue.claim([self.lane], BATCH, OWNER)
        took_s = time.perf_counter() - began
        ended = await self.queue.complete([token for claim in claims for token in claim.tokens])
        assert ended.accepted == BATCH
        await self._add(BATCH)
        return took_s * 1000

    async def end_all(self) -> None:
        left = (await self.queue.counts_exact())[QUEUE].waiting
        batches = -(-left // BATCH)
        await self._end(batches - PENDING_BATCHES)
        await self._keep_house()
        await self._end(PENDING_BATCHES)

    async def exact_ms(self) -> float:
        began = time.perf_counter()
        counts = (await self.queue.counts_exact([QUEUE]))[QUEUE]
        took_s = time.perf_counter() - began
        assert (counts.completed, counts.waiting, counts.running) == (self._filled, 0, 0)
        return took_s * 1000

    async def star_ms(self) -> float:
        began = time.perf_counter()
        assert await self.database.value(COUNT_STAR, self.lane) == self._filled
        return (time.perf_counter() - began) * 1000

    async def scan_ms(self) -> float:
        began = time.perf_counter()
        assert await self.database.value(SCAN) == self._filled
        return (time.perf_counter() - began) * 1000

    async def _add(self, number: int) -> None:
        await self.database.value(FILL_ONCE, self._filled, number)
        self._filled += number

    async def _end(self, batches: int) -> None:
        for first in range(0, batches, 100):
            row = await self.database.row(CLAIM_AND_COMPLETE, self.lane, min(100, batches - first))
            assert row
            assert row["refused"] == 0

    async def _keep_house(self) -> None:
        async with self.database.transaction() as tx:
            await storage.fold(tx, pinned=False)
            await storage.rotate(tx)


async def dive(server: Server, template: str, rounds: int, *, claims: int, reads: int) -> Iterator[Figure]:
    samples = Samples()
    urls = [await server.create(f"depth_{depth}", template) for depth in (SMALL, LARGE)]
    async with opened(urls[0]) as one, opened(urls[1]) as other:
        small, large = Depth(one, SMALL), Depth(other, LARGE)
        await small.fill()
        await large.fill()
        await server.checkpoint()
        for _ in range(rounds):
            await _claims(small, large, samples, claims)
        await large.end_all()
        for _ in range(rounds):
            await _reads(large, samples, reads)
    return samples.figures()


async def _claims(small: Depth, large: Depth, samples: Samples, claims: int) -> None:
    few, many = zip(*[(await small.claim_ms(), await large.claim_ms()) for _ in range(claims)], strict=True)
    samples.claim_small_ms.append(quantile(few, 0.95))
    samples.claim_large_ms.append(quantile(many, 0.95))
    samples.claims.append(samples.claim_large_ms[-1] / samples.claim_small_ms[-1])


async def _reads(large: Depth, samples: Samples, reads: int) -> None:
    exact = [await large.exact_ms() for _ in range(reads)]
    star = [await large.star_ms() for _ in range(3)]
    samples.exact_ms.append(quantile(exact, 0.99))
    samples.star_ms.append(quantile(star, 0.5))
    samples.scan_ms.append(await large.scan_ms())
    samples.ratios.append(samples.star_ms[-1] / quantile(exact, 0.5))


def quantile(numbers: tuple[float, ...] | list[float], share: float) -> float:
    return sorted(numbers)[min(len(numbers) - 1, int(len(numbers) * share))]
