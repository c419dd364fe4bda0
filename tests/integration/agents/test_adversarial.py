"""Orders of events that somebody looked for in order to break agents: runs beside themselves, permits lost, hangs."""

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
from tests.support.agents import HOUR_MS, RUNNING, Pod, Seen, every, history, in_sets, now_ms, row, sets_of
from tests.support.queue import sql
from tests.support.waiting import until

EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() - interval '1 h' WHERE name = $1")


@pytest.fixture
def seen():
    return Seen()


async def test_an_agent_that_runs_is_not_removed_so_that_it_never_runs_beside_itself(database, redis, seen):
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


async def test_a_run_of_a_replica_that_is_gone_keeps_nobody_from_removing_its_agent(database, redis, seen):
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


async def test_a_body_that_cannot_be_started_keeps_no_other_from_it_and_holds_no_permit(database, redis, seen):
    agents = {f"a{number}": every(HOUR_MS, seen.quick) for number in range(3)}
    pod = Pod(database, redis, settings={"agent__max_concurrent_agents": 3}, **agents)
    start, failed = pod.agents.acquisition._start, []

    def starting(run, declared):
        if run.name == "a1" and not failed:
            failed.append(run.number)
            raise RuntimeError("no room for a task")
        start(run, declared)

    pod.agents.acquisition._start = starting
    async with pod:
        await until(lambda: {run.name for run in seen.runs} == set(agents))
        await until(lambda: pod.agents.permits.held == 0)
        outcomes = [run["outcome"] for run in await until(lambda: _ended(database, "a1", 2))]
    assert outcomes == ["CANCELLED", "SUCCEEDED"]
    assert await database.rows(RUNNING) == []


async def _ended(database, name, count):
    found = await history(database, name)
    return found if len(found) >= count else None


class Flaky:
    """Sets whose `finish` fails once, as when Redis is away for a moment."""

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


async def test_what_an_heir_took_while_redis_was_away_is_told_by_its_next_pass(database, redis, seen):
    """PostgreSQL has the agent due, Redis has it running: nobody but the heir would look there within minutes."""
    records = AgentRepository(database, "dead")
    await records.declare([AgentSpec(name="beat", schedule=IntervalSchedule(HOUR_MS))], now_ms() - 10, [0])
    sets = sets_of(redis)
    await sets.repopulate([("beat", now_ms() - 10)])
    leases = Leases(database, "dead")
    pod = Pod(database, redis, beat=every(HOUR_MS, seen.quick))
    await pod.agents.reconciler.load_agents()
    flaky = Flaky(sets)
    heirs = Successors(AgentRepository(database, "heir"), lambda _group: flaky, pod.agents.registry)
    async with leases.hold("agents:member:x:heir:1", kind="agents", ttl_s=60) as mine:
        await heirs.take_over(mine)  # it knows who lives, and nobody vanishes between this pass and the next
        async with leases.hold("agents:member:x:dead:1", kind="agents", ttl_s=60) as lease:
            from rota.agents.redis_index.index import AgentClaim

            [candidate] = (await sets.ready(1)).candidates
            await sets.acquire(lease.fence, [AgentClaim(candidate, 77, 1000)])
            await records.begin(lease, now_ms(), [_begin("beat")])
            await database.run(EXPIRE, lease.name)
            with pytest.raises(RedisUnavailable):
                await heirs.take_over(mine)
            assert await in_sets(redis, "beat") == ["working"]
            assert await heirs.take_over(mine) == 1
    assert flaky.failed == 1
    assert await in_sets(redis, "beat") == ["waiting"]


async def test_a_run_whose_replica_cannot_tell_redis_of_its_end_is_moved_when_it_was_seen_twice(database, redis, seen):
    """The replica lives and PostgreSQL has the end, so nobody inherits it, and the replica waits for its network."""
    async with Pod(database, redis, daily=every(24 * HOUR_MS, seen.quick)) as pod:
        await until(lambda: history(database, "daily"))
        due = await until(lambda: redis.zscore("waiting", "daily"))
        [fence] = (await pod.agents.repository.members()).values()
        async with redis.pipeline(transaction=True) as all_at_once:
            all_at_once.zrem("waiting", "daily")
            all_at_once.zadd("working", {"daily": now_ms() / 1000 + 3600})
            all_at_once.hset("working-runs", "daily", f"7 {fence} 1000000 1000000")
            await all_at_once.execute()
        assert await pod.agents.stale_entries.sweep() == 0
        assert await in_sets(redis, "daily") == ["working"]
        assert await pod.agents.stale_entries.sweep() == 1
        assert abs(await redis.zscore("waiting", "daily") - due) < 0.001
    assert seen.count("daily") == 1


async def test_a_run_that_lives_is_never_stranded(database, redis, seen):
    async with Pod(database, redis, held=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("held") == 1)
        assert [await pod.agents.stale_entries.sweep() for _ in range(3)] == [0, 0, 0]
        assert await in_sets(redis, "held") == ["working"]


async def test_a_leader_whose_term_is_over_cleans_nothing_more(database, redis, seen):
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


async def test_an_entry_that_a_late_leader_moved_while_its_run_lives_starts_no_second_one(database, redis, seen):
    """It read that PostgreSQL knew no run, was paused, and moved the entry after the run had begun."""
    async with Pod(database, redis, beat=every(HOUR_MS, seen.hang), tick=every(50, seen.quick)) as pod:
        await until(lambda: seen.count("beat") == 1)
        _, entries = await pod.agents.index_of("").running()
        [old] = [each for each in entries if each.name == "beat"]

        class Blind(AgentRepository):
            async def run_status(self, names):
                found = await super().run_status(names)
                return {name: type(each)(None, now_ms() - 1000) for name, each in found.items()}

        assert await release_entries(Blind(database, "late"), pod.agents.index_of(""), [old]) == 1
        pod.agents.pace.wake()
        await until(lambda: _is_nowhere(redis, "beat"), what="its run lives, so it waits for nothing")
        ticks = seen.count("tick")
        await until(lambda: seen.count("tick") > ticks + 2)
        assert seen.count("beat") == 1
        seen.gates["beat"].set()
        await until(lambda: redis.zscore("waiting", "beat"))
    assert not seen.overlaps


async def _is_nowhere(redis, name):
    return await in_sets(redis, name) == []


async def test_a_body_that_blocks_the_loop_past_its_lease_takes_the_process_along(database, redis, seen):
    blocked = asyncio.Event()

    async def body(_run):
        if not blocked.is_set():
            blocked.set()
            time.sleep(3.5)  # noqa: ASYNC251 - that is what it is about

    async with Pod(database, redis, lease_s=1.0, rude=every(HOUR_MS, body)) as pod:
        await until(blocked.is_set)
        await until(lambda: pod.abandoned, what="the end of the process")
    assert pod.abandoned == [70]


async def test_who_ignores_one_cancellation_gets_another_before_the_process_is_given_up():
    ended = []
    runs = ActiveRuns(SystemClock(), ended.append)
    began = asyncio.Event()

    async def deaf_once(_run):
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    spec = AgentSpec(name="a", schedule=IntervalSchedule(1000))
    runs.start(ActiveRun(spec, AgentRun("a", 1, None, 0, 0), 0, _Permit(), time.monotonic()), deaf_once, None)
    await began.wait()
    assert await runs.close(0.1) == 0
    assert [run.outcome for run in ended] == [AgentOutcome.CANCELLED]


class _Permit:
    def release(self):
        return True


async def test_a_replica_that_wakes_up_past_its_lease_lets_no_body_go_on(database, redis, seen, monkeypatch):
    """As after SIGSTOP: the lease is over, nobody has noticed, and what the body waited for is there."""
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
