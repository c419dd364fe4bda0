"""The pipeline while one of its servers is away: what does not need it goes on, the rest waits with a reason."""

import pytest

from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until


@pytest.fixture
async def farm(database_url, private_redis, nats_url, bus_prefix):
    redis = await private_redis()
    async with Farm(database_url, redis.url, nats_url, bus_prefix) as farm:
        farm.redis = redis
        await farm.show("film")
        await farm.show("plain", managed=False)
        await farm.worker(slots=20)
        yield farm
        await farm.quiet()


def reasons(farm):
    return farm.replica.engine.dispatcher.pending_queues.frames_by_reason()


async def test_with_redis_away_unmanaged_shows_go_on_and_managed_ones_wait_until_it_is_back(farm):
    await farm.redis.kill()
    managed = await farm.submit("note", frames=5, show="film")
    await until(lambda: "books_unavailable" in reasons(farm), what="the reason why it waits")
    for _ in range(3):
        plain = await farm.submit("noop", frames=20, show="plain")
        assert await farm.ended(plain, within_s=20) == "SUCCEEDED"
    assert "note" not in seen, "it was booked without books"
    await farm.redis.restart()
    assert await farm.ended(managed, within_s=30) == "SUCCEEDED"
    assert sorted(seen["note"]) == [(frame, 1) for frame in range(5)]


async def test_what_runs_while_redis_goes_is_ended_without_it(farm):
    gate = hanging("x")
    managed = await farm.submit("hang", "x", frames=3, show="film")
    await farm.running("x", 3)
    await farm.redis.kill()
    gate.set()
    assert await farm.ended(managed, within_s=20) == "SUCCEEDED"
    await farm.redis.restart()
    again = await farm.submit("noop", frames=100, show="film")
    assert await farm.ended(again, within_s=30) == "SUCCEEDED"
