"""The rate limit of a key over several servers: shared in Redis, a share of it while Redis is away."""

import asyncio
import contextlib
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from rota.model.errors import RateLimited
from rota.server.http.middleware import request_tokens
from rota.server.http.middleware.request_tokens import RequestTokens
from rota.testing.clock import MovableClock
from tests.support.harness.fixtures import redis_async
from tests.support.proxy import Proxy


@pytest.fixture
def key():
    return f"k{uuid4().hex[:12]}"


@pytest.fixture
async def proxy(redis_url):
    address = urlsplit(redis_url)
    proxy = await Proxy(address.hostname, address.port).start()
    yield proxy
    await proxy.close()


@pytest.fixture
async def proxied(redis_url, proxy):
    client = redis_async(proxy.url(redis_url))
    yield client
    await client.aclose()


@pytest.fixture
def calls(monkeypatch):
    """Each call of Redis adds its number of wanted tokens."""
    made, lease = [], request_tokens.LEASE

    async def counted(client, **more):
        made.append(more["want"])
        return await lease(client, **more)

    monkeypatch.setattr(request_tokens, "LEASE", counted)
    return made


async def admitted(tokens, key, requests):
    """How many of these requests are admitted, one after the other."""
    count = 0
    for _ in range(requests):
        with contextlib.suppress(RateLimited):
            await tokens.take(key)
            count += 1
    return count


async def test_servers_admit_one_burst_together_and_not_one_each(redis, key):
    servers = [RequestTokens(redis, 1, 10, lambda: 3) for _ in range(3)]
    counts = [await admitted(server, key, 10) for server in servers]
    assert 10 <= sum(counts) <= 12, counts  # the bucket refills by one a second
    assert await admitted(servers[0], f"{key}-other", 5) == 5


async def test_busy_key_asks_redis_once_per_block(redis, key, calls):
    tokens = RequestTokens(redis, 1000, 1000, lambda: 1, clock=MovableClock())
    assert await admitted(tokens, key, 500) == 500
    assert calls == [50] * 10


async def test_concurrent_requests_of_a_key_share_one_lease(redis, key, calls):
    tokens = RequestTokens(redis, 10, 100, lambda: 1, clock=MovableClock())
    await asyncio.gather(*(tokens.take(key) for _ in range(40)))
    assert calls == [1, 39]


async def test_refused_key_does_not_ask_redis_again_until_a_token_is_due(redis, key, calls):
    clock = MovableClock()
    tokens = RequestTokens(redis, 1, 1, lambda: 1, clock=clock)
    assert await admitted(tokens, key, 20) == 1
    assert len(calls) == 2


async def test_leased_tokens_expire(redis, key, calls):
    clock = MovableClock()
    tokens = RequestTokens(redis, 100, 100, lambda: 1, clock=clock)
    await tokens.take(key)
    clock.advance(request_tokens.LEASE_S)
    await tokens.take(key)
    assert calls == [5, 5]


@pytest.mark.parametrize("outage", [Proxy.cut, Proxy.half_open])
async def test_server_without_redis_uses_its_share_of_the_limit(proxy, proxied, key, calls, outage, monkeypatch):
    monkeypatch.setattr(request_tokens, "LEASE_TIMEOUT_S", 0.05)
    clock = MovableClock()
    tokens = RequestTokens(proxied, 10, 40, lambda: 4, clock=clock)
    outage(proxy)
    assert await admitted(tokens, key, 30) == 10
    assert len(calls) == 1, "only the first request waits for Redis"
    clock.advance(0.5)
    assert await admitted(tokens, key, 30) == 1
    assert await admitted(tokens, f"{key}-other", 30) == 10


async def test_limit_is_shared_again_when_redis_returns(proxy, proxied, redis, key):
    clock = MovableClock()
    tokens = RequestTokens(proxied, 1, 10, lambda: 5, clock=clock)
    proxy.cut()
    assert await admitted(tokens, key, 5) == 2
    proxy.heal()
    assert await admitted(RequestTokens(redis, 1, 10, lambda: 5), key, 10) == 10
    clock.advance(request_tokens.RETRY_INTERVAL_S)
    with pytest.raises(RateLimited) as refused:
        await tokens.take(key)
    assert refused.value.facts["retry_after_s"] == 1
    assert request_tokens.SHARED._value.get() == 1


async def test_single_token_share_still_admits(proxy, proxied, key):
    tokens = RequestTokens(proxied, 1, 1, lambda: 100, clock=MovableClock())
    proxy.cut()
    assert await admitted(tokens, key, 3) == 1
