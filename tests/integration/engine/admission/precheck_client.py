"""A process that submits two jobs and decides them; decisions are valid for 1.5 s.

It prechecks the policy unless LATER is set. It prints the states after submission and after the decision.
"""

import asyncio
import os

from rota.engine.admission import controller, precheck
from rota.engine.admission.decision import DeferAll
from rota.engine.admission.precheck import AdmissionPrecheck
from rota.engine.submission.submitter import Submitter
from rota.infra.telemetry import logs
from tests.integration.engine.admission.approvals_support import Desk, opened
from tests.support.jobs import NO_EVENTS, task
from tests.support.kernels import Table

TTL_S = 1.5


async def main():
    precheck.DECISION_TTL_S = controller.DECISION_TTL_S = TTL_S
    database = await opened()
    ahead = None if "LATER" in os.environ else AdmissionPrecheck(database, Table())
    submitter = Submitter(database, NO_EVENTS, gate=DeferAll(), ahead=ahead)
    submitted = await submitter.submit([task(topic="allow"), task(topic="allow", idempotency_key="k")])
    print(*(one.state for one in submitted), flush=True)
    replica = Desk(database)
    await replica.controller.decide_all([one.job for one in submitted])
    print(*[(await replica.state(one.job))[0] for one in submitted], flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
