"""Replicas that die, are paused or return late: agents continue within seconds and never overlap themselves."""

import signal

import pytest

from tests.integration.agents.agents_pod import MAKE_NOTES, NOTES
from tests.support.agents import RUNNING, history, in_sets, row
from tests.support.waiting import until

LEASE_S = 1.0
FAILPOINTS = (
    "agents.after_acquire",
    "agents.before_begin",
    "agents.before_end",
    "agents.after_end",
)


@pytest.fixture
async def pod(spawn, database, database_url, redis_url):
    await database.run(MAKE_NOTES)

    async def start(name, *agents, work_ms=0, **env):
        env = {"URL": database_url, "REDIS": redis_url, **env}
        arguments = [f"{agent}={interval}" for agent, interval in agents]
        process = await spawn("tests.integration.agents.agents_pod", name, LEASE_S, work_ms, *arguments, env=env)
        if not any(place.endswith("_AT") for place in env):
            assert await process.line() == "ready"
        return process

    return start


async def notes(database):
    return [(row["name"], row["run"], row["what"]) for row in await database.rows(NOTES)]


async def count(database, what, name="beat"):
    return sum(note[0] == name and note[2] == what for note in await notes(database))


async def assert_no_overlap(database, name="beat"):
    """Each run begins after the previous one has ended or was taken from its replica."""
    mine = [(run, what) for named, run, what in await notes(database) if named == name]
    for run in {run for run, _ in mine}:
        places = [place for place, (each, _) in enumerate(mine) if each == run]
        assert places == list(range(places[0], places[0] + len(places))), f"overlapping runs: {mine}"


async def test_agents_of_a_killed_replica_continue_within_seconds(pod, database, redis):
    one = await pod("one", ("beat", 60_000), work_ms=60_000)
    await until(lambda: count(database, "begin"))
    two = await pod("two", ("beat", 60_000), work_ms=0)
    one.kill()
    await until(lambda: count(database, "end"), within_s=10, what="the run of another replica")
    outcomes = [run["outcome"] for run in await until(lambda: _ended(database, "beat", 2))]
    assert outcomes == ["LOST", "SUCCEEDED"]
    assert "one is gone" in (await history(database, "beat"))[0]["error"]
    await until(lambda: _waits(redis, "beat"))
    await assert_no_overlap(database)
    two.send(signal.SIGTERM)
    assert await two.wait() == 0


async def _ended(database, name, count):
    found = await history(database, name)
    return found if len(found) >= count else None


async def _waits(redis, name):
    return await in_sets(redis, name) == ["waiting"]


async def test_replica_paused_past_its_lease_changes_nothing(pod, database, redis):
    one = await pod("one", ("beat", 60_000), work_ms=1500)
    await until(lambda: count(database, "begin"))
    one.pause()
    two = await pod("two", ("beat", 60_000), work_ms=0)
    await until(lambda: count(database, "end"), within_s=10, what="the run of another replica")
    [_, run] = await until(lambda: _ended(database, "beat", 2))
    due = (await row(database, "beat"))["due_ms"]
    one.resume()
    await one.until_logged("agents_lease_lost")
    assert await in_sets(redis, "beat") == ["waiting"]
    assert (await row(database, "beat"))["due_ms"] == due
    assert [each["run"] for each in await history(database, "beat")][-1] == run["run"]
    assert await count(database, "end") == 1, "the end of the first run was refused"
    for each in (one, two):
        each.send(signal.SIGTERM)
        assert await each.wait() == 0


@pytest.mark.parametrize("place", FAILPOINTS)
async def test_crash_between_any_two_steps_leaves_nothing_behind(pod, database, redis, place):
    one = await pod("one", ("beat", 300), CRASH_AT=place)
    assert await one.wait() == 137
    before = await count(database, "end")
    two = await pod("two", ("beat", 300))
    await until(lambda: _more(database, before + 2), within_s=15, what="further runs")
    await assert_no_overlap(database)
    two.send(signal.SIGTERM)
    assert await two.wait() == 0
    assert await in_sets(redis, "beat") == ["waiting"]
    assert await database.rows(RUNNING) == []


async def _more(database, wanted):
    return await count(database, "end") >= wanted


async def test_rolling_deploy_loses_and_duplicates_no_run(pod, database, redis):
    agents = [(f"a{number}", 200) for number in range(5)]
    pods = [await pod(f"old{number}", *agents, work_ms=20) for number in range(2)]
    for number in range(2):
        pods.append(await pod(f"new{number}", *agents, work_ms=20))
        old = pods.pop(0)
        old.send(signal.SIGTERM)
        assert await old.wait() == 0
    seen = {name: await count(database, "end", name) for name, _ in agents}
    await until(lambda: _all_more(database, seen), within_s=15, what="runs of every agent by the new replicas")
    for each in pods:
        each.send(signal.SIGTERM)
    assert [await each.wait() for each in pods] == [0, 0]
    for name, _ in agents:
        await assert_no_overlap(database, name)
        assert await in_sets(redis, name) == ["waiting"]
        assert {run["outcome"] for run in await history(database, name)} <= {"SUCCEEDED", "CANCELLED"}


async def _all_more(database, before):
    return all([await count(database, "end", name) > seen for name, seen in before.items()])


async def test_redis_outage_loses_no_run_end(pod, database, redis_url, redis, proxy):
    host, port = redis_url.partition("@")[2].partition("/")[0].split(":")
    redis_proxy = await proxy(host, int(port))
    one = await pod("one", ("beat", 300), work_ms=400, REDIS=redis_proxy.url(redis_url))
    await until(lambda: count(database, "begin"))
    redis_proxy.cut()
    await until(lambda: _ended(database, "beat", 1), what="an end that PostgreSQL knows")
    assert await in_sets(redis, "beat") == ["working"]
    redis_proxy.heal()
    await until(lambda: _more(database, 2), within_s=20, what="runs after Redis is back")
    one.send(signal.SIGTERM)
    assert await one.wait() == 0
    await assert_no_overlap(database)
