"""A process that runs the workflow services of a replica once and pauses a run. Prints `done`."""

import asyncio
import os
from uuid import UUID

from rota.infra.postgres import Database, PostgresTarget
from rota.infra.redis import RedisTarget, connect
from rota.infra.telemetry import logs
from rota.model.errors import RotaError
from tests.support.workflow_recovery import RecoveryHarness


async def main():
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    redis = connect(RedisTarget(url=os.environ["REDIS_URL"]))
    times = {"run_lock_s": float(os.environ.get("LOCK_S", "30")), "lease_s": float(os.environ.get("LEASE_S", "30"))}
    harness = RecoveryHarness(database, redis, **times, holder=os.environ.get("HOLDER", "net"))
    only = os.environ.get("ONLY")
    try:
        if only == "mend":
            await harness.repair()
        elif only is None:
            async for step in harness.keep():
                await step()
        await harness.commands.pause(UUID(os.environ["RUN"]), "ann")
    except RotaError as error:
        print("refused", error.code, flush=True)
    print("done", flush=True)
    await redis.aclose()
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
