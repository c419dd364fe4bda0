"""Agents of real workers under kills, pauses, network cuts, clock skew and loss of Redis: T1, T2 and F1.

Agent runs write to an unguarded table, so overlapping or early runs leave a permanent trace.
"""

import asyncio
import random
import signal

import pytest

from tests.support.agents import RUNNING, history, in_sets
from tests.support.run_traces import MAKE, RunTrace
from tests.support.waiting import until

HOUR_MS = 3_600_000


@pytest.fixture
async def trace(database):
    await database.run(MAKE)
    return RunTrace(database)


@pytest.fixture
async def worker(spawn, trace, database_url, redis_url):
    async def start(name, agents, **env):
        agent_specs = " ".join(f"{agent}={given}" for agent, given in agents.items())
        env = {"URL": database_url, "REDIS": redis_url, "AGENTS": agent_specs, **env}
        process = await spawn("tests.chaos.agents.worker", name, env=env)
        assert await process.line(30) == "ready"
        return process

    return start


def more_than(trace, seen, *names):
    """A condition: each of `names` has ended at least two more runs than in `seen`."""

    async def ended():
        return all([await trace.count("end", name) >= seen.get(name, 0) + 2 for name in names])

    return ended


async def ends(trace, *names):
    return {name: await trace.count("end", name) for name in names}


async def stopped(*processes):
    for each in processes:
        each.send(signal.SIGTERM)
    assert [await each.wait(30) for each in processes] == [0] * len(processes)


def intervals(agents):
    return {name: int(given.split(":")[1]) for name, given in agents.items()}


AGENTS = {"beat": "async:200:40", "sync": "sync:300:60", "hourly": f"async:{HOUR_MS}:20"}


async def test_flushed_redis_causes_no_repeated_runs_on_two_replicas(worker, trace, redis):
    pods = [await worker(name, AGENTS) for name in ("one", "two")]
    await until(lambda: trace.count("end", "hourly"), within_s=30)
    for _ in range(3):
        seen = await ends(trace, "beat", "sync")
        await redis.flushdb()
        await until(more_than(trace, seen, "beat", "sync"), within_s=30)
    due = await until(lambda: redis.zscore("waiting", "hourly"))
    await stopped(*pods)
    assert await trace.count("begin", "hourly") == 1
    assert due * 1000 - (await trace.rows("hourly"))[0]["acquired_ms"] == pytest.approx(HOUR_MS, abs=2)
    await trace.check(intervals(AGENTS))


async def test_clocks_two_hours_apart_do_not_change_schedules(worker, trace, database):
    pods = [await worker(name, AGENTS, OFFSET_MS=str(off)) for name, off in (("late", -HOUR_MS), ("early", HOUR_MS))]
    await until(more_than(trace, {}, "beat", "sync"), within_s=30)
    seen = await ends(trace, "beat", "sync")
    await until(more_than(trace, seen, "beat", "sync"), within_s=30)
    await stopped(*pods)
    assert await trace.count("begin", "hourly") == 1
    for name in AGENTS:
        for run in await history(database, name):
            assert 0 <= run["started_ms"] - run["due_ms"] < 30_000
    await trace.check(intervals(AGENTS))


@pytest.mark.timeout(180)
async def test_repeated_script_flush_causes_no_repeated_runs(worker, trace, redis):
    pods = [await worker(name, AGENTS) for name in ("one", "two")]

    stop = asyncio.Event()

    async def flush_scripts():
        while not stop.is_set():
            await redis.script_flush()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(flush_scripts())
        for _ in range(2):
            seen = await ends(trace, "beat", "sync")
            await until(more_than(trace, seen, "beat", "sync"), within_s=30)
        stop.set()
    await stopped(*pods)
    await trace.check(intervals(AGENTS))


async def test_replicas_with_different_patterns_do_not_run_each_others_agents(worker, trace, redis, database):
    agents = {"a1": "async:200:20", "b1": "async:200:20"}
    a = await worker("a", agents, ENABLED="a.*", ORPHANS="1")
    b = await worker("b", agents, ENABLED="b.*", ORPHANS="1")
    await until(more_than(trace, {}, "a1", "b1"), within_s=30)
    a.kill()
    seen = await ends(trace, "a1", "b1")
    await until(more_than(trace, seen, "b1"), within_s=30)
    assert {run["replica"] for run in await history(database, "b1")} == {"b"}
    await until(lambda: _is_waiting(redis, "a1"), within_s=30, what="the agent of the killed replica to wait")
    again = await worker("a", agents, ENABLED="a.*", ORPHANS="1")
    await until(more_than(trace, seen, "a1"), within_s=30)
    await stopped(again, b)
    await trace.check(intervals(agents))


async def _is_waiting(redis, name):
    return await in_sets(redis, name) == ["waiting"]


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_agent_run_of_a_lost_replica_writes_nothing_after_takeover(worker, trace, database, kind, how):
    agents = {"long": f"{kind}:{HOUR_MS}:60000"}
    one = await worker("one", agents)
    await until(lambda: trace.count("tick", "long"), within_s=30)
    two = await worker("two", agents)
    one.pause() if how == "stopped" else one.kill()
    second = (await until(lambda: _runs(trace, 2), within_s=30, what="the run on the other replica"))[1]
    await until(lambda: _ticks(trace, second, 20), within_s=30)  # while the first replica is stopped
    one.resume()
    if how == "stopped":
        await one.until_logged("agents_lease_lost")
    await until(lambda: _ticks(trace, second, 40), within_s=30)
    await stopped(*([one, two] if how == "stopped" else [two]))
    assert [run["outcome"] for run in await history(database, "long")] == ["LOST", "CANCELLED"]
    await trace.check(intervals(agents))


async def _runs(trace, count):
    runs = await trace.runs("long")
    return runs if len(runs) >= count else None


async def _ticks(trace, run, count):
    return sum(row["run"] == run for row in await trace.rows("long")) > count


@pytest.mark.slow("runs agents under faults")
@pytest.mark.timeout(180)
async def test_agents_under_random_faults_keep_all_invariants(worker, trace, redis, redis_url, database, proxy):
    """Two replicas behind proxies; Redis and scripts are flushed, and replicas paused, cut off or killed in turn."""
    rng = random.Random(20260131)
    host, port = redis_url.partition("@")[2].partition("/")[0].split(":")
    proxies = [await proxy(host, int(port)) for _ in range(2)]
    agents = {"beat": "async:150:30", "sync": "sync:250:60", "slow": "async:1000:300", "hourly": f"async:{HOUR_MS}:10"}
    pods = [await worker(f"w{number}", agents, REDIS=link.url(redis_url)) for number, link in enumerate(proxies)]
    faults = ["empty", "forget", "stop", "cut", "hang", "kill"]
    rng.shuffle(faults)
    for number, fault in enumerate(faults):
        index = rng.randrange(2)
        seen = await ends(trace, "beat", "sync", "slow")
        match fault:
            case "empty":
                await redis.flushdb()
            case "forget":
                await redis.script_flush()
            case "cut":
                proxies[index].cut()
            case "hang":
                proxies[index].half_open()
            case "stop":
                pods[index].pause()
            case "kill":
                pods[index].kill()
        await until(more_than(trace, seen, "beat", "sync", "slow"), within_s=60, what=f"runs after {fault}")
        proxies[index].heal()
        proxies[index].reset()
        pods[index].resume()
        if fault == "kill":
            pods[index] = await worker(f"again{number}", agents, REDIS=proxies[index].url(redis_url))
    await stopped(*pods)
    await trace.check(intervals(agents))
    assert await trace.count("begin", "hourly") == 1
    assert await database.rows(RUNNING) == []
    assert [await in_sets(redis, name) for name in agents] == [["waiting"]] * len(agents)
    assert await redis.hlen("working-runs") == 0
