"""A process that submits two jobs and judges them, with words that count for a second and a half.

It asks ahead, unless LATER is set. It prints how the jobs were written, and how they are when they were judged.
"""

import asyncio
import os

from rota.engine import gate_ahead, gatekeeper
from rota.engine.gate import AskLater
from rota.engine.gate_ahead import Ahead
from rota.engine.submit import Submitter
from rota.infra.telemetry import logs
from tests.ground.jobs import task
from tests.ground.kernels import Table
from tests.integration.approvals_ground import Desk, opened

WORD_S = 1.5


async def main():
    gate_ahead.WORD_S = gatekeeper.WORD_S = WORD_S
    database = await opened()
    ahead = None if "LATER" in os.environ else Ahead(database, Table())
    submitter = Submitter(database, gate=AskLater(), ahead=ahead)
    submitted = await submitter.submit([task(topic="allow"), task(topic="allow", idempotency_key="k")])
    print(*(one.state for one in submitted), flush=True)
    desk = Desk(database)
    await desk.gatekeeper.judge_all([one.job for one in submitted])
    print(*[(await desk.state(one.job))[0] for one in submitted], flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
