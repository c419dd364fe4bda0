"""What an explanation costs while a hundred thousand frames wait: asked of a replica, and of PostgreSQL alone.

Half of what waits are jobs of one frame each, the other half is one job; five thousand frames are booked on a hundred
workers, so that every worker is full and the subscription is used up: the answer with the most to read.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final
from uuid import uuid4

import msgspec

from bench.report import Figure
from bench.server import Server, opened, statement
from rota.accounting.service import AccountingService
from rota.engine.dispatch.pending_queues import PendingQueues
from rota.engine.dispatch.pending_reader import PendingReader
from rota.engine.events.sink import DiscardedEvents
from rota.engine.explain.explainer import Explainer
from rota.engine.submission.submitter import Submitter
from rota.infra.clock import SystemClock
from rota.infra.postgres import Database, migrate
from rota.model.ids import JobId, PoolId
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.protocol import Heartbeat, Register
from rota.placement import Pool, PoolSpec, Routes, WorkerRegistry
from rota.placement.route_store import RouteStore
from rota.queue import Queue

WAITING: Final = 100_000
BOOKED: Final = 5_000
WORKERS: Final = 100
ASKS: Final = 300
FILL: Final = 5_000
BAR_MS: Final = 100.0

WORKER = statement("INSERT INTO rota.worker (pk_host, str_name, pool, pk_alloc, hello) VALUES ($1, $2, 'farm', $3, $4)")
BOOK = statement(
    """INSERT INTO rota.proc
       SELECT 9000000 + i, j.pk_show, $1::uuid, j.pk_folder, gen_random_uuid(), gen_random_uuid(), j.pk_dept,
              ($2::uuid[])[1 + i % $3::int], 100, 0, 1, now()
       FROM (SELECT * FROM rota.job LIMIT 1) AS j, generate_series(1, $4::int) AS i"""
)
USED = statement("UPDATE rota.subscription SET int_cores = $1::bigint")
ANALYSE = statement("ANALYZE")


class Samples(msgspec.Struct):
    by_server_ms: list[float] = []
    by_postgres_ms: list[float] = []

    def figures(self) -> Iterator[Figure]:
        note = f"{WAITING:,} frames waiting, {BOOKED:,} booked, {WORKERS} workers; asked of a replica"
        yield Figure("explain_p99_ms", [p99(self.by_server_ms)], bar=BAR_MS, note=note)
        yield Figure("explain_p50_ms", self.by_server_ms, note="the same, half of the answers")
        yield Figure("explain_postgres_p99_ms", [p99(self.by_postgres_ms)], note="as `rota explain` asks, of no server")


def p99(samples: Sequence[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]


async def explaining(server: Server, *, waiting: int = WAITING, asks: int = ASKS) -> Samples:
    """Makes a database of its own, fills it, and asks about jobs at random."""
    url = await server.create("explaining")
    try:
        async with opened(url) as database:
            await migrate(database)
            jobs, explainer = await _filled(database, waiting)
            return Samples(
                await _asked(explainer, jobs, asks), await _asked(Explainer(database), jobs, max(20, asks // 5))
            )
    finally:
        await server.drop("explaining")


async def _asked(explainer: Explainer, jobs: Sequence[JobId], asks: int) -> list[float]:
    took_ms = []
    for job in [jobs[-1], *random.Random(1).choices(jobs, k=asks + 10)]:
        began = time.perf_counter()
        told = await explainer.explain(job)
        took_ms.append((time.perf_counter() - began) * 1000)
        assert "quota_subscription" in [reason.code for reason in told.reasons], told
    return took_ms[10:]  # the first warm connections and plans


async def _filled(database: Database, waiting: int) -> tuple[list[JobId], Explainer]:
    books = AccountingService(database, None)
    admin = books.admin
    await admin.create_show("film", actor="bench")
    await admin.create_folder("film", "default", actor="bench")
    await admin.create_dept("default", actor="bench")
    change = await admin.create_pool("farm", actor="bench")
    assert change.after is not None
    pool = PoolId(change.after.id)
    await admin.create_subscription("film", "farm", size=BOOKED, burst=BOOKED, actor="bench")
    await RouteStore(database).set_topic("*", ["farm"], actor="bench")
    jobs = [job async for job in _submitted(database, waiting)]
    registry = await _booked(database, pool)
    await database.run(ANALYSE)
    clock = SystemClock()
    pending_queues = PendingQueues(clock, registry.usable_pools)
    await PendingReader(pending_queues, database, Queue(database), clock).refresh()
    return jobs, Explainer(database, accounting=books, registry=registry, queues=pending_queues)


async def _submitted(database: Database, waiting: int) -> AsyncIterator[JobId]:
    """The one with half of the frames comes last."""
    submitter = Submitter(database, DiscardedEvents())
    one = Submission(show="film", layers=(LayerSpec(task="noop"),))
    for _ in range(waiting // 2 // FILL):
        for each in await submitter.submit([one] * FILL):
            yield each.job
    [large] = await submitter.submit([Submission(show="film", layers=(LayerSpec(task="noop", frames=waiting // 2),))])
    yield large.job


async def _booked(database: Database, pool: PoolId) -> WorkerRegistry:
    """Full workers, in PostgreSQL and in memory."""
    registry = WorkerRegistry()
    registry.set_routes(Routes({"*": ("farm",)}, {"farm": Pool(pool, PoolSpec(name="farm"))}))
    each = BOOKED // WORKERS
    hello = Register(name="w", pool="farm", slots=each + 1, cores=100 * (each + 1), tasks=("noop",))
    hosts = [uuid4() for _ in range(WORKERS)]
    for number, host in enumerate(hosts):
        await database.run(WORKER, host, f"w{number}", pool, msgspec.msgpack.encode(hello))
        registry.record_heartbeat(
            Heartbeat(
                worker=host,
                name=f"w{number}",
                pool="farm",
                number=1,
                slots=hello.slots,
                cores=hello.cores,
                capabilities=("task.noop",),
            )
        )
    await database.run(BOOK, pool, hosts, WORKERS, BOOKED)
    await database.run(USED, BOOKED * 100)
    return registry
