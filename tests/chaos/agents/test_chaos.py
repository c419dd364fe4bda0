"""Agents of real workers that are killed, stopped, cut off, told the wrong time and robbed of Redis: T1, T2 and F1.

Their bodies write to a table that nothing guards: what two of them wrote at once, or too early, stays there.
"""

import asyncio
import random
import signal

import pytest

from tests.support.agents import RUNNING, history, in_sets
from tests.support.run_traces import MAKE, Trail
from tests.support.waiting import until

HOUR_MS = 3_600_000


@pytest.fixture
async def trail(database):
    await database.run(MAKE)
    return Trail(database)


@pytest.fixture
async def worker(spawn, trail, database_url, redis_url):
    async def start(name, agents, **env):
        words = " ".join(f"{agent}={given}" for agent, given in agents.items())
        env = {"URL": database_url, "REDIS": redis_url, "AGENTS": words, **env}
        process = await spawn("tests.chaos.agents.worker", name, env=env)
        assert await process.line(30) == "ready"
        return process

    return start


def more_than(trail, seen, *names):
    """A condition: each of `names` has ended twice more than in `seen`."""

    async def held():
        return all([await trail.count("end", name) >= seen.get(name, 0) + 2 for name in names])

    return held


async def ends(trail, *names):
    return {name: await trail.count("end", name) for name in names}


async def stopped(*processes):
    for each in processes:
        each.send(signal.SIGTERM)
    assert [await each.wait(30) for each in processes] == [0] * len(processes)


def intervals(agents):
    return {name: int(given.split(":")[1]) for name, given in agents.items()}


AGENTS = {"beat": "async:200:40", "sync": "sync:300:60", "hourly": f"async:{HOUR_MS}:20"}


async def test_an_emptied_redis_repeats_nothing_on_two_replicas(worker, trail, redis):
    pods = [await worker(name, AGENTS) for name in ("one", "two")]
    await until(lambda: trail.count("end", "hourly"), within_s=30)
    for _ in range(3):
        seen = await ends(trail, "beat", "sync")
        await redis.flushdb()
        await until(more_than(trail, seen, "beat", "sync"), within_s=30)
    due = await until(lambda: redis.zscore("waiting", "hourly"))
    await stopped(*pods)
    assert await trail.count("begin", "hourly") == 1
    assert due * 1000 - (await trail.rows("hourly"))[0]["acquired_ms"] == pytest.approx(HOUR_MS, abs=2)
    await trail.check(intervals(AGENTS))


async def test_clocks_that_are_two_hours_apart_change_nothing(worker, trail, database):
    pods = [await worker(name, AGENTS, OFFSET_MS=str(off)) for name, off in (("late", -HOUR_MS), ("early", HOUR_MS))]
    await until(more_than(trail, {}, "beat", "sync"), within_s=30)
    seen = await ends(trail, "beat", "sync")
    await until(more_than(trail, seen, "beat", "sync"), within_s=30)
    await stopped(*pods)
    assert await trail.count("begin", "hourly") == 1
    for name in AGENTS:
        for run in await history(database, name):
            assert 0 <= run["started_ms"] - run["due_ms"] < 30_000
    await trail.check(intervals(AGENTS))


@pytest.mark.timeout(180)
async def test_a_storm_of_forgotten_scripts_repeats_nothing(worker, trail, redis):
    pods = [await worker(name, AGENTS) for name in ("one", "two")]

    is_over = asyncio.Event()

    async def forget():
        while not is_over.is_set():
            await redis.script_flush()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(forget())
        for _ in range(2):
            seen = await ends(trail, "beat", "sync")
            await until(more_than(trail, seen, "beat", "sync"), within_s=30)
        is_over.set()
    await stopped(*pods)
    await trail.check(intervals(AGENTS))


async def test_replicas_with_different_patterns_leave_each_others_agents_alone_also_when_one_dies(
    worker, trail, redis, database
):
    agents = {"a1": "async:200:20", "b1": "async:200:20"}
    a = await worker("a", agents, ENABLED="a.*", ORPHANS="1")
    b = await worker("b", agents, ENABLED="b.*", ORPHANS="1")
    await until(more_than(trail, {}, "a1", "b1"), within_s=30)
    a.kill()
    seen = await ends(trail, "a1", "b1")
    await until(more_than(trail, seen, "b1"), within_s=30)
    assert {run["replica"] for run in await history(database, "b1")} == {"b"}
    await until(lambda: _waits(redis, "a1"), within_s=30, what="it waits for one that may run it")
    again = await worker("a", agents, ENABLED="a.*", ORPHANS="1")
    await until(more_than(trail, seen, "a1"), within_s=30)
    await stopped(again, b)
    await trail.check(intervals(agents))


async def _waits(redis, name):
    return await in_sets(redis, name) == ["waiting"]


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_bodies_of_a_replica_that_is_gone_write_nothing_once_another_runs(worker, trail, database, kind, how):
    agents = {"long": f"{kind}:{HOUR_MS}:60000"}
    one = await worker("one", agents)
    await until(lambda: trail.count("tick", "long"), within_s=30)
    two = await worker("two", agents)
    one.pause() if how == "stopped" else one.kill()
    second = (await until(lambda: _runs(trail, 2), within_s=30, what="the run of another replica"))[1]
    await until(lambda: _ticks(trail, second, 20), within_s=30)  # while the first is stopped, and may go on alone
    one.resume()
    if how == "stopped":
        await one.said("agents_lease_lost")
    await until(lambda: _ticks(trail, second, 40), within_s=30)
    await stopped(*([one, two] if how == "stopped" else [two]))
    assert [run["outcome"] for run in await history(database, "long")] == ["LOST", "CANCELLED"]
    await trail.check(intervals(agents))


async def _runs(trail, count):
    runs = await trail.runs("long")
    return runs if len(runs) >= count else None


async def _ticks(trail, run, wanted):
    return sum(row["run"] == run for row in await trail.rows("long")) > wanted


@pytest.mark.slow("agents under faults for a while")
@pytest.mark.timeout(180)
async def test_whatever_happens_in_whatever_order(worker, trail, redis, redis_url, database, proxy):
    """Two replicas behind bad networks; Redis emptied, scripts forgotten, one stopped, cut off or killed by turns."""
    rng = random.Random(20260131)
    host, port = redis_url.partition("@")[2].partition("/")[0].split(":")
    nets = [await proxy(host, int(port)) for _ in range(2)]
    agents = {"beat": "async:150:30", "sync": "sync:250:60", "slow": "async:1000:300", "hourly": f"async:{HOUR_MS}:10"}
    pods = [await worker(f"w{number}", agents, REDIS=net.url(redis_url)) for number, net in enumerate(nets)]
    faults = ["empty", "forget", "stop", "cut", "hang", "kill"]
    rng.shuffle(faults)
    for number, fault in enumerate(faults):
        place = rng.randrange(2)
        seen = await ends(trail, "beat", "sync", "slow")
        match fault:
            case "empty":
                await redis.flushdb()
            case "forget":
                await redis.script_flush()
            case "cut":
                nets[place].cut()
            case "hang":
                nets[place].half_open()
            case "stop":
                pods[place].pause()
            case "kill":
                pods[place].kill()
        await until(more_than(trail, seen, "beat", "sync", "slow"), within_s=60, what=f"runs after {fault}")
        nets[place].heal()
        nets[place].reset()
        pods[place].resume()
        if fault == "kill":
            pods[place] = await worker(f"again{number}", agents, REDIS=nets[place].url(redis_url))
    await stopped(*pods)
    await trail.check(intervals(agents))
    assert await trail.count("begin", "hourly") == 1
    assert await database.rows(RUNNING) == []
    assert [await in_sets(redis, name) for name in agents] == [["waiting"]] * len(agents)
    assert await redis.hlen("working-runs") == 0
