"""Options of agents that no other test covers: delays after failures, circuit breakers, cleanup, keys."""

import asyncio

import pytest

from rota.agents.registry import DeclaredAgent
from rota.agents.repository import AgentRepository
from rota.infra.clock import SystemClock
from rota.infra.redis import RedisTarget, connect
from rota.model.agents import AgentSpec
from rota.model.circuit_breaker import BreakerPhase
from rota.model.errors import RotaError
from rota.model.schedules import IntervalSchedule
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, history, in_sets, now_ms, row, sets_of
from tests.support.harness.fixtures import redis_async
from tests.support.waiting import until


@pytest.fixture
def seen():
    return RunRecorder()


class Status(Exception):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status_code = status


@pytest.mark.parametrize(
    ("status", "failure", "delay_s"),
    [(403, "PERMANENT_FORBIDDEN", 1800), (429, "THROTTLED", 30), (503, "SERVER_ERROR", 7)],
)
async def test_failure_kind_decides_the_next_run(database, redis, seen, status, failure, delay_s):
    settings = {"scheduler__failure_backoff__enabled": True, "scheduler__jitter__failure_backoff_ratio": 0.0}
    bad = every(HOUR_MS, seen.failing(Status(status)), error_interval_ms=7000)
    async with Pod(database, redis, settings=settings, bad=bad):
        [run] = await until(lambda: history(database, "bad"))
        assert run["failure"] == failure
        due_s = await until(lambda: redis.zscore("waiting", "bad"))
    assert due_s - run["started_ms"] / 1000 == pytest.approx(delay_s, abs=5)


async def test_transient_failure_is_retried_at_once_up_to_the_limit(database, redis, seen):
    settings = {"scheduler__failure_backoff__enabled": True, "scheduler__failure_backoff__max_immediate_retries": 2}
    bad = seen.failing(*[ConnectionError("no route")] * 3)
    async with Pod(database, redis, settings=settings, bad=every(HOUR_MS, bad)):
        await until(lambda: _failed(database, "bad", 3))
        due_s = await until(lambda: redis.zscore("waiting", "bad"))
    assert due_s > now_ms() / 1000 + 3000, "the third waits for its interval"
    assert seen.count("bad") == 3


async def _failed(database, name, count):
    return len(await history(database, name)) == count


async def test_open_breaker_sends_nothing_to_redis_until_its_cooldown_ends(database, redis_url, seen, proxy):
    host, port = redis_url.partition("@")[2].partition("/")[0].split(":")
    redis_proxy = await proxy(host, int(port))
    client = connect(RedisTarget(url=redis_proxy.url(redis_url), op_timeout_s=0.2, connect_timeout_s=0.2))
    breaker = "scheduler__circuit_breaker__"
    settings = {f"{breaker}failure_threshold": 3, f"{breaker}cooldown_ms": 1000, f"{breaker}half_open_duration_ms": 500}
    phases = []
    async with Pod(database, client, settings=settings, beat=every(50, seen.quick)) as pod:
        await until(lambda: seen.count("beat") >= 1)
        acquisition, cycle = pod.agents.breakers.acquisition, pod.agents.acquisition.run_cycle

        async def cycling(lease):
            phases.append(acquisition.phase)
            return await cycle(lease)

        pod.agents.acquisition.run_cycle = cycling
        redis_proxy.cut()
        await until(lambda: _opened(pod, acquisition))
        assert not pod.agents.breakers.redis_closed
        cycles = pod.agents.cycles
        await until(lambda: pod.agents.cycles > cycles + 3)
        redis_proxy.heal()
        beats = seen.count("beat")
        await until(lambda: seen.count("beat") > beats + 1)
        await until(lambda: acquisition.phase is BreakerPhase.CLOSED)
    assert BreakerPhase.OPEN not in phases
    assert BreakerPhase.HALF_OPEN in phases
    await client.aclose()


def _opened(pod, breaker):
    pod.agents.pace.wake()
    return breaker.phase is BreakerPhase.OPEN


async def test_disabled_breaker_never_opens(database, redis, seen):
    async with Pod(
        database, redis, settings={"scheduler__circuit_breaker__enabled": False}, beat=every(HOUR_MS, seen.quick)
    ) as pod:
        breaker = pod.agents.breakers.acquisition
        for _ in range(20):
            await breaker.failure(await breaker.allow())
        assert breaker.phase is BreakerPhase.CLOSED


async def test_zombie_whose_timer_never_fired_is_stopped_by_the_next_pass(database, redis, seen):
    settings = {"scheduler__zombie_cleanup__threshold_ms": 0, "scheduler__zombie_cleanup__interval_ms": 50}
    pod = Pod(database, redis, settings=settings, slow=every(HOUR_MS, seen.hang, timeout_ms=50))
    start = pod.agents.runs.start
    pod.agents.runs.start = lambda run, body, _dead_man_s: start(run, body, None)
    async with pod:
        [run] = await until(lambda: history(database, "slow"))
        assert run["outcome"] == "TIMEOUT"
        await until(lambda: pod.agents.health.zombies == 1)


async def test_zombies_are_stopped_during_a_redis_outage(database, redis_url, seen, proxy):
    host, port = redis_url.partition("@")[2].partition("/")[0].split(":")
    redis_proxy = await proxy(host, int(port))
    client = connect(RedisTarget(url=redis_proxy.url(redis_url), op_timeout_s=0.5, connect_timeout_s=0.5))
    settings = {"scheduler__zombie_cleanup__threshold_ms": 0}
    async with Pod(database, client, settings=settings, slow=every(HOUR_MS, seen.hang, timeout_ms=300)) as pod:
        await until(lambda: seen.count("slow") == 1)
        redis_proxy.cut()
        [run] = await until(lambda: history(database, "slow"))
        assert run["outcome"] == "TIMEOUT"
        await until(lambda: pod.agents.permits.held == 0)
        redis_proxy.heal()
    await client.aclose()


async def test_orphans_stay_when_cleanup_is_disabled_or_they_are_too_recent(database, redis, seen):
    await redis.zadd("waiting", {"stranger": now_ms() / 1000 - 60})
    for cleanup in ({"enabled": False, "threshold_ms": 0}, {"threshold_ms": 3_600_000}):
        settings = {f"scheduler__orphan_cleanup__{name}": value for name, value in cleanup.items()}
        settings |= {"scheduler__orphan_cleanup__interval_ms": 20}
        async with Pod(database, redis, settings=settings, beat=every(50, seen.quick)):
            beats = seen.count("beat")
            await until(lambda beats=beats: seen.count("beat") > beats + 3)
        assert await redis.zscore("waiting", "stranger") is not None
    assert (await redis.get("cleanup-leader")) == b"pod"


async def test_numeric_entries_stay_when_configured(database, redis, seen):
    await redis.zadd("waiting", {"1700000000": 1.0, "stranger": 1.0})
    orphans = "scheduler__orphan_cleanup__"
    settings = {f"{orphans}remove_numeric_only_agents": False, f"{orphans}interval_ms": 20, f"{orphans}threshold_ms": 0}
    async with Pod(database, redis, settings=settings, beat=every(HOUR_MS, seen.quick)):
        await until(lambda: _gone(redis, "stranger"))
        assert await redis.zscore("waiting", "1700000000") is not None


async def _gone(redis, name):
    return await redis.zscore("waiting", name) is None


async def test_cleanup_leadership_lasts_its_ttl_and_passes_to_the_next_replica(database, redis, seen):
    settings = {"scheduler__orphan_cleanup__leadership_ttl_ms": 5000, "scheduler__orphan_cleanup__interval_ms": 50}
    async with Pod(database, redis, name="one", settings=settings, beat=every(HOUR_MS, seen.quick)) as one:
        await until(lambda: _led_by(redis, b"one"))
        assert 0 < await redis.pttl("cleanup-leader") <= 5000
        async with Pod(database, redis, name="two", settings=settings, beat=every(HOUR_MS, seen.quick)):
            await one.stop()
            await until(lambda: _led_by(redis, b"two"), within_s=15)


async def _led_by(redis, name):
    return await redis.get("cleanup-leader") == name


async def test_cleanup_by_all_pods_leaves_entries_of_other_members(database, redis, seen):
    """With two members, the entries of the other one stay for it."""
    names = [f"stranger{number}" for number in range(40)]
    orphans = "scheduler__orphan_cleanup__"
    settings = {f"{orphans}force_all_pods": True, f"{orphans}interval_ms": 20, f"{orphans}threshold_ms": 0}
    async with Pod(database, redis, settings=settings, beat=every(HOUR_MS, seen.quick)) as pod:
        registry = pod.agents.registry
        [me] = await pod.agents.repository.members()
        registry.set_members([me, "another"], me)
        mine = {name for name in names if registry.owns(name)}
        assert 0 < len(mine) < len(names)
        await redis.zadd("waiting", dict.fromkeys(names, 1.0))
        await until(lambda: _remaining_is(redis, names, len(names) - len(mine)))
        sweeps = pod.agents.cycles
        pod.agents.pace.wake()
        await until(lambda: pod.agents.cycles > sweeps)
        assert all([await redis.zscore("waiting", name) for name in set(names) - mine])


async def _remaining_is(redis, names, count):
    return sum([await redis.zscore("waiting", name) is not None for name in names]) == count


async def test_orphan_pass_over_its_budget_leaves_the_rest(database, redis, seen):
    await redis.zadd("waiting", {f"stranger{number}": 1.0 for number in range(450)})
    pod = Pod(database, redis, beat=every(HOUR_MS, seen.quick))
    await pod.agents.reconciler.load_agents()
    orphans = pod.agents.orphans
    orphans._options = type(orphans._options)(threshold_ms=0, run_budget_ms=80)
    orphans._clock = SteppingClock(0.03)
    async with pod.agents.leases.hold("agents:cleanup", kind="agents_cleanup", ttl_s=60) as lease:
        first = await orphans.sweep(lease)
        assert 0 < first < 450
        await until(lambda: _swept(orphans, lease))
    assert await redis.zcard("waiting") == 0


class SteppingClock(SystemClock):
    """A clock that advances by a step at each reading."""

    def __init__(self, step_s):
        self.now_s, self.step_s = 0.0, step_s

    def monotonic(self):
        self.now_s += self.step_s
        return self.now_s


async def _swept(orphans, lease):
    return await orphans.sweep(lease) == 0


async def test_refresh_over_its_budget_resumes_where_it_stopped(database, redis, seen):
    agents = {f"a{number}": every(HOUR_MS, seen.quick) for number in range(3)}
    settings = {"scheduler__reconcile__run_budget_ms": 1, "scheduler__jitter__initial_registration_seconds": 1000}
    async with Pod(database, redis, settings=settings, **agents) as pod:
        from rota.agents.recovery import reconciler as reconcile

        reconciler = pod.agents.reconciler
        filled = []
        fill = reconciler._repopulate

        async def filling(names):
            filled.append(list(names))
            await fill(names)

        reconciler._repopulate = filling
        reconciler._clock = SteppingClock(1.0)
        chunk, reconcile.CHUNK = reconcile.CHUNK, 1
        try:
            lease = await _member(pod)
            for _ in range(3):
                await reconciler.refresh(lease)
        finally:
            reconcile.CHUNK = chunk
    assert filled == [["a0"], ["a1"], ["a2"]]


async def _member(pod):
    [(name, fence)] = (await pod.agents.repository.members()).items()
    return type("Lease", (), {"name": name, "fence": fence})


async def test_redis_clock_is_read_as_often_as_its_cache_allows(database, redis, seen):
    for cache_ms, expected_calls in ((60_000, 1), (0, 3)):
        pod = Pod(database, redis, settings={"scheduler__time_cache_duration_ms": cache_ms})
        calls = []
        time = redis.time
        redis.time = lambda time=time, calls=calls: (calls.append(1), time())[1]
        try:
            for _ in range(3):
                await pod.agents.reconciler._time.now_ms()
        finally:
            redis.time = time
        assert len(calls) == expected_calls


async def test_periodic_passes_use_configured_intervals_and_timeouts(database, redis):
    zombie = {"interval_ms": 1000, "executor_shutdown_await_ms": 2000, "executor_shutdown_force_await_ms": 3000}
    orphan = {**zombie, "interval_ms": 4000, "force_all_pods": True}
    reconcile = {"executor_shutdown_await_ms": 5000, "executor_shutdown_force_await_ms": 6000}
    settings = {"scheduler__refresh_period_seconds": 7}
    for section, given in (("zombie_cleanup", zombie), ("orphan_cleanup", orphan), ("reconcile", reconcile)):
        settings |= {f"scheduler__{section}__{name}": value for name, value in given.items()}
    pod = Pod(database, redis, settings=settings)
    found = {each.name: (each._period_s, each._patience_s, each._force_s) for each in pod.agents._periodic_tasks(None)}
    assert found["zombie"] == (1.0, 2.0, 3.0)
    assert found["orphan"] == (4.0, 2.0, 3.0)
    assert found["reconcile"] == (7, 5.0, 6.0)


async def test_stopping_leader_finishes_its_current_pass(database, redis, seen):
    began, go_on, ended = asyncio.Event(), asyncio.Event(), []
    settings = {"scheduler__orphan_cleanup__interval_ms": 20}
    pod = Pod(database, redis, settings=settings, beat=every(HOUR_MS, seen.quick))

    async def sweep(_lease, _mine=None):
        began.set()
        await go_on.wait()
        ended.append(1)
        return 0

    pod.agents.orphans.sweep = sweep
    resting = asyncio.Event()
    async with pod:
        await began.wait()
        task = pod.agents.orphan_cleanup.task
        rest = task.wait_idle
        task.wait_idle = lambda: (resting.set(), rest())[1]
        stopping = asyncio.create_task(pod.stop())
        await until(resting.is_set)
        go_on.set()
        await stopping
    assert ended


async def test_sets_and_leader_key_use_configured_names(database, redis, seen):
    keys = {"waiting_set": "queue", "working_set": "busy", "cleanup_leader_key": "cleaner", "prefix": "my:"}
    settings = {f"scheduler__keys__{name}": value for name, value in keys.items()}
    agents = {"held": every(HOUR_MS, seen.hang), "beat": every(HOUR_MS, seen.quick)}
    async with Pod(database, redis, settings=settings, **agents):
        await until(lambda: redis.zscore("my:busy", "held"))
        await until(lambda: redis.zscore("my:queue", "beat"))
        await until(lambda: redis.get("my:cleaner"))
        assert await redis.hexists("my:busy-runs", "held")
    await redis.delete(*await redis.keys("my:*"))


async def test_two_installations_on_one_redis_are_isolated(database, redis, seen):
    """With different prefixes, here even on one PostgreSQL: each takes only from its own sets."""
    ours, theirs = RunRecorder(), RunRecorder()
    one = Pod(database, redis, name="one", settings={"scheduler__keys__prefix": "a:"}, here=every(50, ours.quick))
    two = Pod(database, redis, name="two", settings={"scheduler__keys__prefix": "b:"}, there=every(50, theirs.quick))
    async with one, two:
        await until(lambda: ours.count("here") > 2 and theirs.count("there") > 2)
        assert await redis.zscore("a:waiting", "there") is None
        assert await redis.zscore("b:waiting", "here") is None
    await redis.delete(*await redis.keys("a:*"), *await redis.keys("b:*"))


async def test_redis_cluster_requires_a_hash_tag(database, private_redis, seen):
    private = await private_redis(cluster=True)
    async with redis_async(private.url) as client:
        async with Pod(database, client, settings={"scheduler__keys__hash_tag": "ps"}, beat=every(50, seen.quick)):
            await until(lambda: seen.count("beat") >= 3)
        untagged = sets_of(client)
        with pytest.raises(RotaError, match="set a hash tag"):
            await untagged.repopulate([("a", now_ms())])


async def test_agent_that_changes_group_leaves_its_old_sets(database, redis, seen):
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(database, redis, settings=settings, beat=every(HOUR_MS, seen.quick)) as pod:
        await until(lambda: redis.zscore("waiting", "beat"))
        pod.declared = [
            DeclaredAgent(AgentSpec(name="beat", schedule=IntervalSchedule(HOUR_MS), group="gpu"), seen.quick)
        ]
        await until(lambda: redis.zscore("waiting:gpu", "beat"))
        assert await in_sets(redis, "beat") == []
    assert (await row(database, "beat"))["shard_group"] == "gpu"
    assert await AgentRepository(database, "x").groups_of(["beat", "nobody"]) == {"beat": "gpu"}
