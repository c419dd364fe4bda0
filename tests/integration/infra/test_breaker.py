"""Circuit breakers: in one process, shared through a real Redis, and local while Redis is unavailable."""

import asyncio
import time

import pytest
import redis.asyncio
import structlog
from structlog.testing import capture_logs

from rota.infra import failpoints
from rota.infra.breaker import Breaker
from rota.infra.breaker.machine import REDIS_BREAKER_RULES
from rota.infra.clock import SystemClock
from rota.infra.redis import RedisKeys, RedisTarget, connect
from rota.infra.telemetry import metrics
from rota.model.circuit_breaker import (
    BreakerConfig,
    BreakerPhase,
    ConsecutiveFailures,
    ProbesByCount,
    ProbesByDuration,
    WindowedFailures,
)
from rota.model.errors import BreakerOpen
from tests.integration.infra.breaker_prober import SAFETY
from tests.support.waiting import until

QUICK = BreakerConfig(counting=ConsecutiveFailures(3), open_ms=20, probing=ProbesByCount(3, successes=2))
AGENTS = BreakerConfig(counting=WindowedFailures(5, window_ms=10_000), open_ms=30_000, probing=ProbesByDuration(5_000))


class ServiceDown(Exception):
    """The service is broken."""


class RequestRejected(Exception):
    """The service works and rejected the request."""


class ManualClock:
    def __init__(self):
        self.at_s = 1000.0

    def now_ms(self):
        return 0

    def monotonic(self):
        return self.at_s

    async def sleep(self, seconds):
        self.at_s += seconds


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def logs():
    """Log lines of every level."""
    configured = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))
    with capture_logs() as captured:
        yield captured
    structlog.configure(**configured)


@pytest.fixture
async def replica(redis_url):
    """Factory for the breakers of several replicas, each with its own client.

    They wait long for Redis, because a slow answer on a busy machine would send them to their local fallback.
    """
    clients = []

    def make(name, rules, *, clock=None, url=redis_url, patience_s=10, **more):
        clients.append(connect(RedisTarget(url=url, op_timeout_s=max(1, patience_s))))
        keys = RedisKeys()
        return Breaker.shared(name, rules, clock or SystemClock(), clients[-1], keys, patience_s=patience_s, **more)

    yield make
    for client in clients:
        await client.aclose()


async def call(breaker, error=None):
    async with breaker.call():
        if error:
            raise error


async def fail(breaker, times):
    for _ in range(times):
        with pytest.raises(ServiceDown):
            await call(breaker, ServiceDown())


async def is_allowed(breaker):
    try:
        await call(breaker)
    except BreakerOpen:
        return False
    return True


def metric(sample, **labels):
    return metrics.REGISTRY.get_sample_value(sample, labels)


async def test_open_breaker_refuses_without_calling_and_reports_the_retry_delay(clock):
    breaker = Breaker.in_process("kernel", SAFETY, clock)
    await fail(breaker, 3)
    clock.at_s += 10
    called = False
    with pytest.raises(BreakerOpen, match=r"Calls to kernel are paused.*try again in 20\.0 s") as refused:
        async with breaker.call():
            called = True
    assert not called
    assert refused.value.facts == {"breaker": "kernel", "retry_ms": 20_000}


async def test_breaker_closes_after_cooldown_and_successful_probes(clock):
    breaker = Breaker.in_process("kernel", SAFETY, clock)
    await fail(breaker, 3)
    clock.at_s += 30
    await call(breaker)
    assert breaker.phase is BreakerPhase.HALF_OPEN
    await call(breaker)
    assert breaker.phase is BreakerPhase.CLOSED


async def test_breaker_probing_by_duration_closes_after_the_duration(clock):
    breaker = Breaker.in_process("acquisition", AGENTS, clock)
    await fail(breaker, 5)
    clock.at_s += 30
    await call(breaker)
    assert breaker.phase is BreakerPhase.HALF_OPEN
    clock.at_s += 5
    assert (await breaker.status()).phase is BreakerPhase.CLOSED


async def test_only_errors_selected_by_the_caller_count_as_failures(clock):
    breaker = Breaker.in_process("kernel", SAFETY, clock, counts=lambda error: isinstance(error, ServiceDown))
    for error in [ServiceDown(), ServiceDown(), RequestRejected(), ServiceDown(), ServiceDown()]:
        with pytest.raises(type(error)):
            await call(breaker, error)
    assert breaker.phase is BreakerPhase.CLOSED
    await fail(breaker, 1)
    assert breaker.phase is BreakerPhase.OPEN


async def test_cancelled_call_counts_as_neither_outcome_and_frees_its_probe(clock):
    breaker = Breaker.in_process("kernel", SAFETY, clock)
    await fail(breaker, 3)
    clock.at_s += 30
    for _ in range(10):
        started = asyncio.Event()

        async def hang(started=started):
            async with breaker.call():
                started.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hang())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert breaker.phase is BreakerPhase.HALF_OPEN
    await call(breaker)
    await call(breaker)
    assert breaker.phase is BreakerPhase.CLOSED


async def test_permit_can_be_reported_only_once(clock):
    breaker = Breaker.in_process("kernel", SAFETY, clock)
    permit = await breaker.allow()
    await breaker.failure(permit)
    with pytest.raises(AssertionError):
        await breaker.failure(permit)


async def test_replicas_share_one_open_state_immediately(replica):
    one, two, three = (replica("safety", SAFETY) for _ in range(3))
    await fail(one, 1)
    await fail(two, 1)
    await fail(three, 1)
    for breaker in (one, two, three):
        assert not await is_allowed(breaker)
        status = await breaker.status()
        assert (status.phase, status.failures, status.scope) == (BreakerPhase.OPEN, 3, "shared")


async def test_open_state_is_visible_to_another_process(replica, redis_url, spawn):
    await fail(replica("safety", SAFETY), 3)
    process = await spawn("tests.integration.infra.breaker_prober", redis_url, "safety")
    answer, retry_ms = (await process.line()).split()
    assert answer == "refused"
    assert 0 < int(retry_ms) <= 30_000
    assert await process.wait() == 0


async def test_failure_count_is_readable_under_a_plain_redis_key(replica, redis):
    breaker = replica("safety", SAFETY)
    await fail(breaker, 2)
    assert await redis.get("rota:cb:safety:failures") == b"2"
    await call(breaker)
    assert await redis.get("rota:cb:safety:failures") is None


async def test_deleting_the_state_key_closes_the_breaker(replica, redis):
    breaker = replica("safety", SAFETY)
    await fail(breaker, 3)
    await redis.delete("rota:cb:safety:state")
    assert await is_allowed(breaker)


BROKEN = [("phase", "OPEN"), ("phase", ""), ("generation", "1.5"), ("generation", "9" * 16), ("failures", "many")]


@pytest.mark.parametrize(("field", "text"), [*BROKEN, ("until_ms", "nan"), ("probes", "-1")])
async def test_invalid_breaker_record_is_ignored_and_replaced(replica, redis, field, text):
    breaker = replica("safety", SAFETY)
    await fail(breaker, 3)
    await redis.hset("rota:cb:safety:state", field, text)
    await call(breaker)
    assert (breaker.phase, breaker.scope) == (BreakerPhase.CLOSED, "shared")
    await fail(breaker, 3)
    assert await redis.hget("rota:cb:safety:state", "phase") == b"open"
    assert not await is_allowed(breaker)


async def test_unused_breaker_keys_expire_in_redis(replica, redis):
    await fail(replica("safety", SAFETY), 3)
    for key in ("rota:cb:safety:failures", "rota:cb:safety:state"):
        assert 30_000 < await redis.pttl(key) <= 86_400_000 + 30_000


async def test_success_on_one_replica_resets_the_failure_count_of_all(replica):
    one, two = replica("safety", SAFETY), replica("safety", SAFETY)
    await fail(one, 2)
    await call(two)
    await fail(one, 2)
    assert await is_allowed(two)


async def test_probe_cap_is_exact_across_replicas(replica):
    replicas = [replica("safety", QUICK) for _ in range(3)]
    await fail(replicas[0], 3)
    await until(lambda: _cooled_down(replicas[0]))
    results = await asyncio.gather(*(one.allow() for one in replicas * 20), return_exceptions=True)
    assert sum(not isinstance(answer, BreakerOpen) for answer in results) == 3


async def _cooled_down(breaker):
    return (await breaker.status()).retry_ms == 0


async def test_process_crash_during_a_probe_does_not_block_the_breaker(replica, redis_url, redis, spawn):
    slow_probes = BreakerConfig(
        counting=ConsecutiveFailures(3), open_ms=1, probing=ProbesByCount(1, successes=1, lost_after_ms=200)
    )
    ours = replica("safety", slow_probes)
    await fail(ours, 3)
    # The prober has another config, as in a rolling upgrade: each process applies its own to the stored record.
    await until(lambda: _cooled_down(ours))
    dying = await spawn(
        "tests.integration.infra.breaker_prober", redis_url, "safety", env={"CRASH_AT": "breaker.granted"}
    )
    assert await dying.wait() == 137
    assert await redis.hget("rota:cb:safety:state", "probes") == b"1"
    assert not await is_allowed(ours)
    await until(lambda: is_allowed(ours), within_s=2)
    assert ours.phase is BreakerPhase.CLOSED


class CountingRedis(redis.asyncio.Redis):
    sent = 0

    async def execute_command(self, *args, **options):
        self.sent += 1
        return await super().execute_command(*args, **options)


async def test_healthy_call_costs_one_round_trip_and_writes_nothing(redis_url, redis):
    async with CountingRedis.from_pool(connect(RedisTarget(url=redis_url)).connection_pool) as client:
        breaker = Breaker.shared("safety", SAFETY, SystemClock(), client, RedisKeys())
        await call(breaker)
        before = client.sent
        await call(breaker)
        assert client.sent == before + 1
    assert await redis.dbsize() == 0


@pytest.fixture
async def network(redis_url, proxy):
    host, _, port = redis_url.rpartition("@")[2].partition("/")[0].partition(":")
    return await proxy(host, int(port))


async def test_breaker_without_redis_continues_locally_from_the_last_known_state(
    replica, redis_url, network, clock, logs
):
    breaker = replica("safety", SAFETY, clock=clock, url=network.url(redis_url))
    await fail(breaker, 2)
    network.cut()
    logs.clear()
    await fail(breaker, 1)
    assert [entry["event"] for entry in logs] == ["breaker_fallback_started", "breaker_state_changed"]
    assert (breaker.phase, breaker.scope) == (BreakerPhase.OPEN, "alone")
    assert not await is_allowed(breaker)


async def test_calls_permitted_by_redis_are_counted_locally_after_redis_is_lost(replica, redis_url, network, clock):
    breaker = replica("safety", SAFETY, clock=clock, url=network.url(redis_url))
    permits = [await breaker.allow() for _ in range(3)]
    network.cut()
    for permit in permits:
        await breaker.failure(permit)
    assert (breaker.phase, breaker.scope) == (BreakerPhase.OPEN, "alone")


async def test_lost_redis_reply_switches_the_breaker_to_local_state(replica, clock, monkeypatch):
    def lose(place):
        raise failpoints.LostReply(place)

    breaker = replica("safety", SAFETY, clock=clock)
    monkeypatch.setattr(failpoints, "after_send", lose)
    await fail(breaker, 3)
    assert (breaker.phase, breaker.scope) == (BreakerPhase.OPEN, "alone")


async def test_shared_state_applies_again_when_redis_returns(replica, redis_url, network, clock, logs):
    breaker, other = replica("safety", SAFETY, clock=clock, url=network.url(redis_url)), replica("safety", SAFETY)
    await call(breaker)
    network.cut()
    await fail(breaker, 3)
    network.heal()
    assert not await is_allowed(breaker)  # not every call tries Redis
    clock.at_s += REDIS_BREAKER_RULES.open_ms / 1000
    logs.clear()
    assert await is_allowed(breaker)
    assert [entry["event"] for entry in logs] == ["breaker_fallback_ended"]
    await fail(other, 3)
    assert not await is_allowed(breaker)


async def test_permit_granted_locally_does_not_change_the_shared_state(replica, redis_url, network, clock, redis):
    breaker = replica("safety", SAFETY, clock=clock, url=network.url(redis_url))
    network.cut()
    local_permits = [await breaker.allow() for _ in range(3)]
    network.heal()
    clock.at_s += REDIS_BREAKER_RULES.open_ms / 1000
    await call(breaker)
    assert breaker.scope == "shared"
    for permit in local_permits:
        await breaker.failure(permit)
    assert breaker.phase is BreakerPhase.CLOSED
    assert await redis.dbsize() == 0


async def test_unresponsive_redis_delays_one_caller_by_the_timeout_and_later_callers_not(
    replica, redis_url, network, clock
):
    breaker = replica("safety", SAFETY, clock=clock, url=network.url(redis_url), patience_s=0.1)
    await call(breaker)
    network.half_open()
    started = time.monotonic()
    await call(breaker)
    assert 0.1 <= time.monotonic() - started < 0.9
    started = time.monotonic()
    for _ in range(50):
        await call(breaker)
    assert time.monotonic() - started < 0.1
    network.heal()


async def test_breaker_transitions_are_logged_and_counted_by_the_process_that_made_them(clock, logs):
    name = "told-once"
    breaker = Breaker.in_process(name, SAFETY, clock)
    assert metric("rota_breaker_state", name=name) == 0
    await fail(breaker, 3)
    await is_allowed(breaker)
    assert metric("rota_breaker_state", name=name) == 2
    clock.at_s += 30
    await call(breaker)
    assert metric("rota_breaker_state", name=name) == 1
    await call(breaker)
    assert [(entry["was"], entry["phase"]) for entry in logs] == [
        ("closed", "open"),
        ("open", "half_open"),
        ("half_open", "closed"),
    ]
    assert metric("rota_breaker_transitions_total", name=name, to="open") == 1
    assert metric("rota_breaker_refusals_total", name=name) == 1
    assert metric("rota_breaker_state", name=name) == 0


async def test_transition_seen_by_two_replicas_is_counted_once(replica):
    name = "counted-once"
    one, two = replica(name, SAFETY), replica(name, SAFETY)
    await fail(one, 3)
    await is_allowed(two)
    await is_allowed(one)
    assert metric("rota_breaker_transitions_total", name=name, to="open") == 1
