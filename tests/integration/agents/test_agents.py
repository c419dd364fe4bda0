"""Recurring agents on one replica and on several: they run when due, once, and never overlap themselves."""

from itertools import pairwise

import pytest

from rota.infra.redis import RedisKeys
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, history, in_sets, now_ms, once, row, sets_of
from tests.support.waiting import until


@pytest.fixture
def seen():
    return RunRecorder()


async def test_agent_runs_at_its_interval_and_its_runs_are_recorded(database, redis, seen):
    async with Pod(database, redis, beat=every(100, seen.quick)) as pod:
        await until(lambda: seen.count("beat") >= 4)
        assert len(pod.agents.runs) <= 1
    runs = await history(database, "beat")
    assert [run["outcome"] for run in runs[:4]] == ["SUCCEEDED"] * 4
    for before, after in pairwise(runs):
        assert after["started_ms"] - before["started_ms"] >= 100
        assert after["started_ms"] >= after["due_ms"]
    assert len({run["run"] for run in runs}) == len(runs)
    assert await in_sets(redis, "beat") == ["waiting"]
    assert not seen.overlaps


async def test_run_tokens_increase_across_replicas(database, redis, seen):
    for name in ("one", "two", "one"):
        began = len(seen.runs)
        async with Pod(database, redis, name=name, beat=every(20, seen.quick)):
            await until(lambda began=began: len(seen.runs) > began + 1)
    tokens = [run.token for run in seen.runs]
    assert tokens == sorted(set(tokens))
    assert tokens[0] > 0


async def test_index_scores_and_members_are_as_documented(database, redis, seen):
    async with Pod(database, redis, beat=every(HOUR_MS, seen.hang)):
        await until(lambda: seen.count("beat") == 1)
        assert await redis.zcard("waiting") == 0
        [(name, deadline)] = await redis.zrange("working", 0, -1, withscores=True)
        assert name == b"beat"
        assert deadline == pytest.approx(now_ms() / 1000 + 2 * 3600, abs=10)
        assert await until(lambda: redis.get("cleanup-leader")) == b"pod"
        seen.gates["beat"].set()
        await until(lambda: redis.zcard("waiting"))
        assert await redis.zscore("waiting", "beat") == pytest.approx(now_ms() / 1000 + 3600, abs=10)


async def test_two_replicas_share_agents_and_no_agent_overlaps_itself(database, redis, seen):
    agents = {f"a{number}": every(100, seen.quick) for number in range(20)}
    async with Pod(database, redis, name="one", **agents) as one, Pod(database, redis, name="two", **agents) as two:
        await until(lambda: all(seen.count(name) >= 3 for name in agents), within_s=20)
        assert one.agents.cycles
        assert two.agents.cycles
    assert not seen.overlaps
    for name in agents:
        starts = [run["started_ms"] for run in await history(database, name)]
        assert all(after - before >= 100 for before, after in pairwise(starts))


async def test_concurrency_limit_is_never_exceeded_and_permits_are_released(database, redis, seen):
    agents = {f"a{number}": every(HOUR_MS, seen.hang) for number in range(5)}
    async with Pod(database, redis, settings={"agent__max_concurrent_agents": 2}, **agents) as pod:
        await until(lambda: len(seen.runs) == 2)
        cycles = pod.agents.cycles
        await until(lambda: pod.agents.cycles >= cycles + 3)
        assert len(seen.runs) == 2
        assert pod.agents.permits.free == 0
        while len(seen.runs) < 5:
            began = len(seen.runs)
            for gate in list(seen.gates.values()):
                gate.set()
            await until(lambda began=began: len(seen.runs) > began)
        for gate in seen.gates.values():
            gate.set()
        await until(lambda: pod.agents.permits.free == 2)
        assert [run.name for run in seen.runs] == sorted(agents), "first come, first served"


async def test_flushed_redis_is_refilled_with_the_same_schedule(database, redis, seen):
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(
        database, redis, settings=settings, daily=every(24 * HOUR_MS, seen.quick), busy=every(HOUR_MS, seen.hang)
    ):
        await until(lambda: seen.count("daily") == 1 and seen.count("busy") == 1)
        await until(lambda: redis.zscore("waiting", "daily"))
        due = await redis.zscore("waiting", "daily")
        await redis.flushdb()
        await until(lambda: redis.zscore("waiting", "daily"))
        assert await redis.zscore("waiting", "daily") == pytest.approx(due, abs=0.001)
        assert await in_sets(redis, "busy") == [], "the agent of an active run is not added"
        seen.gates["busy"].set()
        await until(lambda: redis.zscore("waiting", "busy"))
    assert (seen.count("daily"), seen.count("busy")) == (1, 1)


async def test_entry_requeued_too_early_is_corrected(database, redis, seen):
    async with Pod(database, redis, daily=every(24 * HOUR_MS, seen.quick)) as pod:
        await until(lambda: redis.zscore("waiting", "daily"))
        await until(lambda: seen.count("daily") == 1)
        await until(lambda: redis.zscore("waiting", "daily"))
        due = await redis.zscore("waiting", "daily")
        await redis.zadd("waiting", {"daily": now_ms() / 1000 - 60})
        pod.agents.pace.wake()
        await until(lambda: _is_due_at(redis, "daily", due))
    assert seen.count("daily") == 1


async def _is_due_at(redis, name, due):
    score = await redis.zscore("waiting", name)
    return score is not None and abs(score - due) < 0.001


async def test_one_time_agent_runs_once(database, redis, seen):
    async with Pod(database, redis, boot=once(now_ms() - 1000, seen.quick)):
        await until(lambda: history(database, "boot"))
        await until(lambda: _is_not_indexed(redis, "boot"))
    async with Pod(database, redis, boot=once(now_ms() - 1000, seen.quick), beat=every(20, seen.quick)):
        await until(lambda: seen.count("beat") >= 3)
        await until(lambda: seen.count("boot") == 2, what="a run at the changed time")
    assert (await row(database, "boot"))["ts_due"] is None


async def _is_not_indexed(redis, name):
    return await in_sets(redis, name) == []


async def test_groups_have_separate_sets(database, redis, seen):
    async with Pod(database, redis, plain=every(HOUR_MS, seen.quick), apart=every(HOUR_MS, seen.quick, group="gpu")):
        await until(lambda: seen.count("plain") == 1 and seen.count("apart") == 1)
        await until(lambda: redis.zscore("waiting:gpu", "apart"))
        assert await redis.zscore("waiting", "apart") is None


async def test_prefix_and_hash_tag_are_in_the_key_names(database, redis, seen):
    settings = {"scheduler__keys__prefix": "my:", "scheduler__keys__hash_tag": "ps"}
    async with Pod(database, redis, settings=settings, beat=every(HOUR_MS, seen.hang)):
        await until(lambda: redis.zscore("my:working{ps}", "beat"))
        await until(lambda: redis.get("my:cleanup-leader{ps}"))
    await redis.delete(*await redis.keys("my:*"))


async def test_shutdown_returns_running_agents_due_now(database, redis, seen):
    pod = Pod(database, redis, name="one", beat=every(HOUR_MS, seen.hang))
    async with pod:
        await until(lambda: seen.count("beat") == 1)
    [run] = await history(database, "beat")
    assert run["outcome"] == "CANCELLED"
    assert await in_sets(redis, "beat") == ["waiting"]
    assert await redis.zscore("waiting", "beat") == pytest.approx(now_ms() / 1000, abs=5)
    assert pod.agents.permits.held == 0
    async with Pod(database, redis, name="two", beat=every(HOUR_MS, seen.hang)):
        await until(lambda: seen.count("beat") == 2)
    assert not seen.overlaps


async def test_patterns_select_the_agents_that_run(database, redis, seen):
    agents = {name: every(HOUR_MS, seen.quick) for name in ("aws_a", "aws_b", "gcp_a")}
    settings = {"agent__enabled_pattern": "aws-.*", "agent__disabled_pattern": ".*-b"}
    async with Pod(database, redis, settings=settings, **agents) as pod:
        await until(lambda: seen.count("aws-a") == 1)
        assert list(pod.agents.registry.agents) == ["aws-a"]
    assert {run.name for run in seen.runs} == {"aws-a"}


async def test_replicas_with_different_patterns_leave_other_agents_alone(database, redis, seen):
    """Spinnaker: pods knew only the agents they had registered, so they removed each other's overdue entries."""
    agents = {name: every(HOUR_MS, seen.quick) for name in ("aws_a", "gcp_a")}
    async with Pod(database, redis, name="all", **agents):
        await until(lambda: seen.count("gcp-a") == 1)
        await until(lambda: redis.zscore("waiting", "gcp-a"))
    await redis.zadd("waiting", {"gcp-a": now_ms() / 1000 - 3600, "nobody": now_ms() / 1000 - 3600})
    settings = {"agent__enabled_pattern": "aws.*", "scheduler__orphan_cleanup__threshold_ms": 1}
    async with Pod(database, redis, name="aws", settings=settings, **agents):
        await until(lambda: _is_gone(redis, "nobody"))
        assert await redis.zscore("waiting", "gcp-a") is not None


async def _is_gone(redis, name):
    return await redis.zscore("waiting", name) is None


async def test_numeric_or_undecodable_entries_are_removed_as_orphans(database, redis, seen):
    overdue = now_ms() / 1000 - 3600
    await redis.zadd("waiting", {"1700000000": overdue, b"\xff\xfe": overdue, "x" * 5000: overdue})
    settings = {"scheduler__orphan_cleanup__threshold_ms": 1}
    async with Pod(database, redis, settings=settings, beat=every(HOUR_MS, seen.quick)):
        await until(lambda: seen.count("beat") == 1)
        await until(lambda: _only(redis, b"beat"))


async def _only(redis, *names):
    return set(await redis.zrange("waiting", 0, -1)) == set(names)


async def test_key_of_the_wrong_type_does_not_stop_the_loop(database, redis, seen):
    await redis.set("waiting:odd", "no set")
    agents = {"beat": every(50, seen.quick), "odd": every(50, seen.quick, group="odd")}
    async with Pod(database, redis, settings={"scheduler__refresh_period_seconds": 1}, **agents) as pod:
        await until(lambda: pod.agents.cycles >= 3)
        await redis.delete("waiting:odd")
        await until(lambda: seen.count("odd") >= 1 and seen.count("beat") >= 1)


async def test_sets_of_a_group_are_independent(database, redis):
    await sets_of(redis, "x").repopulate([("a", now_ms())])
    assert RedisKeys.is_declared(b"waiting:x")
    assert (await sets_of(redis).ready(10)).candidates == []
