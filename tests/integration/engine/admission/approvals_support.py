"""Shared by the approval tests: a gate with a fixed policy table, voters, and the states of jobs."""

import os

from rota.accounting.service import AccountingService
from rota.engine.admission.approvals import Approver
from rota.engine.admission.controller import AdmissionController
from rota.engine.admission.decision import DeferAll
from rota.engine.admission.pending_replayer import PendingReplayer
from rota.engine.completion.finisher import Finisher
from rota.engine.submission.submitter import Submitter
from rota.infra.failpoints import LostReply
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget
from rota.model.approvals import Voter
from rota.queue import Queue
from tests.support.jobs import task
from tests.support.kernels import Table
from tests.support.queue import sql

STATES = sql("""
SELECT pk_job, state, reason FROM rota.job UNION ALL SELECT pk_job, state, reason FROM rota.job_done ORDER BY 1""")
DUE = sql("UPDATE rota.approval SET ts_expires = clock_timestamp() - interval '1 s'")


def person(name, *, is_operator=True):
    return Voter(name, f"key:{name}:1", is_operator)


ANN, BOB, EVE = person("ann"), person("bob"), person("eve")


class Desk:
    """The admission controller and approvals of one replica."""

    def __init__(self, database, kernel=None):
        self.database = database
        self.kernel = kernel or Table()
        finisher = Finisher(database, Queue(database), AccountingService(database, None))
        self.controller = AdmissionController(database, finisher, self.kernel)
        self.approver = Approver(database, self.controller)
        self.replayer = PendingReplayer(database, Leases(database), self.controller, approvals=self.approver)
        self.submitter = Submitter(database, gate=DeferAll())

    async def submit(self, *topics, **more):
        jobs = [one.job for one in await self.submitter.submit([task(topic=topic, **more) for topic in topics])]
        await self.controller.decide_all(jobs)
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
        await self.controller.decide_all(list(jobs))


async def again(call):
    try:
        return await call()
    except LostReply:
        return await call()


async def opened():
    return await Database.open(PostgresTarget(url=os.environ["URL"]))
