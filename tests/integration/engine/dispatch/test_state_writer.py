"""The state writer never waits for row locks, so it cannot deadlock with finishers."""

import asyncio

from rota.engine.completion.job_ends import END_AS
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.engine.submission.submitter import Submitter
from rota.infra.clock import SystemClock
from tests.support.jobs import NO_EVENTS, a_show, task
from tests.support.queue import sql

STATES = sql("SELECT str_name, state FROM rota.job ORDER BY str_name")
LOCK = sql("SELECT pk_job FROM rota.job WHERE pk_job = $1::uuid FOR UPDATE")
REASON = sql("SELECT state, reason FROM rota.job WHERE pk_job = $1::uuid")
DELETE = sql("DELETE FROM rota.job WHERE pk_job = $1::uuid")


class LateClock(SystemClock):
    """Each reading is a minute after the previous one."""

    readings = 0

    def monotonic(self):
        self.readings += 1
        return super().monotonic() + 60 * self.readings


async def writer_with_two_jobs(database):
    """A writer with two dispatched jobs pending, and the first job."""
    await a_show(database)
    first, second = await Submitter(database, NO_EVENTS).submit([task(name="first"), task(name="second")])
    writer = JobStateWriter(database, NO_EVENTS, LateClock())
    writer.record_dispatched([first.job, second.job])
    return writer, first.job


async def states(database):
    return {row["str_name"]: row["state"] for row in await database.rows(STATES)}


async def test_flush_skips_a_locked_job_without_waiting_and_writes_it_later(database):
    writer, first = await writer_with_two_jobs(database)
    async with database.transaction() as tx:
        await tx.rows(LOCK, first)
        await asyncio.wait_for(writer.flush(), 3)
        assert await states(database) == {"first": "SCHEDULED", "second": "DISPATCHED"}
    await writer.flush()
    assert await states(database) == {"first": "DISPATCHED", "second": "DISPATCHED"}


async def test_job_deleted_during_a_flush_is_dropped_from_pending(database):
    writer, first = await writer_with_two_jobs(database)
    async with database.transaction() as tx:
        await tx.run(DELETE, first)
        await asyncio.wait_for(writer.flush(), 3)
        assert writer.pending
    await writer.flush()
    assert not writer.pending


async def test_state_written_late_keeps_the_reason_of_a_job_that_is_being_ended(database):
    await a_show(database)
    [submitted] = await Submitter(database, NO_EVENTS).submit([task()])
    writer = JobStateWriter(database, NO_EVENTS, LateClock())
    writer.record_running([submitted.job])
    await database.row(END_AS, submitted.job, "TIMEOUT", "deadline_expired")
    await writer.flush()
    row = await database.row(REASON, submitted.job)
    assert (row["state"], row["reason"]) == ("RUNNING", "deadline_expired")
