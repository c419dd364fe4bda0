"""Defects of similar schedulers, each named by its cause; and lost replies at every step."""

import asyncio
import random
import time
from itertools import pairwise

import pytest

from rota.agents import running as runs_module
from rota.agents.redis_index.index import AgentClaim, FinishedRun
from rota.agents.registry import AgentRegistry
from rota.agents.running import ActiveRun, ActiveRuns, AgentRun
from rota.infra.clock import SystemClock
from rota.model.agents import AgentOutcome, AgentSpec
from rota.model.circuit_breaker import BreakerPhase
from rota.model.schedules import IntervalSchedule
from rota.model.settings.agents import AgentSettings
from tests.support.agents import (
    HOUR_MS,
    RUNNING,
    Pod,
    RunRecorder,
    every,
    history,
    in_sets,
    no_lease,
    now_ms,
    row,
    sets_of,
)
from tests.support.harness.lost_replies import lose_reply
from tests.support.queue import sql
from tests.support.waiting import until

REMOVE = sql("WITH lost AS (DELETE FROM rota.agent_running WHERE name = $1) DELETE FROM rota.agent WHERE name = $1")


@pytest.fixture
def seen():
    return RunRecorder()


async def test_stale_candidate_list_runs_nothing_early(redis):
    sets = sets_of(redis)
    await sets.repopulate([("a", now_ms() - 1000)])
    candidates = (await sets.ready(10)).candidates
    _, taken = await sets.acquire(1, [AgentClaim(candidates[0], 11, 1000)])
    await sets.finish([FinishedRun("a", 11, now_ms() + HOUR_MS)])
    assert taken
    assert (await sets.acquire(2, [AgentClaim(candidates[0], 12, 1000)]))[1] == []
    assert await in_sets(redis, "a") == ["waiting"]


async def test_two_runs_begun_in_one_second_have_different_fences(redis):
    sets = sets_of(redis)
    await sets.repopulate([("a", now_ms() - 1000)])
    for run in (11, 12):
        [candidate] = (await sets.ready(10)).candidates
        assert (await sets.acquire(1, [AgentClaim(candidate, run, 1000)]))[1]
        if run == 11:
            await sets.finish([FinishedRun("a", 11, now_ms() - 1)])
    assert (await sets.finish([FinishedRun("a", 11, now_ms() + HOUR_MS, add=True)])).stale == 1
    assert await in_sets(redis, "a") == ["working"]


async def test_finishing_run_does_not_restore_a_removed_agent(database, redis, seen):
    async with Pod(database, redis, gone=every(HOUR_MS, seen.hang), beat=every(50, seen.quick)):
        await until(lambda: seen.count("gone") == 1)
        await database.run(REMOVE, "gone")
        seen.gates["gone"].set()
        await until(lambda: _is_not_indexed(redis, "gone"))
        beats = seen.count("beat")
        await until(lambda: seen.count("beat") > beats + 2)
        assert await in_sets(redis, "gone") == []


async def _is_not_indexed(redis, name):
    return await in_sets(redis, name) == []


async def test_body_that_ignores_cancellation_is_reported_and_never_overlapped(database, redis, seen, monkeypatch):
    monkeypatch.setattr(runs_module, "STOP_GRACE_S", 0.05)
    settings = {"agent__max_concurrent_agents": 1, "scheduler__zombie_cleanup__threshold_ms": 20}
    agents = {"stuck": every(50, seen.stubborn, timeout_ms=50), "beat": every(50, seen.quick)}
    async with Pod(database, redis, settings=settings, **agents) as pod:
        await until(lambda: pod.agents.runs.stuck)
        await until(lambda: _is_quarantined(database, "stuck"))
        await until(lambda: seen.count("beat") >= 3, what="the use of its permit by others")
        assert seen.count("stuck") == 1
        assert await in_sets(redis, "stuck") == ["working"]
        seen.gates["stuck"].set()
        [run] = await until(lambda: history(database, "stuck"))
        assert (run["outcome"], run["failure"]) == ("TIMEOUT", "TRANSIENT")
    assert not seen.overlaps
    assert pod.agents.permits.held == 0
    assert not pod.abandoned


async def _is_quarantined(database, name):
    return (await row(database, name))["quarantined"]


async def test_body_that_ignores_shutdown_ends_the_process(database, redis, seen, monkeypatch):
    from rota.agents import scheduler

    monkeypatch.setattr(scheduler, "STOP_TIMEOUT_S", 0.1)
    pod = Pod(database, redis, stuck=every(HOUR_MS, seen.stubborn))
    async with pod:
        await until(lambda: seen.count("stuck") == 1)
        pod.agents.membership.abandon = lambda status: (pod.abandoned.append(status), seen.gates["stuck"].set())
    assert pod.abandoned == [70]
    await until(lambda: not pod.agents.runs.by_name)


async def test_dead_man_timer_stops_only_its_own_run(seen):
    ended = []
    runs = ActiveRuns(SystemClock(), ended.append, None, no_lease)
    spec = AgentSpec(name="a", schedule=IntervalSchedule(1000))

    def run(number):
        return ActiveRun(spec, AgentRun("a", number, None, 0, 0), 0, _Permit(), time.monotonic())

    first, second = run(1), run(2)
    runs.start(first, seen.quick, 60.0)
    await until(lambda: ended == [first])
    runs.start(second, seen.hang, 60.0)
    runs.stop(first, AgentOutcome.TIMEOUT)
    await until(lambda: seen.count("a") == 2)
    assert second.stopped_as is None
    assert first.timer.cancelled()
    seen.gates["a"].set()
    await until(lambda: ended == [first, second])
    assert [each.outcome for each in ended] == [AgentOutcome.SUCCEEDED, AgentOutcome.SUCCEEDED]


class _Permit:
    def release(self):
        return True


async def test_dead_man_timer_stops_a_run_at_deadline_plus_threshold(database, redis, seen):
    settings = {"scheduler__zombie_cleanup__threshold_ms": 30}
    async with Pod(database, redis, settings=settings, slow=every(HOUR_MS, seen.hang, timeout_ms=50)):
        [run] = await until(lambda: history(database, "slow"))
    assert run["outcome"] == "TIMEOUT"
    assert 80 <= run["took_ms"] < 5000
    assert "longer than 0.05 s" in run["error"]


async def test_exceptional_agents_have_their_own_threshold(database, redis, seen):
    zombies = "scheduler__zombie_cleanup__"
    settings = {f"{zombies}threshold_ms": 0, f"{zombies}exceptional_agents__pattern": "slow-.*"}
    agents = {name: every(HOUR_MS, seen.hang, timeout_ms=50) for name in ("slow_sync", "other")}
    async with Pod(database, redis, settings=settings, **agents) as pod:
        [run] = await until(lambda: history(database, "other"))
        assert run["outcome"] == "TIMEOUT"
        assert pod.agents.zombies.stop_after_s(pod.agents.registry.agents["slow-sync"].spec) == pytest.approx(3600.05)
        assert "slow-sync" in pod.agents.runs.by_name


class OffsetClock(SystemClock):
    def __init__(self, offset_ms):
        self._offset_ms = offset_ms

    def now_ms(self):
        return super().now_ms() + self._offset_ms


@pytest.mark.parametrize("offset_ms", [-HOUR_MS, HOUR_MS])
async def test_wrong_replica_clock_runs_agents_on_time(database, redis, seen, offset_ms):
    async with Pod(database, redis, beat=every(100, seen.quick), clock=OffsetClock(offset_ms)):
        await until(lambda: seen.count("beat") >= 3)
    for run in await history(database, "beat"):
        assert 0 <= run["started_ms"] - run["due_ms"] < 5000
        assert abs(run["started_ms"] - now_ms()) < 60_000


async def test_nothing_is_acquired_after_shutdown_began(database, redis, seen):
    """A body is slow to stop while another agent is due."""
    began = asyncio.Event()

    async def slow_to_stop(run):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await redis.zadd("waiting", {"beat": now_ms() / 1000 - 1})
            beats.append(seen.count("beat"))
            began.set()
            await asyncio.sleep(0.3)
            beats.append(seen.count("beat"))
            raise

    beats = []
    async with Pod(database, redis, slow=every(HOUR_MS, slow_to_stop), beat=every(HOUR_MS, seen.quick)):
        await until(lambda: seen.count("beat") == 1)
        await until(lambda: _running(database, "slow"))
    assert began.is_set()
    assert beats == [1, 1]


async def _running(database, name):
    return (await row(database, name))["running"]


async def test_half_open_breaker_closes_while_the_pool_is_full(database, redis, seen):
    breaker = "scheduler__circuit_breaker__"
    settings = {
        "agent__max_concurrent_agents": 1,
        f"{breaker}failure_threshold": 1,
        f"{breaker}cooldown_ms": 100,
        f"{breaker}half_open_duration_ms": 100,
    }
    async with Pod(database, redis, settings=settings, busy=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("busy") == 1)
        breaker = pod.agents.breakers.acquisition
        await breaker.failure(await breaker.allow())
        assert breaker.phase is BreakerPhase.OPEN
        pod.agents.pace.wake()
        await until(lambda: breaker.phase is BreakerPhase.CLOSED)
        assert pod.agents.permits.free == 0


async def test_failure_streak_and_last_error_are_shared_by_replicas(database, redis, seen):
    fails = seen.failing(RuntimeError("no luck"), RuntimeError("still none"))
    async with Pod(database, redis, name="one", bad=every(20, fails)):
        await until(lambda: _streak(database, "bad", 2))
    more = seen.failing(RuntimeError("nor here"))
    async with Pod(database, redis, name="two", bad=every(20, more)):
        await until(lambda: _outcomes(database, "bad", ["FAILED", "FAILED", "FAILED", "SUCCEEDED"]))
    kept = await row(database, "bad")
    assert (kept["streak"], kept["error"], kept["failure"]) == (0, "RuntimeError: nor here", "UNKNOWN")


async def _streak(database, name, wanted):
    return (await row(database, name))["streak"] == wanted


async def _outcomes(database, name, wanted):
    outcomes = [run["outcome"] for run in await history(database, name)]
    return [each for each in outcomes if each != "CANCELLED"][: len(wanted)] == wanted


async def test_agents_with_equal_due_time_are_served_first_come_first_served(redis):
    """Spinnaker: ties were broken by name, so names that start with an a always won."""
    sets = sets_of(redis)
    due_ms = now_ms() - 1000
    for name in ("zebra", "mole", "ant"):
        await sets.repopulate([(name, due_ms)])
    assert [each.name for each in (await sets.ready(10)).candidates] == ["zebra", "mole", "ant"]


def test_new_member_moves_few_agents_and_each_has_one_owner():
    registry = AgentRegistry(AgentSettings(), (), grace_ms=1000)
    names = [f"agent-{number}" for number in range(1000)]
    members = [f"m{number}" for number in range(5)]

    def owners(count):
        found = {}
        for me in members[:count]:
            registry.set_members(members[:count], me)
            found |= {name: me for name in names if registry.owns(name)}
        return found

    before, after = owners(4), owners(5)
    assert len(before) == len(after) == len(names), "each has one owner"
    moved = [name for name in names if before[name] != after[name]]
    assert 120 < len(moved) < 280
    assert {after[name] for name in moved} == {"m4"}


FAILPOINTS = ("agents.acquire", "agents.begin", "agents.end", "agents.finish")


@pytest.mark.parametrize("place", FAILPOINTS)
async def test_lost_reply_loses_and_duplicates_nothing(database, redis, seen, monkeypatch, place):
    lost = lose_reply(monkeypatch, place)
    async with Pod(database, redis, beat=every(100, seen.quick)) as pod:
        await until(lambda: seen.count("beat") >= 3)
    assert lost == [place]
    assert not seen.overlaps
    starts = [run.acquired_ms for run in seen.runs]
    assert all(after - before >= 100 for before, after in pairwise(starts))
    assert pod.agents.permits.held == 0
    assert await in_sets(redis, "beat") == ["waiting"]
    assert await database.rows(RUNNING) == []


async def test_flushed_scripts_are_loaded_again(database, redis, seen):
    async with Pod(database, redis, beat=every(20, seen.quick)):
        for _ in range(20):
            await redis.script_flush()
            began = seen.count("beat")
            await until(lambda began=began: seen.count("beat") > began)
    assert not seen.overlaps


async def test_random_failures_leak_no_permit_and_leave_each_agent_in_one_set(database, redis):
    """Bodies that succeed, fail, hang, cancel themselves or are stopped, on two replicas that come and go."""
    rng = random.Random(4711)
    seen = RunRecorder()

    async def body(run):
        seen._enter(run)
        try:
            what = rng.randrange(6)
            if what == 0:
                raise RuntimeError("no luck")
            if what == 1:
                raise asyncio.CancelledError
            if what == 2:
                await asyncio.sleep(60)
            await asyncio.sleep(rng.random() / 50)
        finally:
            seen.inside[run.name] -= 1

    settings = {"agent__max_concurrent_agents": 4, "scheduler__zombie_cleanup__threshold_ms": 0}
    agents = {f"a{number}": every(20, body, timeout_ms=60) for number in range(12)}
    pods = []
    async with Pod(database, redis, name="steady", settings=settings, **agents) as steady:
        for number in range(3):
            async with Pod(database, redis, name=f"guest{number}", settings=settings, **agents) as guest:
                pods.append(guest)
                began = len(seen.runs)
                await until(lambda began=began: len(seen.runs) > began + 40, within_s=20)
                for name in rng.sample(sorted(agents), 4):
                    for run in (steady.agents.runs.by_name.get(name), guest.agents.runs.by_name.get(name)):
                        if run is not None:
                            steady.agents.runs.stop(run, AgentOutcome.CANCELLED)
    for pod in [steady, *pods]:
        assert pod.agents.permits.held == 0
        assert len(pod.agents.runs) == 0
        assert pod.agents.completer.pending_count == 0
    assert not seen.overlaps
    assert [await in_sets(redis, name) for name in agents] == [["waiting"]] * len(agents)
    assert await redis.hlen("working-runs") == 0
    assert await database.rows(RUNNING) == []
