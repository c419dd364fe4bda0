"""The proxy that injects network faults behaves as documented."""

import asyncio
import time

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.support.waiting import until


@pytest.fixture
async def proxied(redis_url, proxy):
    host, _, port = redis_url.rpartition("@")[2].partition("/")[0].partition(":")
    network = await proxy(host, int(port))
    client = redis.asyncio.Redis.from_url(
        network.url(redis_url), socket_timeout=0.2, socket_connect_timeout=0.2, retry=None
    )
    yield network, client
    await client.aclose()


async def test_proxy_forwards_until_cut_and_again_when_healed(proxied):
    network, client = proxied
    assert await client.ping()
    network.cut()
    with pytest.raises((RedisConnectionError, RedisTimeoutError)):
        await client.ping()
    with pytest.raises((RedisConnectionError, RedisTimeoutError)):
        await client.ping()
    network.heal()
    assert await client.ping()


async def test_half_open_connection_accepts_requests_and_never_answers(proxied, redis):
    network, client = proxied
    assert await client.ping()
    network.half_open()
    with pytest.raises(RedisTimeoutError):
        await client.set("swallowed", 1, ex=60)
    assert not await redis.exists("swallowed")


async def test_request_with_a_dropped_reply_was_executed(proxied, redis):
    network, client = proxied
    assert await client.ping()
    network.drop_replies()
    with pytest.raises(RedisTimeoutError):
        await client.set("done", 1, ex=60)
    await until(lambda: redis.exists("done"))


async def test_proxy_delay_applies_in_each_direction(proxied):
    network, client = proxied
    assert await client.ping()
    network.delay_s = 0.05
    began = time.monotonic()
    async with asyncio.timeout(5):
        assert await client.ping()
    assert time.monotonic() - began >= 0.1
