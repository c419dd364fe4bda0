"""Idempotency keys: the same key gives the same job, however often and concurrently it is submitted."""

import asyncio

import pytest

from rota.engine.submission.submitter import Submitter
from rota.infra.postgres import Database, PostgresTarget
from rota.model.errors import IdempotencyConflict, InvalidInput
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.queue import agreed, sql
from tests.support.waiting import until

WAITERS = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
ENDED = sql("""
WITH gone AS (DELETE FROM rota.job RETURNING *)
INSERT INTO rota.job_done (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, ts_submitted,
                           ts_finished, history, layers)
SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, 'FAILED', ts_submitted, now(), history, '{}'
FROM gone
""")


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Submitter(database, NO_EVENTS)


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def test_same_key_returns_the_same_job(submitter, database):
    [first] = await submitter.submit([task(idempotency_key="k")])
    [again] = await submitter.submit([task(idempotency_key="k")])
    assert (again.job, again.state, again.already, first.already) == (first.job, "SCHEDULED", True, False)
    assert await left(database) == {"jobs": 1, "layers": 1, "entries": 1, "keys": 1}
    assert await waiting(database) == 1


async def test_key_finds_its_job_after_it_ended_and_after_it_was_deleted(submitter, database):
    [first] = await submitter.submit([task(idempotency_key="k")])
    await database.run(ENDED)
    [again] = await submitter.submit([task(idempotency_key="k")])
    assert (again.job, again.state, again.already) == (first.job, "FAILED", True)
    await database.run(sql("DELETE FROM rota.job_done"))
    [late] = await submitter.submit([task(idempotency_key="k")])
    assert (late.job, late.state, late.already) == (first.job, None, True)


async def test_key_conflict_refuses_the_whole_batch(submitter, database):
    [first] = await submitter.submit([task(idempotency_key="k")])
    with pytest.raises(IdempotencyConflict, match="'k' was used for another submission") as refused:
        await submitter.submit([task(idempotency_key="new"), task("other", idempotency_key="k")])
    assert (refused.value.code, refused.value.facts) == ("idempotency_conflict", {"job": str(first.job)})
    assert await left(database) == {"jobs": 1, "layers": 1, "entries": 1, "keys": 1}


async def test_key_conflict_leaves_the_caller_transaction_usable_and_takes_no_key(submitter, database):
    await submitter.submit([task(idempotency_key="k")])
    async with database.transaction() as tx:
        with pytest.raises(IdempotencyConflict):
            await submitter.submit([task(idempotency_key="new"), task("other", idempotency_key="k")], on=tx)
        await submitter.submit([task("third", idempotency_key="new")], on=tx)
    assert await left(database) == {"jobs": 2, "layers": 2, "entries": 2, "keys": 2}


async def test_batch_may_mix_known_new_and_missing_keys(submitter, database):
    [first] = await submitter.submit([task(idempotency_key="a", layer={"frames": 5}, max_cores=2)])
    old = task(idempotency_key="a", layer={"frames": 5}, max_cores=2)
    new = task(idempotency_key="b", layer={"items": [1, 2, 3]}, folder="shots", max_cores=3)
    answers = await submitter.submit([task(layer={"frames": 2}), old, new, new])
    assert [answer.already for answer in answers] == [False, True, False, True]
    assert (answers[1].job, answers[3].job, answers[3].state) == (first.job, answers[2].job, "SCHEDULED")
    assert await left(database) == {"jobs": 3, "layers": 3, "entries": 5, "keys": 2, "job_caps": 2}
    assert await waiting(database) == 5 + 2 + 3


async def test_keys_of_different_shows_are_independent(submitter, database):
    await a_show(database, "other", depts=())
    answers = await submitter.submit([task(idempotency_key="k"), task("x", idempotency_key="k", show="other")])
    assert [answer.already for answer in answers] == [False, False]


@pytest.mark.parametrize("commits", [True, False])
async def test_concurrent_use_of_a_key_submits_once(submitter, database, commits):
    await submitter.submit([task()])
    rolled_back = RuntimeError("rolled back")
    waits = []

    async def second():
        [answer] = await submitter.submit([task(idempotency_key="k")])
        return answer

    async def first():
        async with database.transaction() as tx:
            [answer] = await submitter.submit([task(idempotency_key="k")], on=tx)
            waits.append(asyncio.create_task(second()))
            await until(lambda: has_lock_waiter(database), what="the second submitter to wait for the first")
            if not commits:
                raise rolled_back
            return answer

    try:
        answer = await first()
    except RuntimeError:
        answer = None
    other = await waits[0]
    assert other.already is commits
    assert answer is None or other.job == answer.job
    assert (await left(database))["jobs"] == 2
    assert await waiting(database) == 2


async def has_lock_waiter(database):
    return await database.value(WAITERS) > 0


async def test_many_concurrent_submitters_of_the_same_keys_create_each_job_once(submitter, database, database_url):
    keys = [f"k{number}" for number in range(20)]
    others = [await Database.open(PostgresTarget(url=database_url)) for _ in range(3)]

    async def submit(by, order):
        return await Submitter(by, NO_EVENTS).submit([task(idempotency_key=key) for key in order])

    answers = await asyncio.gather(
        submit(database, keys),
        *(submit(other, keys[at::-1] + keys[:at:-1]) for at, other in zip((4, 9, 14), others, strict=True)),
    )
    for other in others:
        await other.close()
    assert len({one.job for answer in answers for one in answer}) == 20
    assert await left(database) == {"jobs": 20, "layers": 20, "entries": 20, "keys": 20}
    assert sum(not one.already for answer in answers for one in answer) == 20


async def test_overlong_key_is_refused(submitter):
    with pytest.raises(InvalidInput, match="idempotency_key"):
        await submitter.submit([task(idempotency_key="k" * 201)])
