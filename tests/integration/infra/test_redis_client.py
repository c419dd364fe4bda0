"""The Redis client on real servers: limits, translated errors, and unsuitable servers."""

import asyncio
import time
from urllib.parse import urlsplit

import pytest

from rota.infra.redis import PoolUse, RedisTarget, check_server, client, connect, health, pool_use, translate_errors
from rota.model.errors import EvictingRedis, InvalidSetting, LoginRefused, RedisUnavailable, SetupFailed
from tests.support.waiting import until

LIBRARY = ("lib-name", "lib-ver")
"""Shown by Redis 7.2 and newer."""
UNREACHABLE_URL = "redis://:s3cret@127.0.0.1:1/0"


@pytest.fixture
async def connected(redis_url):
    """Factory for clients that are closed after the test, before the harness checks `redis_url` for leaks."""
    opened = []

    def connect_to(url, **bounds):
        opened.append(connect(RedisTarget(url=url, **bounds)))
        return opened[-1]

    yield connect_to
    for one in opened:
        await one.aclose()


def address(url):
    host, _, port = url.rpartition("@")[2].partition("/")[0].partition(":")
    return host, int(port)


async def proxied(proxy, url):
    """A proxy in front of the server at `url`, and the URL through it."""
    network = await proxy(*address(url))
    return network, network.url(url)


async def test_healthy_server_answers_in_bytes_under_the_client_name(connected, redis_url):
    one = connected(redis_url)
    assert 0 < await health(one) < 3
    await one.set("k", "v", px=60_000)
    assert await one.get("k") == b"v"
    assert (await one.client_info())["name"] == "rota"


async def test_new_connection_names_its_library_without_reading_package_metadata(connected, redis_url, monkeypatch):
    expected = await connected(redis_url).client_info()
    read = []
    monkeypatch.setattr("redis.utils.get_lib_version", lambda: read.append("redis"))
    info = await connected(redis_url).client_info()
    assert [info.get(name) for name in LIBRARY] == [expected.get(name) for name in LIBRARY]
    assert read == []


async def test_wrong_password_is_refused_without_being_shown(connected, stack):
    secret = "wr0ng-hunter2"
    before, _, after = stack.redis_url.partition("@")
    one = connected(f"{before.rpartition(':')[0]}:{secret}@{after}")
    with pytest.raises(LoginRefused, match="refused the login: check user and password") as refused:
        await health(one)
    assert secret not in f"{refused.value!r} {refused.value.__cause__!r} {refused.value.facts}"
    assert secret not in repr(one)
    assert secret not in repr(RedisTarget(url=f"redis://:{secret}@h:1/0"))


async def test_missing_password_is_refused_as_a_login_error(connected, stack):
    one = connected("redis://" + stack.redis_url.partition("@")[2])
    with pytest.raises(LoginRefused):
        await health(one)


async def test_unreachable_server_is_reported_with_its_address_and_no_password(connected):
    with pytest.raises(RedisUnavailable, match=r"Redis at 127\.0\.0\.1:1 cannot be reached \(no connection\)") as error:
        await health(connected(UNREACHABLE_URL))
    assert "s3cret" not in f"{error.value} {error.value.__cause__}"
    assert error.value.facts["outcome"] == "not_sent"


async def test_unresponsive_server_is_abandoned_after_the_operation_timeout(connected, redis_url, proxy):
    network, url = await proxied(proxy, redis_url)
    one = connected(url, op_timeout_s=0.1)
    await health(one)
    network.half_open()
    started = time.monotonic()
    with pytest.raises(RedisUnavailable, match="no answer in time"):
        await health(one)
    assert 0.1 <= time.monotonic() - started < 1
    network.heal()
    await health(one)


async def test_command_with_a_lost_reply_is_not_sent_again(connected, redis_url, proxy):
    network, url = await proxied(proxy, redis_url)
    one, direct = connected(url, op_timeout_s=0.1), connected(redis_url)
    await direct.set("n", 0, px=60_000)
    await health(one)
    network.drop_replies()
    with pytest.raises(RedisUnavailable) as error, translate_errors(one):
        await one.incr("n")
    assert error.value.facts["outcome"] == "unknown"
    assert await direct.get("n") == b"1"


async def test_callers_wait_a_bounded_time_for_a_free_connection(connected, redis_url):
    one = connected(redis_url, pool_size=1, pool_wait_s=0.1)
    taken = await one.connection_pool.get_connection()
    with pytest.raises(RedisUnavailable, match="busy with all 1 connections of the pool: raise the pool size") as busy:
        await health(one)
    assert busy.value.facts["outcome"] == "not_sent"
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(health(one))
        await asyncio.sleep(0)
        await one.connection_pool.release(taken)
    assert waiting.result() > 0


async def test_server_restart_fails_only_commands_in_flight(connected, private_redis):
    private = await private_redis()
    one = connected(private.url)
    await health(one)
    await private.kill()
    with pytest.raises(RedisUnavailable):
        await health(one)
    await private.restart()
    await health(one)


@pytest.mark.parametrize("noticed_by", ["a write", "a script", "the health check"])
async def test_connections_to_a_primary_that_became_readonly_are_replaced(connected, private_redis, proxy, noticed_by):
    old, new = await private_redis(), await private_redis()
    network, url = await proxied(proxy, old.url)
    one, direct, other = connected(url), connected(old.url), connected(new.url)
    await asyncio.gather(*(one.set(f"k{n}", "old") for n in range(5)))
    await direct.replicaof("127.0.0.1", 1)
    await other.config_set("requirepass", urlsplit(old.url).password)
    network.redirect(*address(new.url))
    acts = {
        "a write": lambda: one.set("k", "new"),
        "a script": lambda: one.eval("return redis.call('SET', KEYS[1], 'new')", 1, "k"),
        "the health check": lambda: health(one),
    }
    refusals = 0
    while True:
        try:
            with translate_errors(one):
                await acts[noticed_by]()
            break
        except RedisUnavailable as error:
            refusals += "read-only replica" in error.sentence
    assert 1 <= refusals <= 5, "each pooled connection is refused at most once"
    await one.set("k", "new")
    assert await other.get("k") == b"new"


async def test_readonly_server_is_not_healthy(connected, private_redis):
    private = await private_redis()
    one = connected(private.url)
    await health(one)
    await one.replicaof("127.0.0.1", 1)
    with pytest.raises(RedisUnavailable, match="read-only replica"):
        await health(one)


async def test_server_error_that_is_not_an_outage_is_not_translated(connected, redis_url):
    from redis.exceptions import ResponseError

    one = connected(redis_url)
    await one.set("text", "x", px=60_000)
    with pytest.raises(ResponseError, match="WRONGTYPE"), translate_errors(one):
        await one.lpush("text", 1)


def test_url_options_cannot_loosen_the_limits():
    loose = (
        "?socket_timeout=0&socket_connect_timeout=0&timeout=900&retry_on_timeout=yes&protocol=3&max_connections=9999"
    )
    target = RedisTarget(url=f"redis://127.0.0.1:6379/4{loose}")
    pool = connect(target).connection_pool
    assert (pool.timeout, pool.max_connections) == (target.pool_wait_s, target.pool_size)
    made = pool.make_connection()
    assert (made.socket_timeout, made.socket_connect_timeout) == (target.op_timeout_s, target.connect_timeout_s)
    assert (made.retry.get_retries(), made.retry_on_error, made.protocol, made.db) == (0, [], 2, 4)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter/2@127.0.0.1:6379/0",
        "redis://:12/hunter2@127.0.0.1:6379/0",
        "http://hunter2@host/",
        "redis://h:1/0?hunter=2",
        "hunter2",
        "",
    ],
)
def test_invalid_url_is_refused_without_quoting_it(url):
    with pytest.raises(InvalidSetting, match="The Redis URL cannot be read") as refused:
        connect(RedisTarget(url=url))
    assert "hunter" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


async def test_server_without_eviction_is_accepted(connected, redis_url):
    await check_server(connected(redis_url))


async def test_evicting_server_is_refused_with_its_policy(connected, private_redis):
    one = connected((await private_redis()).url)
    await one.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(EvictingRedis, match=r"maxmemory-policy allkeys-lru\): set it to noeviction"):
        await check_server(one)


async def test_outdated_server_is_refused_with_its_version(connected, redis_url, monkeypatch):
    monkeypatch.setattr(client, "VERSION_MIN", (99, 0))
    with pytest.raises(SetupFailed, match=r"is version \d+\.\d+\.\d+: Rota needs Redis 6\.2"):
        await check_server(connected(redis_url))


async def test_server_out_of_memory_raises_unavailable_with_the_remedy(connected, private_redis):
    one = connected((await private_redis()).url)
    await one.set("k", b"x" * 2_000_000)
    await one.config_set("maxmemory", "1mb")
    with pytest.raises(RedisUnavailable, match="has no memory left: raise its maxmemory"), translate_errors(one):
        await one.set("l", b"x")


async def test_pool_use_reports_busy_idle_and_waiting(redis_url, connected):
    one = connected(redis_url, pool_size=1)
    assert pool_use(one) == PoolUse(0, 0, 0)
    await one.ping()
    assert pool_use(one) == PoolUse(0, 1, 0)
    connection = await one.connection_pool.get_connection()
    waits = asyncio.create_task(one.ping())
    await until(lambda: pool_use(one) == PoolUse(1, 0, 1))
    await one.connection_pool.release(connection)
    await waits
