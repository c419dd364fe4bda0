"""A process that decides, approves, rejects and expires jobs as servers do.

With a failpoint armed it crashes there, or loses a reply and repeats the call. It prints `done`.
"""

import asyncio

from rota.infra.telemetry import logs
from rota.model.errors import ApprovalNotActionable, ApprovalResolved
from tests.integration.engine.admission.approvals_support import ANN, BOB, Desk, again, opened
from tests.support.queue import sql

PENDING = sql("SELECT pk_job FROM rota.job WHERE state = 'PENDING' ORDER BY 1")
DUE = sql("UPDATE rota.approval SET ts_expires = clock_timestamp() - interval '1 s' WHERE subject = $1::text")
HELD = sql("SELECT pk_job, topic FROM rota.job WHERE state = 'APPROVAL_REQUIRED' ORDER BY 1")


async def work(replica):
    """Process every job: approve topic `approval`, reject `two`, let `soon` expire."""
    for _ in range(3):
        await again(lambda: decide_pending(replica))
        for row in await replica.database.rows(HELD):
            await again(lambda row=row: resolve(replica, row["pk_job"], row["topic"]))
        await again(replica.approver.expire)


async def decide_pending(replica):
    await replica.controller.decide_all([row["pk_job"] for row in await replica.database.rows(PENDING)])


async def resolve(replica, job, topic):
    try:
        match topic:
            case "approval":
                await replica.approve(job, ANN)
            case "two":
                await replica.approve(job, ANN)
                await replica.reject(job, BOB)
            case _:
                await replica.database.run(DUE, str(job))
    except (ApprovalResolved, ApprovalNotActionable):
        pass  # applied before the reply was lost


async def main():
    database = await opened()
    await work(Desk(database))
    print("done", flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
