"""Submissions that come at the same time are written together, and answered one by one."""

import asyncio

import pytest

from rota.engine.submission.batcher import SubmissionBatcher
from rota.engine.submission.submitter import Submitter
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, PostgresUnavailable
from tests.support.jobs import a_show, task


class Counting(Submitter):
    def __init__(self, *given):
        super().__init__(*given)
        self.written = []

    async def write(self, plans, **more):
        self.written.append(len(plans))
        return await super().write(plans, **more)


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Counting(database)


async def all_of(together, submissions):
    return await asyncio.gather(*(together.submit(one) for one in submissions), return_exceptions=True)


async def test_what_comes_at_once_is_committed_together_and_everybody_gets_its_own_job(submitter, database):
    together = SubmissionBatcher(submitter)
    submitted = await all_of(together, [task(name=f"n{number}") for number in range(300)])
    assert len({one.job for one in submitted}) == 300
    assert len(submitter.written) <= 4
    assert sum(submitter.written) == 300


async def test_nobody_is_refused_for_what_somebody_else_has_sent(submitter):
    together = SubmissionBatcher(submitter)
    given = [
        task(),
        task(show="flim"),
        task(),
        task(idempotency_key="k"),
        task("echo", idempotency_key="k"),
        task(layer={"gpus": -1}),
    ]
    outcomes = await all_of(together, given)
    assert [type(one) for one in outcomes if isinstance(one, Exception)] == [
        NotFound,
        IdempotencyConflict,
        InvalidInput,
    ]
    assert outcomes[0].job != outcomes[2].job


async def test_a_key_that_comes_twice_at_once_is_one_job(submitter):
    outcomes = await all_of(SubmissionBatcher(submitter), [task(idempotency_key="once") for _ in range(20)])
    assert len({one.job for one in outcomes}) == 1
    assert sum(not one.already for one in outcomes) == 1


async def test_one_who_has_gone_takes_nobody_along(submitter):
    together = SubmissionBatcher(submitter)
    tasks = [asyncio.create_task(together.submit(task())) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in outcomes] == [False, False, True, False, False]


async def test_an_outage_is_told_to_everybody_who_waits(submitter):
    async def away(_plans, **_more):
        raise PostgresUnavailable("PostgreSQL does not answer.")

    submitter.write = away
    outcomes = await all_of(SubmissionBatcher(submitter), [task() for _ in range(5)])
    assert {type(one) for one in outcomes} == {PostgresUnavailable}
