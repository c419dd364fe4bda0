"""Marks give way to whoever is at a job: they wait for nobody, so they are in no circle of waiting."""

import asyncio

from rota.engine.dispatch.state_writer import JobStateWriter
from rota.engine.submission.submitter import Submitter
from rota.infra.clock import SystemClock
from tests.support.jobs import a_show, task
from tests.support.queue import sql

STATES = sql("SELECT str_name, state FROM rota.job ORDER BY str_name")
LOCK = sql("SELECT pk_job FROM rota.job WHERE pk_job = $1::uuid FOR UPDATE")
DELETE = sql("DELETE FROM rota.job WHERE pk_job = $1::uuid")


class LateClock(SystemClock):
    """Every look at it is a minute after the one before."""

    looked = 0

    def monotonic(self):
        self.looked += 1
        return super().monotonic() + 60 * self.looked


async def two_marked(database):
    """Two jobs that were dispatched, and what writes it down."""
    await a_show(database)
    first, second = await Submitter(database).submit([task(name="first"), task(name="second")])
    marks = JobStateWriter(database, LateClock())
    marks.record_dispatched([first.job, second.job])
    return marks, first.job


async def states(database):
    return {row["str_name"]: row["state"] for row in await database.rows(STATES)}


async def test_a_job_that_somebody_is_at_is_marked_later_and_keeps_nobody_waiting(database):
    marks, first = await two_marked(database)
    async with database.transaction() as tx:
        await tx.rows(LOCK, first)
        await asyncio.wait_for(marks.flush(), 3)
        assert await states(database) == {"first": "SCHEDULED", "second": "DISPATCHED"}
    await marks.flush()
    assert await states(database) == {"first": "DISPATCHED", "second": "DISPATCHED"}


async def test_a_job_that_is_being_ended_is_forgotten_when_it_has_ended(database):
    marks, first = await two_marked(database)
    async with database.transaction() as tx:
        await tx.run(DELETE, first)
        await asyncio.wait_for(marks.flush(), 3)
        assert marks.pending
    await marks.flush()
    assert not marks.pending
