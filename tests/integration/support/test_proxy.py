"""The bad network that other tests stand on does what it says."""

import asyncio
import time

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as Broken
from redis.exceptions import TimeoutError as TooLate

from tests.support.waiting import until


@pytest.fixture
async def through(redis_url, proxy):
    host, _, port = redis_url.rpartition("@")[2].partition("/")[0].partition(":")
    bad = await proxy(host, int(port))
    client = redis.asyncio.Redis.from_url(
        bad.url(redis_url), socket_timeout=0.2, socket_connect_timeout=0.2, retry=None
    )
    yield bad, client
    await client.aclose()


async def test_it_forwards_until_it_is_cut_and_again_when_healed(through):
    bad, client = through
    assert await client.ping()
    bad.cut()
    with pytest.raises((Broken, TooLate)):
        await client.ping()
    with pytest.raises((Broken, TooLate)):
        await client.ping()
    bad.heal()
    assert await client.ping()


async def test_a_half_open_connection_takes_requests_and_never_answers(through, redis):
    bad, client = through
    assert await client.ping()
    bad.half_open()
    with pytest.raises(TooLate):
        await client.set("swallowed", 1, ex=60)
    assert not await redis.exists("swallowed")


async def test_a_request_whose_reply_is_dropped_was_done(through, redis):
    bad, client = through
    assert await client.ping()
    bad.drop_replies()
    with pytest.raises(TooLate):
        await client.set("done", 1, ex=60)
    await until(lambda: redis.exists("done"))


async def test_a_delay_is_added_to_each_way(through):
    bad, client = through
    assert await client.ping()
    bad.delay_s = 0.05
    began = time.monotonic()
    async with asyncio.timeout(5):
        assert await client.ping()
    assert time.monotonic() - began >= 0.1
