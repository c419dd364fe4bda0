"""A process that gates, approves, rejects and lets expire what it finds, as servers do.

Started with a fault armed it dies there, or loses a reply and then asks again. It prints `done`.
"""

import asyncio

from rota.infra.telemetry import logs
from rota.model.errors import ApprovalNotActionable, ApprovalResolved
from tests.integration.engine.admission.approvals_support import ANN, BOB, Desk, again, opened
from tests.support.queue import sql

PENDING = sql("SELECT pk_job FROM rota.job WHERE state = 'PENDING' ORDER BY 1")
DUE = sql("UPDATE rota.approval SET ts_expires = clock_timestamp() - interval '1 s' WHERE subject = $1::text")
HELD = sql("SELECT pk_job, topic FROM rota.job WHERE state = 'APPROVAL_REQUIRED' ORDER BY 1")


async def work(desk):
    """Until nothing is left to do: those of topic `approval` are approved, `two` is rejected, `soon` expires."""
    for _ in range(3):
        await again(lambda: judged(desk))
        for row in await desk.database.rows(HELD):
            await again(lambda row=row: decided(desk, row["pk_job"], row["topic"]))
        await again(desk.approver.expire)


async def judged(desk):
    await desk.gatekeeper.decide_all([row["pk_job"] for row in await desk.database.rows(PENDING)])


async def decided(desk, job, topic):
    try:
        match topic:
            case "approval":
                await desk.approve(job, ANN)
            case "two":
                await desk.approve(job, ANN)
                await desk.reject(job, BOB)
            case _:
                await desk.database.run(DUE, str(job))
    except (ApprovalResolved, ApprovalNotActionable):
        pass  # done before the reply was lost


async def main():
    database = await opened()
    await work(Desk(database))
    print("done", flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
