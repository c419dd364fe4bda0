"""Agents from registration to shutdown: what starts, ends and is cleaned up while other things happen."""

import asyncio
import time

import pytest

from rota.agents.completion import EXHAUSTED, RECOVERED, RunCompleter
from rota.agents.concurrency_permits import PermitPool
from rota.agents.redis_index.index import FinishedRun
from rota.agents.repository import RescheduledAgent
from rota.agents.running import ActiveRun, ActiveRuns, AgentRun
from rota.infra.clock import SystemClock
from rota.model.agents import AgentOutcome, AgentSpec
from rota.model.errors import RedisUnavailable
from rota.model.schedules import IntervalSchedule
from rota.model.settings.agents import AgentSchedulerSettings
from tests.support.agents import (
    HOUR_MS,
    Pod,
    RunRecorder,
    every,
    history,
    ignore,
    in_sets,
    no_lease,
    now_ms,
    row,
    sets_of,
)
from tests.support.waiting import until


@pytest.fixture
def seen():
    return RunRecorder()


async def test_thousand_new_agents_run_up_to_the_concurrency_limit(database, redis, seen):
    agents = {f"a{number:04}": every(HOUR_MS, seen.hang) for number in range(1000)}
    began_at = time.monotonic()
    async with Pod(database, redis, **agents) as pod:
        await until(lambda: len(pod.agents.runs) == 100, within_s=30)
        assert await redis.zcard("waiting") == 900
        assert await redis.zcard("working") == 100
        assert time.monotonic() - began_at < 30
        cycles = pod.agents.cycles
        pod.agents.pace.wake()
        await until(lambda: pod.agents.cycles > cycles)
        assert len(seen.runs) == 100, "a full pool takes no more"
    assert pod.agents.permits.held == 0
    assert await redis.zcard("waiting") == 1000


async def test_overdue_agents_run_in_order_and_repopulation_moves_none(database, redis, seen):
    names = ["late", "later", "latest"]
    settings = {"agent__max_concurrent_agents": 1, "scheduler__refresh_period_seconds": 1}
    agents = {name: every(HOUR_MS, seen.hang) for name in ["first", *names]}
    async with Pod(database, redis, settings=settings, **agents) as pod:
        await until(lambda: seen.count("first") == 1)
        before = await redis.zrange("waiting", 0, -1, withscores=True)
        await until(lambda: pod.agents.health._sampled, what="a refresh")
        assert await redis.zrange("waiting", 0, -1, withscores=True) == before
        for name in ["first", *names]:
            await until(lambda name=name: seen.count(name) == 1)
            seen.gates[name].set()
    assert [run.name for run in seen.runs] == ["first", *names]


def test_run_stopped_before_its_first_step_releases_its_permit_once():
    permits, ended, began = PermitPool(1, ignore), [], []

    async def body(_run):
        began.append(1)

    async def go():
        runs = ActiveRuns(SystemClock(), ended.append, None, no_lease)
        [permit] = permits.take(1)
        spec = AgentSpec(name="a", schedule=IntervalSchedule(1000))
        run = ActiveRun(spec, AgentRun("a", 1, None, 0, 0), 0, permit, time.monotonic())
        runs.start(run, body, 60.0)
        runs.stop(run, AgentOutcome.CANCELLED)
        await until(lambda: ended)
        assert not permit.release()
        return run

    run = asyncio.run(go())
    assert (run.outcome, began, permits.held) == (AgentOutcome.CANCELLED, [], 0)


async def test_run_ended_just_before_shutdown_is_recorded_and_rescheduled(database, redis, seen):
    """Its end is still waiting to be written in a batch when shutdown begins."""
    async with Pod(database, redis, beat=every(HOUR_MS, seen.quick)) as pod:
        await until(lambda: pod.agents.completer.pending_count or seen.count("beat"))
    [run] = await history(database, "beat")
    assert run["outcome"] == "SUCCEEDED"
    assert (await row(database, "beat"))["due_ms"] == run["started_ms"] + HOUR_MS
    assert await in_sets(redis, "beat") == ["waiting"]


async def test_body_that_fails_while_being_stopped_is_cancelled(database, redis, seen):
    async def body(run):
        seen._enter(run)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("cleaning up went wrong") from None

    async with Pod(database, redis, beat=every(HOUR_MS, body)):
        await until(lambda: seen.count("beat") == 1)
    [run] = await history(database, "beat")
    assert run["outcome"] == "CANCELLED"
    assert (await row(database, "beat"))["streak"] == 0


async def test_hanging_cleanup_pass_blocks_neither_loop_nor_shutdown(database, redis, seen):
    settings = {
        "scheduler__orphan_cleanup__interval_ms": 20,
        "scheduler__orphan_cleanup__executor_shutdown_await_ms": 50,
    }
    pod = Pod(database, redis, settings=settings, beat=every(50, seen.quick))
    hung = asyncio.Event()

    async def sweep(_lease, _mine=None):
        hung.set()
        await asyncio.Event().wait()

    pod.agents.orphans.sweep = sweep
    async with pod:
        await hung.wait()
        beats = seen.count("beat")
        await until(lambda: seen.count("beat") > beats + 3)
    assert not seen.overlaps


async def test_run_past_its_deadline_is_stopped_by_its_replica_and_is_not_an_orphan(database, redis, seen):
    """The entry is long overdue in `working`, and PostgreSQL has the run: its replica stops it, cleanup leaves it.

    Once the end is in PostgreSQL, cleanup with a threshold of zero may move the entry before its replica does."""
    found = []

    async def hang(run):
        try:
            await seen.hang(run)
        finally:
            found.append(pod.agents.health.orphans)

    orphans, zombies = "scheduler__orphan_cleanup__", "scheduler__zombie_cleanup__"
    settings = {f"{orphans}threshold_ms": 0, f"{orphans}interval_ms": 20, f"{zombies}threshold_ms": 600}
    async with Pod(database, redis, settings=settings, slow=every(HOUR_MS, hang, timeout_ms=20)) as pod:
        [run] = await until(lambda: history(database, "slow"))
        assert run["outcome"] == "TIMEOUT"
        await until(lambda: redis.zscore("waiting", "slow"))
    assert (found, seen.count("slow")) == ([0], 1)


async def test_agent_in_both_sets_is_reported_and_corrected(database, redis, seen):
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(database, redis, settings=settings, held=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("held") == 1)
        await redis.zadd("waiting", {"held": now_ms() / 1000 + 5000})
        await until(lambda: _reason(pod) == "set_overlap")
        assert (await sets_of(redis).sample(50)).overlaps == 1
        await redis.zadd("waiting", {"held": now_ms() / 1000 - 1})
        pod.agents.pace.wake()
        await until(lambda: _is_only_working(redis, "held"), what="the removal by the acquire script")
        await until(lambda: _reason(pod) == "")
    assert seen.count("held") == 1


def _reason(pod):
    pod.agents.pace.wake()
    return pod.agents.health.reason


async def _is_only_working(redis, name):
    return await in_sets(redis, name) == ["working"]


class UnavailableIndex:
    """An index whose Redis is unavailable a number of times."""

    def __init__(self, times):
        self.left = times
        self.moved = []

    async def finish(self, over):
        if self.left:
            self.left -= 1
            raise RedisUnavailable("Redis does not answer: start it.")
        self.moved += over


async def test_failed_redis_moves_are_retried_without_limit_and_counted():
    index = UnavailableIndex(10)
    endings = RunCompleter(
        None,
        lambda _group: index,
        AgentSchedulerSettings(),
        SystemClock(),
        lambda: 0.5,
        on_moved=ignore,
        on_ended=ignore,
    )
    before = [each._value.get() for each in (EXHAUSTED, RECOVERED.labels("false"), RECOVERED.labels("true"))]
    over = FinishedRun("beat", 7, 1000, add=True)
    endings.add_finished(over, "")
    for _ in range(10):
        with pytest.raises(RedisUnavailable):
            await endings.flush_to_redis()
        assert endings.pending_count == 1
    await endings.flush_to_redis()
    assert (index.moved, endings.pending_count) == ([over], 0)
    after = [each._value.get() for each in (EXHAUSTED, RECOVERED.labels("false"), RECOVERED.labels("true"))]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 9, 1]


class PartialRepository:
    """A repository that accepts some ends and does not know the other runs."""

    async def end(self, _lease, ended):
        return [RescheduledAgent(each.name, each.run, 1000) for each in ended if each.name != "taken"]

    async def run_status(self, names):
        return {}


async def test_end_of_a_run_taken_over_is_not_published_and_leaves_redis():
    published = []
    index = UnavailableIndex(0)
    endings = RunCompleter(
        PartialRepository(),
        lambda _group: index,
        AgentSchedulerSettings(),
        SystemClock(),
        lambda: 0.5,
        on_moved=ignore,
        on_ended=published.extend,
    )
    for name in ("ours", "taken"):
        spec = AgentSpec(name=name, schedule=IntervalSchedule(1000))
        endings.add(ActiveRun(spec, AgentRun(name, 7, None, 0, 0), 0, None, time.monotonic()))
    await endings.flush_to_postgres(None)
    await endings.flush_to_redis()
    assert [end.name for end in published] == ["ours"]
    assert {(over.name, over.due_ms) for over in index.moved} == {("ours", 1000), ("taken", None)}


async def test_idle_replica_sends_almost_no_redis_commands(database, private_redis, seen):
    """Nothing is due for an hour: a scan every five seconds, and passes every half a minute."""
    from tests.support.harness.fixtures import redis_async

    private = await private_redis()
    async with redis_async(private.url) as client, Pod(database, client, beat=every(HOUR_MS, seen.quick)) as pod:
        await until(lambda: client.zscore("waiting", "beat"))
        await until(lambda: pod.agents.successors._live is not None and pod.agents.completer.pending_count == 0)
        await until(lambda: client.get("cleanup-leader"))
        cycles, calls = pod.agents.cycles, await _script_calls(client)
        began_at = time.monotonic()
        await until(lambda: time.monotonic() - began_at > 3)
        assert await _script_calls(client) - calls <= 3
        assert pod.agents.cycles - cycles <= 3


async def _script_calls(client):
    stats = await client.info("commandstats")
    return sum(stats.get(name, {}).get("calls", 0) for name in ("cmdstat_evalsha", "cmdstat_eval"))
