"""The server's clock as we know it. Our own clock is moved by hand; the server's is real."""

import asyncio
import math

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from rota.infra.redis import RedisServerTime, RedisTarget, connect
from rota.infra.redis.server_time import REFRESH_RETRY_S
from rota.model.errors import RedisUnavailable


class HandClock:
    def __init__(self):
        self.at_s = 1000.0
        self.per_look_s = 0.0

    def now_ms(self):
        return 0

    def monotonic(self):
        self.at_s += self.per_look_s
        return self.at_s

    async def sleep(self, seconds):
        self.at_s += seconds


class Counted(redis.asyncio.Redis):
    """The real client; counts what it sends."""

    sent = 0

    async def execute_command(self, *args, **options):
        self.sent += 1
        return await super().execute_command(*args, **options)


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
async def client(redis_url):
    client = Counted.from_pool(connect(RedisTarget(url=redis_url)).connection_pool)
    yield client
    await client.aclose()


async def real_ms(client):
    seconds, micros = await client.time()
    return seconds * 1000 + micros // 1000


async def test_it_is_the_servers_time(client, redis, clock):
    before = await real_ms(redis)
    assert before <= await RedisServerTime(client, clock).now_ms() <= await real_ms(redis)


async def test_between_refreshes_our_own_clock_carries_it_on_without_asking(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    first = await time.now_ms()
    clock.at_s += 9.5
    assert await time.now_ms() == first + 9_500
    assert client.sent == 1
    assert time.age_s() == 9.5


async def test_an_answer_older_than_the_cache_is_asked_for_again(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    await time.now_ms()
    clock.at_s += 10
    await time.now_ms()
    assert client.sent == 2
    assert time.age_s() == 0


async def test_the_server_looked_at_its_clock_half_way_through_the_round_trip(client, redis, clock):
    time = RedisServerTime(client, clock)
    before = await real_ms(redis)
    clock.per_look_s = 20.0  # as if each look at our clock came 20 s after the one before
    sample = await time._read_server_clock()
    assert (sample.at_s - 1000.0) == pytest.approx(30.0)  # sent at 20 s, answered at 40 s
    assert before <= sample.server_ms


async def test_time_never_goes_back_when_the_servers_clock_does(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    await time.now_ms()
    clock.at_s += 9
    ahead = await time.now_ms()
    clock.at_s += 1  # the real server did not move these 10 s: to us its clock was set back
    with capture_logs() as logs:
        assert await time.now_ms() == ahead
    assert [entry["event"] for entry in logs] == ["server_clock_went_back"]
    clock.at_s += 9.9
    assert await time.now_ms() >= ahead


async def test_concurrent_callers_share_one_refresh(client, clock):
    time = RedisServerTime(client, clock)
    readings = await asyncio.gather(*(time.now_ms() for _ in range(50)))
    assert client.sent == 1
    assert len(set(readings)) == 1


async def test_without_redis_the_last_answer_is_carried_on_and_its_age_told(redis_url, clock, proxy):
    host, _, port = redis_url.rpartition("@")[2].partition("/")[0].partition(":")
    network = await proxy(host, int(port))
    client = Counted.from_pool(connect(RedisTarget(url=network.url(redis_url))).connection_pool)
    async with client:
        time = RedisServerTime(client, clock, cache_s=10)
        first = await time.now_ms()
        network.cut()
        clock.at_s += 25
        with capture_logs() as logs:
            assert await time.now_ms() == first + 25_000
        assert [(entry["event"], entry["age_s"]) for entry in logs] == [("server_time_stale", 25.0)]
        clock.at_s += REFRESH_RETRY_S / 2
        assert await time.now_ms() == first + 25_000 + REFRESH_RETRY_S * 500
        assert client.sent == 2  # not asked again so soon
        network.heal()
        clock.at_s += REFRESH_RETRY_S / 2
        await time.now_ms()
        assert time.age_s() == 0


async def test_before_the_first_answer_there_is_no_time(clock):
    async with connect(RedisTarget(url="redis://127.0.0.1:1/0")) as client:
        time = RedisServerTime(client, clock)
        assert time.age_s() == math.inf
        with pytest.raises(RedisUnavailable):
            await time.now_ms()


async def test_whoever_has_an_answer_does_not_wait_for_somebody_elses_refresh(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    first = await time.now_ms()
    clock.at_s += 11
    async with time._refreshing:
        assert await time.now_ms() == first + 11_000
