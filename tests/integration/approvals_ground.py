"""What tests of approvals share: a gate before a table of words, people, and what became of jobs."""

import os

from rota.accounting.books import Books
from rota.engine.approving import Approver
from rota.engine.finish import Finisher
from rota.engine.gate import AskLater
from rota.engine.gatekeeper import Gatekeeper
from rota.engine.replay import Replayer
from rota.engine.submit import Submitter
from rota.infra.faults import LostReply
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget
from rota.model.approval import Voter
from rota.queue import Queue
from tests.ground.jobs import task
from tests.ground.kernels import Table
from tests.ground.queues import sql

STATES = sql("""
SELECT pk_job, state, reason FROM rota.job UNION ALL SELECT pk_job, state, reason FROM rota.job_done ORDER BY 1""")
DUE = sql("UPDATE rota.approval SET ts_expires = clock_timestamp() - interval '1 s'")


def person(name, *, is_operator=True):
    return Voter(name, f"key:{name}:1", is_operator)


ANN, BOB, EVE = person("ann"), person("bob"), person("eve")


class Desk:
    """One replica's gate and approvals."""

    def __init__(self, database, kernel=None):
        self.database = database
        self.kernel = kernel or Table()
        finisher = Finisher(database, Queue(database), Books(database, None))
        self.gatekeeper = Gatekeeper(database, finisher, self.kernel)
        self.approver = Approver(database, self.gatekeeper)
        self.replayer = Replayer(database, Leases(database), self.gatekeeper, approvals=self.approver)
        self.submitter = Submitter(database, gate=AskLater())

    async def submit(self, *topics, **more):
        jobs = [one.job for one in await self.submitter.submit([task(topic=topic, **more) for topic in topics])]
        await self.gatekeeper.judge_all(jobs)
        return jobs

    async def of(self, job):
        return await self.approver.find(str(job))

    async def approve(self, job, who=ANN, reason=""):
        return await self.approver.approve(await self.of(job), who, reason)

    async def reject(self, job, who=ANN, reason=""):
        return await self.approver.reject(await self.of(job), who, reason)

    async def state(self, job):
        return next((row["state"], row["reason"]) for row in await self.database.rows(STATES) if row["pk_job"] == job)

    async def go_on(self, *jobs):
        await self.gatekeeper.judge_all(list(jobs))


async def again(call):
    try:
        return await call()
    except LostReply:
        return await call()


async def opened():
    return await Database.open(PostgresTarget(url=os.environ["URL"]))
