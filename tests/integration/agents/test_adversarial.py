"""Event orders chosen to break agents: overlapping runs, lost permits, hangs."""

import asyncio
import time

import pytest

from rota.agents.admin import AgentAdmin
from rota.agents.recovery.zombies_and_orphans import Orphans, Successors, release_entries
from rota.agents.repository import AgentRepository
from rota.agents.running import ActiveRun, ActiveRuns, AgentRun
from rota.infra.clock import SystemClock
from rota.infra.lease import Leases
from rota.model.agents import AgentOutcome, AgentSpec
from rota.model.errors import RedisUnavailable, Refused, StaleFence
from rota.model.schedules import IntervalSchedule
from rota.model.settings.agents import AgentKeySettings, OrphanCleanupSettings
from tests.support.agents import (
    HOUR_MS,
    RUNNING,
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
from tests.support.queue import sql
from tests.support.waiting import until

EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() - interval '1 h' WHERE name = $1")


@pytest.fixture
def seen():
    return RunRecorder()


async def test_running_agent_cannot_be_removed_and_never_overlaps_itself(database, redis, seen):
    admin = AgentAdmin(database, redis, AgentKeySettings(), "anna")
    async with Pod(database, redis, beat=every(HOUR_MS, seen.hang)):
        await until(lambda: seen.count("beat") == 1)
        with pytest.raises(Refused, match="runs on pod: `rota agents pause beat`"):
            await admin.remove("beat")
        async with Pod(database, redis, name="other", beat=every(HOUR_MS, seen.hang)) as other:
            await until(lambda: other.agents.cycles >= 1)
        seen.gates["beat"].set()
        await until(lambda: history(database, "beat"))
        await admin.remove("beat")
    assert not seen.overlaps
    assert seen.count("beat") == 1


async def test_run_of_a_dead_replica_does_not_block_agent_removal(database, redis, seen):
    records, leases = AgentRepository(database, "dead"), Leases(database, "dead")
    await records.declare([AgentSpec(name="beat", schedule=IntervalSchedule(HOUR_MS))], now_ms() - 10, [0])
    async with leases.hold("agents:member:x:dead:1", kind="agents", ttl_s=60) as lease:
        [begun] = await records.begin(lease, now_ms(), [_begin("beat")])
        assert begun.verdict == "begun"
        await database.run(EXPIRE, lease.name)
        await AgentAdmin(database, redis, AgentKeySettings(), "anna").remove("beat")
    assert await row(database, "beat") is None
    assert await database.rows(RUNNING) == []


def _begin(name):
    from rota.agents.repository import AgentBeginRequest

    return AgentBeginRequest(name, 77, 1000)


async def test_body_that_fails_to_start_blocks_no_other_and_releases_its_permit(database, redis, seen):
    agents = {f"a{number}": every(HOUR_MS, seen.quick) for number in range(3)}
    pod = Pod(database, redis, settings={"agent__max_concurrent_agents": 3}, **agents)
    start, failed = pod.agents.acquisition._claimer._starter._start, []

    def starting(run, declared):
        if run.name == "a1" and not failed:
            failed.append(run.number)
            raise RuntimeError("no capacity for a task")
        start(run, declared)

    pod.agents.acquisition._claimer._starter._start = starting
    async with pod:
        await until(lambda: {run.name for run in seen.runs} == set(agents))
        await until(lambda: pod.agents.permits.held == 0)
        outcomes = [run["outcome"] for run in await until(lambda: _ended(database, "a1", 2))]
    assert outcomes == ["CANCELLED", "SUCCEEDED"]
    assert await database.rows(RUNNING) == []


async def _ended(database, name, count):
    found = await history(database, name)
    return found if len(found) >= count else None


class FlakyIndex:
    """An index whose `finish` fails once, as in a short Redis outage."""

    def __init__(self, sets):
        self._sets = sets
        self.failed = 0

    def __getattr__(self, name):
        return getattr(self._sets, name)

    async def finish(self, over):
        if not self.failed:
            self.failed += 1
            raise RedisUnavailable("Redis does not answer: start it.")
        return await self._sets.finish(over)


async def test_takeover_during_redis_outage_is_written_by_the_next_pass(database, redis, seen):
    """PostgreSQL has the agent due, Redis has it running: only the successor looks there within minutes."""
    records = AgentRepository(database, "dead")
    await records.declare([AgentSpec(name="beat", schedule=IntervalSchedule(HOUR_MS))], now_ms() - 10, [0])
    sets = sets_of(redis)
    await sets.repopulate([("beat", now_ms() - 10)])
    leases = Leases(database, "dead")
    pod = Pod(database, redis, beat=every(HOUR_MS, seen.quick))
    await pod.agents.reconciler.load_agents()
    flaky = FlakyIndex(sets)
    successors = Successors(AgentRepository(database, "heir"), lambda _group: flaky, pod.agents.registry, ignore)
    async with leases.hold("agents:member:x:heir:1", kind="agents", ttl_s=60) as mine:
        await successors.take_over(mine)  # it records the live members; none disappears before the next pass
        async with leases.hold("agents:member:x:dead:1", kind="agents", ttl_s=60) as lease:
            from rota.agents.redis_index.index import AgentClaim

            [candidate] = (await sets.ready(1)).candidates
            await sets.acquire(lease.fence, [AgentClaim(candidate, 77, 1000)])
            await records.begin(lease, now_ms(), [_begin("beat")])
            await database.run(EXPIRE, lease.name)
            with pytest.raises(RedisUnavailable):
                await successors.take_over(mine)
            assert await in_sets(redis, "beat") == ["working"]
            assert await successors.take_over(mine) == 1
    assert flaky.failed == 1
    assert await in_sets(redis, "beat") == ["waiting"]


async def test_unreported_end_of_a_live_replica_is_moved_after_two_sightings(database, redis, seen):
    """The replica lives and PostgreSQL has the end, so no successor takes over; the replica waits for its network."""
    async with Pod(database, redis, daily=every(24 * HOUR_MS, seen.quick)) as pod:
        await until(lambda: history(database, "daily"))
        due = await until(lambda: redis.zscore("waiting", "daily"))
        [fence] = (await pod.agents.repository.members()).values()
        async with redis.pipeline(transaction=True) as pipeline:
            pipeline.zrem("waiting", "daily")
            pipeline.zadd("working", {"daily": now_ms() / 1000 + 3600})
            pipeline.hset("working-runs", "daily", f"7 {fence} 1000000 1000000")
            await pipeline.execute()
        assert await pod.agents.stale_entries.sweep() == 0
        assert await in_sets(redis, "daily") == ["working"]
        assert await pod.agents.stale_entries.sweep() == 1
        assert abs(await redis.zscore("waiting", "daily") - due) < 0.001
    assert seen.count("daily") == 1


async def test_active_run_is_never_swept_as_stale(database, redis, seen):
    async with Pod(database, redis, held=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("held") == 1)
        assert [await pod.agents.stale_entries.sweep() for _ in range(3)] == [0, 0, 0]
        assert await in_sets(redis, "held") == ["working"]


async def test_leader_with_expired_lease_cleans_nothing(database, redis, seen):
    pod = Pod(database, redis, beat=every(HOUR_MS, seen.quick))
    await pod.agents.reconciler.load_agents()
    await redis.zadd("working", {"beat": 1.0})
    await redis.zadd("waiting", {"stranger": 1.0})
    records = AgentRepository(database, "late")
    orphans = Orphans(records, sets_of_all(redis), pod.agents.registry, OrphanCleanupSettings(), SystemClock())
    async with Leases(database, "late").hold("agents:cleanup", kind="agents_cleanup", ttl_s=60) as lease:
        await database.run(EXPIRE, lease.name)
        with pytest.raises(StaleFence):
            await orphans.sweep(lease)
    assert (await redis.zcard("working"), await redis.zcard("waiting")) == (1, 1)


def sets_of_all(redis):
    return lambda group: sets_of(redis, group)


async def test_entry_moved_by_a_stale_leader_starts_no_second_run(database, redis, seen):
    """The leader read that PostgreSQL had no run, was paused, and moved the entry after the run had begun."""
    async with Pod(database, redis, beat=every(HOUR_MS, seen.hang), tick=every(50, seen.quick)) as pod:
        await until(lambda: seen.count("beat") == 1)
        _, entries = await pod.agents.index_of("").running()
        [stale_entry] = [each for each in entries if each.name == "beat"]

        class StaleRepository(AgentRepository):
            async def run_status(self, names):
                found = await super().run_status(names)
                return {name: type(each)(None, now_ms() - 1000) for name, each in found.items()}

        assert await release_entries(StaleRepository(database, "late"), pod.agents.index_of(""), [stale_entry]) == 1
        pod.agents.pace.wake()
        await until(lambda: _is_not_indexed(redis, "beat"), what="the removal of the entry of an active run")
        ticks = seen.count("tick")
        await until(lambda: seen.count("tick") > ticks + 2)
        assert seen.count("beat") == 1
        seen.gates["beat"].set()
        await until(lambda: redis.zscore("waiting", "beat"))
    assert not seen.overlaps


async def _is_not_indexed(redis, name):
    return await in_sets(redis, name) == []


async def test_body_that_blocks_the_loop_past_the_lease_ends_the_process(database, redis, seen):
    blocked = asyncio.Event()

    async def body(_run):
        if not blocked.is_set():
            blocked.set()
            time.sleep(3.5)  # noqa: ASYNC251 - blocking is the point of the test

    async with Pod(database, redis, lease_s=1.0, rude=every(HOUR_MS, body)) as pod:
        await until(blocked.is_set)
        await until(lambda: pod.abandoned, what="the end of the process")
    assert pod.abandoned == [70]


async def test_run_that_ignores_one_cancellation_gets_a_second():
    ended = []
    runs = ActiveRuns(SystemClock(), ended.append, None, no_lease)
    began = asyncio.Event()

    async def ignores_one_cancellation(_run):
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    spec = AgentSpec(name="a", schedule=IntervalSchedule(1000))
    runs.start(
        ActiveRun(spec, AgentRun("a", 1, None, 0, 0), 0, _Permit(), time.monotonic()), ignores_one_cancellation, None
    )
    await began.wait()
    assert await runs.close(0.1) == 0
    assert [run.outcome for run in ended] == [AgentOutcome.CANCELLED]


class _Permit:
    def release(self):
        return True


async def test_replica_resumed_past_its_lease_continues_no_body(database, redis, seen, monkeypatch):
    """As after SIGSTOP: the lease has expired unnoticed, and the event that the body waits for is set."""
    gate, steps = asyncio.Event(), []

    async def body(_run):
        await gate.wait()
        steps.append("went on")

    async with Pod(database, redis, beat=every(HOUR_MS, body)) as pod:
        await until(lambda: pod.agents.runs.by_name)
        monkeypatch.setattr(pod.agents.runs, "_lease_until", lambda: 0.0)
        gate.set()
        await until(lambda: not pod.agents.runs.by_name)
        assert steps == []
        monkeypatch.undo()
        [run] = await until(lambda: history(database, "beat"))
    assert run["outcome"] == "CANCELLED"
