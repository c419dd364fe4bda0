"""A process that submits with idempotency keys, and admits.

With a failpoint armed it crashes there, or loses a reply and repeats the call as a caller would. It prints `done`.
"""

import asyncio
import os

from rota.engine.admission.transitions import admit
from rota.engine.submission.submitter import Submitter
from rota.infra.failpoints import LostReply
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.telemetry import logs
from tests.support.jobs import NO_EVENTS, task


class DeferredGate:
    at_once = False


BATCH = [
    task(idempotency_key="a", layer={"frames": 10}),
    task(idempotency_key="b", layer={"items": [1, 2, 3]}, folder="shots", max_cores=4),
    task(value="x" * 100_000, idempotency_key="c"),
]


async def again(call):
    try:
        return await call()
    except LostReply:
        return await call()


async def work(database):
    submitted = await again(lambda: Submitter(database, NO_EVENTS, gate=DeferredGate()).submit(BATCH))

    async def admit_all():
        async with database.transaction() as tx:
            await admit(tx, [one.job for one in submitted])

    await again(admit_all)
    await again(lambda: Submitter(database, NO_EVENTS).submit([task(idempotency_key="d")]))


async def main():
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    await work(database)
    print("done", flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
