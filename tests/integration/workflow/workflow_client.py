"""A process that advances runs until there is nothing to advance; it retries after a lost reply. Prints `done`."""

import asyncio
import os

from rota.infra.failpoints import LostReply
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.telemetry import logs
from rota.model.errors import RotaError
from tests.support.workflows import WorkflowHarness


async def main():
    idle_s = float(os.environ.get("IDLE_S", "30"))
    database = await Database.open(PostgresTarget(url=os.environ["URL"], idle_in_transaction_s=idle_s))
    harness = WorkflowHarness(database)
    try:
        await harness.advance()
    except LostReply:
        await harness.advance()
    except RotaError as error:
        print("refused", error.code, flush=True)
    print("done", flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
