"""A process that advances runs, or approves the step `VOTE` as bob; it repeats the call after a lost reply."""

import asyncio
import os

from rota.infra.postgres import Database, PostgresTarget
from rota.infra.telemetry import logs
from rota.model.errors import RotaError
from tests.integration.engine.admission.approvals_support import BOB, Desk, again
from tests.support.workflows import WorkflowHarness


async def main():
    idle_s = float(os.environ.get("IDLE_S", "30"))
    database = await Database.open(PostgresTarget(url=os.environ["URL"], idle_in_transaction_s=idle_s))
    harness, people = WorkflowHarness(database), Desk(database)
    people.approver.subjects["step"] = harness.advancer.advancing.approving
    subject = os.environ.get("VOTE")
    try:
        await again(lambda: people.approve(subject, BOB) if subject else harness.advance())
    except RotaError as error:
        print("refused", error.code, flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
