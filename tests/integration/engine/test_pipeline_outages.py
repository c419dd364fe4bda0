"""The pipeline during a Redis outage: work that does not need it continues, the rest waits with a reason."""

import pytest

from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until


@pytest.fixture
async def cluster(database_url, private_redis, nats_url, bus_prefix):
    redis = await private_redis()
    async with Farm(database_url, redis.url, nats_url, bus_prefix) as cluster:
        cluster.redis = redis
        await cluster.show("film")
        await cluster.show("plain", managed=False)
        await cluster.worker(slots=20)
        yield cluster
        await cluster.quiet()


def reasons(cluster):
    return cluster.replica.engine.dispatcher.pending_queues.frames_by_reason()


async def test_redis_outage_blocks_only_managed_shows_until_it_is_back(cluster):
    await cluster.redis.kill()
    managed = await cluster.submit("note", frames=5, show="film")
    await until(lambda: "books_unavailable" in reasons(cluster), what="the wait reason")
    for _ in range(3):
        plain = await cluster.submit("noop", frames=20, show="plain")
        assert await cluster.ended(plain, within_s=20) == "SUCCEEDED"
    assert "note" not in seen, "it was booked without the ledger"
    await cluster.redis.restart()
    assert await cluster.ended(managed, within_s=30) == "SUCCEEDED"
    assert sorted(seen["note"]) == [(frame, 1) for frame in range(5)]


async def test_frames_running_when_redis_fails_end_without_it(cluster):
    gate = hanging("x")
    managed = await cluster.submit("hang", "x", frames=3, show="film")
    await cluster.running("x", 3)
    await cluster.redis.kill()
    gate.set()
    assert await cluster.ended(managed, within_s=20) == "SUCCEEDED"
    await cluster.redis.restart()
    again = await cluster.submit("noop", frames=100, show="film")
    assert await cluster.ended(again, within_s=30) == "SUCCEEDED"
