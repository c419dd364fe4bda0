"""Group commit: concurrent single submissions share a transaction and are answered one by one."""

import asyncio

import pytest

from rota.engine.submission.batcher import SubmissionBatcher
from rota.engine.submission.submitter import Submitter
from rota.infra.postgres import Database, PostgresTarget
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, PostgresBusy, PostgresUnavailable
from rota.model.jobs.submission import SubmitResult
from tests.support.jobs import NO_EVENTS, a_show, task
from tests.support.waiting import until


class CountingSubmitter(Submitter):
    def __init__(self, *given):
        super().__init__(*given)
        self.written = []

    async def write(self, plans, **more):
        self.written.append(len(plans))
        return await super().write(plans, **more)


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return CountingSubmitter(database, NO_EVENTS)


async def submit_all(batcher, submissions):
    return await asyncio.gather(*(batcher.submit(one) for one in submissions), return_exceptions=True)


async def test_concurrent_submissions_share_commits_and_get_their_own_jobs(submitter, database):
    batcher = SubmissionBatcher(submitter)
    submitted = await submit_all(batcher, [task(name=f"n{number}") for number in range(300)])
    assert len({one.job for one in submitted}) == 300
    assert len(submitter.written) <= 4
    assert sum(submitter.written) == 300


async def test_invalid_submission_does_not_fail_others_in_the_batch(submitter):
    batcher = SubmissionBatcher(submitter)
    given = [
        task(),
        task(show="flim"),
        task(),
        task(idempotency_key="k"),
        task("echo", idempotency_key="k"),
        task(layer={"gpus": -1}),
    ]
    outcomes = await submit_all(batcher, given)
    assert [type(one) for one in outcomes if isinstance(one, Exception)] == [
        NotFound,
        IdempotencyConflict,
        InvalidInput,
    ]
    assert outcomes[0].job != outcomes[2].job


async def test_same_key_submitted_concurrently_creates_one_job(submitter):
    outcomes = await submit_all(SubmissionBatcher(submitter), [task(idempotency_key="once") for _ in range(20)])
    assert len({one.job for one in outcomes}) == 1
    assert sum(not one.already for one in outcomes) == 1


async def test_cancelled_caller_does_not_cancel_others_in_the_batch(submitter):
    batcher = SubmissionBatcher(submitter)
    tasks = [asyncio.create_task(batcher.submit(task())) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in outcomes] == [False, False, True, False, False]


async def test_postgres_outage_fails_every_waiting_caller(submitter):
    async def fail(_plans, **_more):
        raise PostgresUnavailable("PostgreSQL does not answer.")

    submitter.write = fail
    outcomes = await submit_all(SubmissionBatcher(submitter), [task() for _ in range(5)])
    assert {type(one) for one in outcomes} == {PostgresUnavailable}


async def test_submission_that_fails_unexpectedly_fails_no_other(submitter, monkeypatch):
    real = submitter.write

    async def write(plans, **more):
        if any(plan.name == "odd" for plan in plans):
            raise ValueError("a value that the driver cannot encode")
        return await real(plans, **more)

    monkeypatch.setattr(submitter, "write", write)
    outcomes = await submit_all(SubmissionBatcher(submitter), [task(), task(name="odd"), task()])
    assert [type(one) for one in outcomes] == [SubmitResult, ValueError, SubmitResult]


@pytest.fixture
async def impatient(submitter, database_url):
    """A submitter that waits for a lock for 0.2 s."""
    opened = await Database.open(PostgresTarget(url=database_url, lock_timeout_s=0.2))
    yield CountingSubmitter(opened, NO_EVENTS)
    await opened.close()


async def test_key_held_by_a_transaction_delays_no_other_submission_for_long(submitter, impatient):
    """It makes one batch wait for the lock; what is submitted with that key later waits apart."""
    batcher = SubmissionBatcher(impatient)
    async with submitter.database.transaction() as tx:
        await submitter.submit([task(idempotency_key="held")], on=tx)
        first = await submit_all(batcher, [task(idempotency_key="held"), task(idempotency_key="free"), task()])
        assert [type(one) for one in first] == [PostgresBusy, SubmitResult, SubmitResult]
        waiting = [asyncio.create_task(batcher.submit(task(idempotency_key="held"))) for _ in range(5)]
        others = await submit_all(batcher, [task(), task(idempotency_key="other")])
        assert [type(one) for one in others] == [SubmitResult, SubmitResult]
        assert not any(one.done() for one in waiting)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert len({one.job for one in outcomes if isinstance(one, SubmitResult)}) == 1
    assert {type(one) for one in outcomes} <= {SubmitResult, PostgresBusy}


class HeldSubmitter(Submitter):
    """Returns what was written when the test says so."""

    def __init__(self, *given):
        super().__init__(*given)
        self.written, self.released = 0, asyncio.Event()

    async def write(self, plans, **more):
        submitted = await super().write(plans, **more)
        self.written += 1
        await self.released.wait()
        return submitted


async def test_submission_that_comes_as_the_last_writers_end_is_written(submitter):
    """A writer that has found nothing more to write was still counted until the event loop had called back."""
    held = HeldSubmitter(submitter.database, NO_EVENTS)
    batcher = SubmissionBatcher(held)

    async def twice():
        return [await batcher.submit(task()), await batcher.submit(task())]

    first = asyncio.create_task(twice())
    await until(lambda: held.written == 1, what="the first writer")
    second = asyncio.create_task(batcher.submit(task()))
    await until(lambda: held.written == 2, what="the second writer")
    held.released.set()  # both end at once, and the first caller submits again before the loop has called back
    async with asyncio.timeout(10):
        submitted = [*await first, await second]
    assert len({one.job for one in submitted}) == 3
