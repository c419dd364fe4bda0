"""One idempotency key for a bulk: its jobs exist once, whoever repeats it, and however often at the same time."""

import asyncio

import pytest

from rota.engine.submission.bulk_key import BulkKey, bulk_ids, following_ids
from rota.engine.submission.submitter import Submitter, validate_decoded
from rota.infra.failpoints import LostReply
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound
from tests.integration.engine.submission.test_idempotency_keys import ENDED
from tests.support.harness.lost_replies import lose_reply
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.queue import sql

COUNT = 30
WRITTEN = {"jobs": COUNT, "layers": COUNT, "entries": COUNT, "keys": 1}


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Submitter(database, NO_EVENTS)


def plans(count=COUNT, **more):
    return validate_decoded([task(name=f"n{number}", **more) for number in range(count)])


def the_key(key="k", digest=b"d", show="film"):
    return BulkKey(show, key, digest)


async def test_repeated_bulk_returns_the_same_jobs_in_order(submitter, database):
    first = await submitter.write(plans(), bulk=the_key())
    again = await submitter.write(plans(), bulk=the_key())
    assert [each.job for each in again] == [each.job for each in first] == sorted({each.job for each in first})
    assert {(each.state, each.already) for each in again} == {("SCHEDULED", True)}
    assert {each.already for each in first} == {False}
    assert await left(database) == WRITTEN


async def test_bulks_with_the_same_key_at_the_same_time_create_its_jobs_once(submitter, database):
    outcomes = await asyncio.gather(*(submitter.write(plans(), bulk=the_key()) for _ in range(8)))
    assert len({tuple(each.job for each in outcome) for outcome in outcomes}) == 1
    assert sum(not outcome[0].already for outcome in outcomes) == 1
    assert await left(database) == WRITTEN


async def test_lost_reply_of_the_commit_is_repeated_without_a_second_job(submitter, database, monkeypatch):
    lose_reply(monkeypatch, "submit.statement:2")
    with pytest.raises(LostReply):
        await submitter.write(plans(), bulk=the_key())
    await submitter.write(plans(), bulk=the_key())
    assert await left(database) == WRITTEN


async def test_ended_and_deleted_jobs_of_a_bulk_are_found(submitter, database):
    first = await submitter.write(plans(), bulk=the_key())
    await database.run(ENDED)
    assert {each.state for each in await submitter.write(plans(), bulk=the_key())} == {"FAILED"}
    await database.run(sql("DELETE FROM rota.job_done"))
    late = await submitter.write(plans(), bulk=the_key())
    assert [(each.job, each.state, each.already) for each in late] == [(each.job, None, True) for each in first]


async def test_key_of_another_bulk_is_a_conflict_and_writes_nothing(submitter, database):
    first = await submitter.write(plans(), bulk=the_key())
    with pytest.raises(IdempotencyConflict, match="'k' was used for other submissions") as refused:
        await submitter.write(plans(2), bulk=the_key(digest=b"e"))
    assert refused.value.facts == {"job": str(first[0].job)}
    with pytest.raises(IdempotencyConflict):
        await submitter.write(validate_decoded([task(idempotency_key="k")]))
    assert await left(database) == WRITTEN


@pytest.mark.parametrize(("refused", "error"), [({"show": "flim"}, NotFound), ({"dept": "none"}, NotFound)])
async def test_refused_bulk_takes_no_key(submitter, database, refused, error):
    with pytest.raises((error, InvalidInput)):
        await submitter.write(plans(**refused), bulk=the_key(show=refused.get("show", "film")))
    await submitter.write(plans(), bulk=the_key())
    assert await left(database) == WRITTEN


def test_ids_of_a_bulk_follow_from_the_first_and_no_other():
    ids = bulk_ids(10_000, 1_800_000_000_000)
    assert ids == sorted(set(ids)) == following_ids(ids[0], 10_000)
    assert {each.version for each in ids} == {7}
    assert {each.variant for each in ids} == {"specified in RFC 4122"}
    assert {each.int >> 80 for each in ids} == {1_800_000_000_000}
    assert not set(ids).intersection(bulk_ids(10_000, 1_800_000_000_000))
