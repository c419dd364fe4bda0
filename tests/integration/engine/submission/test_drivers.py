"""Submitting on the connection of the caller: jobs commit and roll back with its transaction."""

import asyncpg
import psycopg
import pytest

from rota.engine.admission.decision import DEFERRED
from rota.engine.submission.submitter import Submitter, submit_on_async, submit_on_sync
from rota.model.errors import IdempotencyConflict, InvalidInput
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.queue import agreed, sql

CALLER_TABLE = "CREATE TABLE IF NOT EXISTS rota.orders_of_the_test (id int)"
BATCH = [
    task(value="x" * 100_000, idempotency_key="k", max_cores=4, labels={"team": "fx"}),
    task(layer={"items": [1, None, "ä%s"]}, folder="shots"),
    task(layer={"frames": "1,5,9-20"}, dept="fx"),
]
WRITTEN = {"jobs": 3, "layers": 3, "entries": 7, "keys": 1, "job_caps": 1}


class DeferredGate:
    at_once = False

    def decide(self, batch):
        return [DEFERRED] * len(batch)


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Submitter(database, NO_EVENTS)


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def test_submit_on_asyncpg_follows_the_caller_transaction(submitter, database, database_url):
    connection = await asyncpg.connect(database_url)
    rolled_back = connection.transaction()
    await rolled_back.start()
    await submit_on_async(connection, BATCH)
    assert await left(database) == {}, "not visible to other sessions yet"
    await rolled_back.rollback()
    assert await left(database) == {}
    async with connection.transaction():
        submitted = await submit_on_async(connection, BATCH)
    await connection.close()
    assert len({one.job for one in submitted}) == 3
    assert await left(database) == WRITTEN
    assert await waiting(database) == 1 + 3 + 14


async def test_submit_on_async_psycopg_follows_the_caller_transaction(submitter, database, database_url):
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await submit_on_async(connection, BATCH)
        await connection.rollback()
        assert await left(database) == {}
        await submit_on_async(connection, BATCH)
    assert await left(database) == WRITTEN


async def test_submit_on_sync_psycopg_follows_the_caller_transaction(submitter, database, database_url):
    with psycopg.connect(database_url) as connection:
        submit_on_sync(connection, BATCH)
        connection.rollback()
        assert await left(database) == {}
        assert submit_on_sync(connection, []) == []
        submitted = submit_on_sync(connection, BATCH)
    assert await left(database) == WRITTEN
    assert await waiting(database) == 1 + 3 + 14
    assert [one.already for one in await submitter.submit(BATCH[:1])] == [True]
    with psycopg.connect(database_url) as connection:
        assert submit_on_sync(connection, BATCH[:1])[0].job == submitted[0].job


async def test_refused_submission_leaves_the_caller_transaction_usable(submitter, database, database_url):
    await submitter.submit([task(idempotency_key="k")])
    before = await left(database)
    connection = await asyncpg.connect(database_url)
    await connection.execute(CALLER_TABLE)
    async with connection.transaction():
        await connection.execute("INSERT INTO rota.orders_of_the_test VALUES (1)")
        with pytest.raises(InvalidInput, match="did you mean film"):
            await submit_on_async(connection, [task(show="filn")])
        with pytest.raises(IdempotencyConflict):
            await submit_on_async(connection, [task("other", idempotency_key="k")])
    assert await connection.fetchval("SELECT count(*) FROM rota.orders_of_the_test") == 1
    await connection.execute("DROP TABLE rota.orders_of_the_test")
    await connection.close()
    assert await left(database) == before


async def test_deferred_jobs_notify_the_gate_when_the_caller_commits(database, database_url):
    await a_show(database)
    with psycopg.connect(database_url) as connection:
        submit_on_sync(connection, BATCH, gate=DeferredGate())
        connection.rollback()
        submit_on_sync(connection, BATCH, gate=DeferredGate())
    assert await left(database) == {"jobs": 3, "layers": 3, "keys": 1, "job_caps": 1, "messages": 1}
    assert await database.value(sql("SELECT subject FROM rota.outbox")) == "sys.job.gate"


async def test_submit_on_a_non_connection_is_refused():
    with pytest.raises(InvalidInput, match="cannot be queued on a object"):
        await submit_on_async(object(), [task()])
    with pytest.raises(InvalidInput, match="cannot be queued on a int"):
        submit_on_sync(5, [task()])
