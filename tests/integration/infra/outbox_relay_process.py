"""An outbox relay in its own process, for tests that kill or pause it; URLs come from the environment."""

import asyncio
import os

from rota.infra.nats import Bus, NatsTarget, StreamSpec
from rota.infra.outbox import OutboxRelay
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.service import Lifecycle

JOBS = StreamSpec(name="JOBS", subjects=("job.>",), storage="memory")


async def relay():
    database = await Database.open(PostgresTarget(url=os.environ["TEST_POSTGRES_URL"]))
    bus = await Bus.connect(
        NatsTarget(
            url=os.environ["TEST_NATS_URL"],
            prefix=os.environ["TEST_PREFIX"],
            publish_timeout_s=float(os.environ.get("TEST_PUBLISH_TIMEOUT_S", "2")),
        )
    )
    await bus.ensure([JOBS])
    await OutboxRelay(database, bus).run(Lifecycle(asyncio.Event(), lambda: print("ready", flush=True)))


if __name__ == "__main__":
    asyncio.run(relay())
