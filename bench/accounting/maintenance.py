"""What keeping the books costs: a recompute under load, a bootstrap from nothing, and memory.

The longest script call is what Redis itself measured (SLOWLOG): how long it served nobody else. On a machine whose
processors are wanted by others this holds their turns, too.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import msgspec

from bench.accounting.cluster import Farm, Servers
from bench.accounting.reconcile_process import Recompute, Told
from rota.accounting.ledger import BATCH_MAX, BookingGroup
from rota.accounting.live import limits, reconcile, seeding
from rota.accounting.live.ledger import BOOK
from rota.infra.postgres import query

EMPTY = query("bench", "empty")

BATCH: Final = 50
LAYERS: Final = 100
LOADERS: Final = 4
HELD: Final = 4
"""Batches a loader holds before it releases the oldest."""
RECOMPUTE_MAX_S: Final = 120.0
SLOW_US: Final = 500
RECOMPUTING: Final = (reconcile.COUNT.sha, reconcile.SETTLE.sha)
BOOTSTRAPPING: Final = (seeding.SEED.sha, limits.WRITE_LIMITS.sha, BOOK.sha)

Kind = Callable[[Farm, int, int], list[BookingGroup]]
"""How many frames, of which layer."""


@dataclass(slots=True)
class Bootstraps:
    took_s: list[float] = field(default_factory=list)
    longest_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Recomputes:
    ratios: list[float] = field(default_factory=list)
    scan_s: list[float] = field(default_factory=list)
    longest_ms: list[float] = field(default_factory=list)
    quiet_per_s: list[float] = field(default_factory=list)


def frames_of(farm: Farm, number: int, layer: int) -> list[BookingGroup]:
    """Of a layer with limits."""
    return farm.frames(number, layer % len(farm.layers))


def jobs_of(farm: Farm, number: int, _layer: int) -> list[BookingGroup]:
    """Jobs of one frame without limits."""
    return farm.jobs(number)


@asynccontextmanager
async def filled(servers: Servers, kind: Kind, procs: int) -> AsyncIterator[Farm]:
    """A farm with rows, of which Redis knows nothing yet."""
    farm = await Farm(servers, managed=True).make(LAYERS)
    each = min(procs // LAYERS, BATCH_MAX)
    for layer in range(procs // each):
        await farm.insert(kind(farm, each, layer))
    yield farm
    await servers.database.run(EMPTY)


async def bootstraps(servers: Servers, farm: Farm, procs: int, rounds: int) -> Bootstraps:
    """Seedings from an empty Redis."""
    taken = Bootstraps()
    for _ in range(rounds):
        await servers.client.flushall()
        async with longest_ms(servers, BOOTSTRAPPING) as longest:
            seeded = await farm.seed()
        assert seeded.procs == procs
        taken.took_s.append(seeded.took_s)
        taken.longest_ms.append(longest())
    return taken


async def recomputes(servers: Servers, farm: Farm, kind: Kind, rounds: int, quiet_s: float) -> Recomputes:
    """Recomputes under load, each compared with the quiet stretches before and behind it."""
    taken = Recomputes()
    if not rounds:
        return taken
    async with recounter(servers, farm) as recompute, loaded(farm, kind) as load:
        await load.per_s_for(quiet_s)
        before = await load.per_s_for(quiet_s)
        for _ in range(rounds):
            async with longest_ms(servers, RECOMPUTING) as longest, asyncio.timeout(RECOMPUTE_MAX_S):
                done = await recompute()
            behind = await load.per_s_for(quiet_s)
            taken.quiet_per_s.append(statistics.mean((before, behind)))
            taken.ratios.append(load.per_s(done.spans) / taken.quiet_per_s[-1])
            taken.scan_s.append(done.scan_s)
            taken.longest_ms.append(longest())
            before = behind
    found = await reconcile.reconcile_show(servers.live, farm.show, grace_s=0)
    assert found, "nobody else recounts here"
    assert found.clean, f"the books do not agree after the load: {found}"
    return taken


async def bytes_per_token(servers: Servers, kind: Kind, tokens: int) -> float:
    """Memory of Redis for tokens that were booked in batches."""
    farm = await Farm(servers, managed=True).make()
    read = await servers.live.limits.read(farm.show)
    assert read
    before = await _used_memory(servers)
    for _ in range(tokens // BATCH):
        assert await servers.live.adopt(farm.show, kind(farm, BATCH, 0), under=read.fence) == BATCH
    used = await _used_memory(servers) - before
    await servers.client.flushall()
    return used / tokens


async def _used_memory(servers: Servers) -> int:
    return int((await servers.client.info("memory"))["used_memory"])


class Load:
    """Books and releases without a pause."""

    def __init__(self, farm: Farm, kind: Kind) -> None:
        self.farm = farm
        self.kind = kind
        self.booked_at: list[float] = []
        self.ended = False

    async def run(self, loader: int) -> None:
        held: deque[range] = deque()
        live, show = self.farm.servers.live, self.farm.show
        while not self.ended:
            groups = self.kind(self.farm, BATCH, loader)
            outcomes = await live.book(show, groups)
            assert sum(len(outcome.booked) for outcome in outcomes) == BATCH, "nothing is refused here"
            self.booked_at.append(monotonic())
            held.append(range(groups[0].tokens[0], groups[-1].tokens[-1] + 1))
            if len(held) > HELD:
                await live.release(show, held.popleft())

    async def per_s_for(self, quiet_s: float) -> float:
        began = monotonic()
        await asyncio.sleep(quiet_s)
        return self.per_s([(began, monotonic())])

    def per_s(self, spans: Sequence[tuple[float, float]]) -> float:
        """Frames booked per second within these spans."""
        batches = sum(any(first <= at <= last for first, last in spans) for at in self.booked_at)
        return batches * BATCH / sum(last - first for first, last in spans)


@asynccontextmanager
async def loaded(farm: Farm, kind: Kind) -> AsyncIterator[Load]:
    load = Load(farm, kind)
    async with asyncio.TaskGroup() as tasks:
        for loader in range(LOADERS):
            tasks.create_task(load.run(loader))
        try:
            yield load
        finally:
            load.ended = True


@asynccontextmanager
async def recounter(servers: Servers, farm: Farm) -> AsyncIterator[Callable[[], Awaitable[Recompute]]]:
    """Recomputes in a process of its own: a replica that leads, beside those that book."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.accounting.reconcile_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin
    assert child.stdout
    says, hears = child.stdout, child.stdin
    hears.write(msgspec.json.encode(Told(servers.postgres_url, servers.redis_url, farm.show)) + b"\n")

    async def recompute() -> Recompute:
        hears.write(b"\n")
        return msgspec.json.decode(await says.readline(), type=Recompute)

    try:
        yield recompute
    finally:
        hears.close()
        await child.wait()


@asynccontextmanager
async def longest_ms(servers: Servers, shas: Sequence[str]) -> AsyncIterator[Callable[[], float]]:
    """How long the longest call of these scripts took inside; at least the shortest time that is looked at."""
    client, found = servers.client, [SLOW_US]
    await client.config_set("slowlog-max-len", 10_000)
    await client.slowlog_reset()
    await client.config_set("slowlog-log-slower-than", SLOW_US)
    yield lambda: max(found) / 1000
    await client.config_set("slowlog-log-slower-than", -1)
    slow = await client.slowlog_get(10_000)
    found += [each["duration"] for each in slow if any(sha.encode() in each["command"] for sha in shas)]
    await client.slowlog_reset()
