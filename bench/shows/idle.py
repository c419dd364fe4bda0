"""What a server with nothing to do costs: CPU of the server and PostgreSQL while jobs in many queues wait for a pool
without workers."""

from __future__ import annotations

import asyncio
from typing import Final

from bench.e2e import deployment
from bench.e2e.deployment import ELSEWHERE, SHOW, farm
from bench.e2e.setup import Ground
from rota.engine.events.sink import DiscardedEvents
from rota.engine.submission.submitter import Submitter
from rota.infra.postgres import Database, PostgresTarget
from rota.model.jobs.submission import LayerSpec, Submission

SETTLE_S: Final = 5.0
"""Until caches are filled and grown tables analysed."""
IDLE_S: Final = 15.0
BATCH: Final = 500
WARM: Final = 200
COMPONENTS: Final = ("server", "postgres")


async def idle_cores(ground: Ground, queues: int) -> float:
    database = f"idle{queues}"
    await deployment.prepare(ground, database)
    await _fill(ground, database, queues)
    async with farm(ground, database, slots=10, warm=WARM) as running:
        await asyncio.sleep(SETTLE_S)
        before = running.used_s()
        await asyncio.sleep(IDLE_S)
        after = running.used_s()
    return sum(after[name] - before[name] for name in COMPONENTS) / IDLE_S


async def _fill(ground: Ground, database: str, queues: int) -> None:
    opened = await Database.open(PostgresTarget(url=ground.postgres.url(database)))
    submitter, layer = Submitter(opened, DiscardedEvents()), LayerSpec(task="noop")
    submissions = [
        Submission(show=SHOW, topic=ELSEWHERE, layers=(layer,), labels={"preferred_worker_id": f"absent{number}"})
        for number in range(queues)
    ]
    for first in range(0, queues, BATCH):
        await submitter.submit(submissions[first : first + BATCH])
    await opened.close()
