"""The cached server time. The test moves the local clock; the clock of the server is real."""

import asyncio
import math

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from rota.infra.redis import RedisServerTime, RedisTarget, connect
from rota.infra.redis.server_time import REFRESH_RETRY_S
from rota.model.errors import RedisUnavailable


class ManualClock:
    def __init__(self):
        self.at_s = 1000.0
        self.step_per_read_s = 0.0

    def now_ms(self):
        return 0

    def monotonic(self):
        self.at_s += self.step_per_read_s
        return self.at_s

    async def sleep(self, seconds):
        self.at_s += seconds


class CountingRedis(redis.asyncio.Redis):
    """The real client; counts its commands."""

    sent = 0

    async def execute_command(self, *args, **options):
        self.sent += 1
        return await super().execute_command(*args, **options)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def client(redis_url):
    client = CountingRedis.from_pool(connect(RedisTarget(url=redis_url)).connection_pool)
    yield client
    await client.aclose()


async def real_ms(client):
    seconds, micros = await client.time()
    return seconds * 1000 + micros // 1000


async def test_server_time_matches_the_redis_clock(client, redis, clock):
    before = await real_ms(redis)
    assert before <= await RedisServerTime(client, clock).now_ms() <= await real_ms(redis)


async def test_server_time_between_refreshes_advances_locally_without_a_request(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    first = await time.now_ms()
    clock.at_s += 9.5
    assert await time.now_ms() == first + 9_500
    assert client.sent == 1
    assert time.age_s() == 9.5


async def test_server_time_older_than_the_cache_is_refreshed(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    await time.now_ms()
    clock.at_s += 10
    await time.now_ms()
    assert client.sent == 2
    assert time.age_s() == 0


async def test_server_time_sample_is_dated_at_half_the_round_trip(client, redis, clock):
    time = RedisServerTime(client, clock)
    before = await real_ms(redis)
    clock.step_per_read_s = 20.0  # each read of the local clock is 20 s after the one before
    sample = await time._read_server_clock()
    assert (sample.at_s - 1000.0) == pytest.approx(30.0)  # sent at 20 s, answered at 40 s
    assert before <= sample.server_ms


async def test_server_time_never_goes_back_when_the_redis_clock_does(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    await time.now_ms()
    clock.at_s += 9
    ahead = await time.now_ms()
    clock.at_s += 1  # the real clock did not advance by these 10 s, so it appears set back
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


async def test_server_time_without_redis_advances_locally_and_reports_its_age(redis_url, clock, proxy):
    host, _, port = redis_url.rpartition("@")[2].partition("/")[0].partition(":")
    network = await proxy(host, int(port))
    client = CountingRedis.from_pool(connect(RedisTarget(url=network.url(redis_url))).connection_pool)
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
        assert client.sent == 2  # no refresh before the retry interval
        network.heal()
        clock.at_s += REFRESH_RETRY_S / 2
        await time.now_ms()
        assert time.age_s() == 0


async def test_server_time_before_the_first_sample_raises_unavailable(clock):
    async with connect(RedisTarget(url="redis://127.0.0.1:1/0")) as client:
        time = RedisServerTime(client, clock)
        assert time.age_s() == math.inf
        with pytest.raises(RedisUnavailable):
            await time.now_ms()


async def test_caller_with_a_sample_does_not_wait_for_a_running_refresh(client, clock):
    time = RedisServerTime(client, clock, cache_s=10)
    first = await time.now_ms()
    clock.at_s += 11
    async with time._refreshing:
        assert await time.now_ms() == first + 11_000
