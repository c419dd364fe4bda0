"""Shared by the approval tests: a gate with a fixed policy table, voters, and the states of jobs."""

import os

from rota.engine.admission.approvals import Approver
from rota.engine.admission.controller import AdmissionController
from rota.engine.admission.decision import DeferAll
from rota.engine.admission.pending_replayer import PendingReplayer
from rota.engine.events.sink import DiscardedEvents
from rota.engine.submission.submitter import Submitter
from rota.infra.failpoints import LostReply
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget
from rota.model.approvals import Voter
from rota.model.identity.principals import Principal
from tests.support.jobs import NO_EVENTS, completions, task
from tests.support.kernels import Table
from tests.support.queue import sql

STATES = sql("""
SELECT pk_job, state, reason FROM rota.job UNION ALL SELECT pk_job, state, reason FROM rota.job_done ORDER BY 1""")
DUE = sql("UPDATE rota.approval SET ts_expires = clock_timestamp() - interval '1 s'")


def person(name, *, is_operator=True):
    return Voter(Principal(name), f"key:{name}:1", is_operator)


ANN, BOB, EVE = person("ann"), person("bob"), person("eve")


class ApprovalEvents(DiscardedEvents):
    def __init__(self, events):
        self._events = events

    def approvals_requested(self, approvals):
        self._events += [(each.subject, "requested") for each in approvals]

    def approval_decided(self, approval):
        self._events.append((approval.subject, approval.state))


class Desk:
    """The admission controller and approvals of one replica."""

    def __init__(self, database, kernel=None):
        self.database = database
        self.kernel = kernel or Table()
        self.events = []
        publisher = completions(database, events=ApprovalEvents(self.events))
        self.controller = AdmissionController(database, publisher, self.kernel)
        self.approver = Approver(database, self.controller)
        self.replayer = PendingReplayer(database, Leases(database), self.controller, approvals=self.approver)
        self.submitter = Submitter(database, NO_EVENTS, gate=DeferAll())

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
