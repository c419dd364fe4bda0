"""Further requirements on the scheduler: limits, jitter, misbehaving bodies, changed agents, cleanup."""

import asyncio

import pytest

from rota.agents.admin import AgentAdmin
from rota.agents.recovery.zombies_and_orphans import Orphans, release_entries
from rota.agents.registry import DeclaredAgent
from rota.agents.repository import AgentRepository
from rota.infra.clock import SystemClock
from rota.infra.lease import Leases
from rota.infra.telemetry import metrics
from rota.model.agents import AgentSpec
from rota.model.schedules import CronSchedule, IntervalSchedule
from rota.model.settings.agents import AgentKeySettings, OrphanCleanupSettings
from tests.support.agents import HOUR_MS, RUNNING, Pod, RunRecorder, every, history, in_sets, now_ms, row, sets_of
from tests.support.queue import sql
from tests.support.waiting import until

EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() - interval '1 h', holder = 'other' WHERE name = $1")


@pytest.fixture
def seen():
    return RunRecorder()


async def test_unlimited_concurrency_runs_all_due_agents_at_once(database, redis, seen):
    agents = {f"a{number}": every(HOUR_MS, seen.hang) for number in range(120)}
    async with Pod(database, redis, settings={"agent__max_concurrent_agents": 0}, **agents) as pod:
        await until(lambda: len(seen.runs) == 120)
        assert len(pod.agents.runs) == 120
        assert "permits n/a" in pod.agents.health.summary(0.0)
    assert pod.agents.permits.held == 0


@pytest.mark.parametrize("batch", [{"enabled": False}, {"batch_size": 1}, {"batch_size": 3}, {"batch_size": 1000}])
async def test_batch_size_does_not_change_acquisition_order(database, redis, seen, batch):
    settings = {f"scheduler__batch_operations__{name}": value for name, value in batch.items()}
    agents = {f"a{number}": every(HOUR_MS, seen.quick) for number in range(7)}
    async with Pod(database, redis, settings=settings, **agents):
        await until(lambda: len(seen.runs) == 7)
        assert [run.name for run in seen.runs] == list(agents)


async def test_disabled_scheduler_runs_nothing(database, redis, seen):
    async with Pod(database, redis, settings={"scheduler__enabled": False}, beat=every(10, seen.quick)) as pod:
        assert pod.agents.cycles == 0
        assert await redis.zcard("waiting") == 0
    assert not seen.runs


async def test_first_runs_are_spread_over_the_registration_window(database, redis, seen):
    agents = {f"a{number}": every(HOUR_MS, seen.quick) for number in range(40)}
    began_ms = now_ms()
    async with Pod(
        database, redis, settings={"scheduler__jitter__initial_registration_seconds": 1000}, **agents
    ) as pod:
        await until(lambda: pod.agents.cycles >= 1)
        dues = [(await row(database, name))["due_ms"] - began_ms for name in agents]
    assert min(dues) >= -1000
    assert max(dues) <= 1_002_000
    assert max(dues) - min(dues) > 300_000


async def test_agents_returned_on_shutdown_are_spread_over_its_window(database, redis, seen):
    agents = {f"a{number}": every(HOUR_MS, seen.hang) for number in range(30)}
    async with Pod(database, redis, settings={"scheduler__jitter__shutdown_seconds": 1000}, **agents):
        await until(lambda: len(seen.runs) == 30)
    dues = [await redis.zscore("waiting", name) - now_ms() / 1000 for name in agents]
    assert all(-5 <= due <= 1001 for due in dues)
    assert max(dues) - min(dues) > 300


async def test_declared_agents_are_added_and_removed_without_restart(database, redis, seen):
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(database, redis, settings=settings, old=every(50, seen.quick)) as pod:
        await until(lambda: seen.count("old") >= 1)
        pod.declared = [DeclaredAgent(AgentSpec(name="new", schedule=IntervalSchedule(50)), seen.quick)]
        await until(lambda: seen.count("new") >= 2)
        old_runs, new_runs = seen.count("old"), seen.count("new")
        await until(lambda: seen.count("new") > new_runs + 3)
        assert seen.count("old") == old_runs
    assert not seen.overlaps


async def test_agent_redeclared_during_a_run_ends_once_and_follows_the_new_schedule(database, redis, seen):
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(database, redis, settings=settings, beat=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("beat") == 1)
        pod.declared = [DeclaredAgent(AgentSpec(name="beat", schedule=IntervalSchedule(2 * HOUR_MS)), seen.hang)]
        await until(lambda: _interval(pod, "beat", 2 * HOUR_MS))
        seen.gates["beat"].set()
        await until(lambda: history(database, "beat"))
        await until(lambda: redis.zscore("waiting", "beat"))
    assert seen.count("beat") == 1
    assert not seen.overlaps


def _interval(pod, name, interval_ms):
    return pod.agents.registry.agents[name].spec.schedule.interval_ms == interval_ms


class Undisplayable:
    """A value that cannot be displayed, compared or hashed."""

    def __repr__(self):
        raise ValueError("no repr")

    def __eq__(self, _other):
        raise ValueError("no equal")

    __hash__ = None


class Unshowable(Exception):
    def __str__(self):
        raise ValueError("no text")


async def test_misbehaving_bodies_do_not_affect_other_agents(database, redis, seen):
    async def garbage(_run):
        return Undisplayable()

    async def unshowable(_run):
        raise Unshowable

    async def zeros(_run):
        raise RuntimeError("a\0b\ud800" * 5000)

    async def leaves(_run):
        raise SystemExit(3)

    async def group(_run):
        raise ExceptionGroup("two", [ValueError("one"), ConnectionError("two")])

    bodies = {"garbage": garbage, "unshowable": unshowable, "zeros": zeros, "leaves": leaves, "group": group}
    agents = {name: every(HOUR_MS, body) for name, body in bodies.items()}
    async with Pod(database, redis, beat=every(50, seen.quick), **agents):
        found = {name: (await until(lambda name=name: history(database, name)))[0] for name in bodies}
        beats = seen.count("beat")
        await until(lambda: seen.count("beat") > beats + 2)
    assert {name: run["outcome"] for name, run in found.items() if run["outcome"] != "FAILED"} == {
        "garbage": "SUCCEEDED"
    }
    assert found["unshowable"]["error"] == "Unshowable"
    assert len(found["zeros"]["error"]) == 2000
    assert "tried to exit the process" in found["leaves"]["error"]
    assert found["group"]["failure"] == "TRANSIENT"


async def test_backlog_of_another_group_does_not_hide_due_agents(database, redis, seen):
    """Spinnaker: one set for all shards, whose head was full of entries for other shards."""
    await sets_of(redis, "theirs").repopulate([(f"x{number}", now_ms() - HOUR_MS) for number in range(1000)])
    settings = {"agent__max_concurrent_agents": 2}
    async with Pod(database, redis, settings=settings, ours=every(50, seen.quick, group="ours")) as pod:
        await until(lambda: seen.count("ours") >= 3)
        await until(lambda: pod.agents.health.state == "HEALTHY", what="good health")


async def test_backlog_of_unserved_agents_does_not_starve_others(database, redis, seen):
    """As when all workers of another app are down; the concurrency limit is far below their number."""
    await sets_of(redis).repopulate([(f"x{number:04}", now_ms() - 60_000 + number // 7) for number in range(3000)])
    settings = {"agent__max_concurrent_agents": 10}
    async with Pod(database, redis, settings=settings, ours=every(50, seen.quick)):
        await until(lambda: seen.count("ours") >= 5)
    assert await redis.zcard("waiting") == 3001, "they stay for replicas that can run them"


async def test_busy_group_leaves_permits_to_other_groups(database, redis, seen):
    async def body(run):
        seen._enter(run)
        await asyncio.sleep(0.02)  # keeps its permit for the rest of the cycle
        seen.inside[run.name] -= 1

    busy = {f"a{number}": every(1, body, group="a") for number in range(10)}
    settings = {"agent__max_concurrent_agents": 1}
    async with Pod(database, redis, settings=settings, other=every(1, body, group="b"), **busy):
        await until(lambda: seen.count("other") >= 5, within_s=20)


async def test_scan_passes_over_agents_of_other_apps(database, redis, seen):
    await sets_of(redis).repopulate([(f"x{number}", now_ms() - 60_000) for number in range(50)])
    settings = {"agent__max_concurrent_agents": 10, "scheduler__batch_operations__chunk_attempt_multiplier": 10.0}
    async with Pod(database, redis, settings=settings, ours=every(50, seen.quick)):
        await until(lambda: seen.count("ours") >= 3)
    assert await redis.zcard("waiting") == 51, "they stay for replicas that can run them"


async def test_redis_failover_with_lost_writes_runs_nothing_twice_or_early(database, redis, seen):
    """Redis is reset to its state before the runs: every agent waits there, long overdue."""
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(
        database, redis, settings=settings, daily=every(24 * HOUR_MS, seen.quick), busy=every(HOUR_MS, seen.hang)
    ) as pod:
        await until(lambda: seen.count("daily") == 1 and seen.count("busy") == 1)
        await until(lambda: redis.zscore("waiting", "daily"))
        due = await redis.zscore("waiting", "daily")
        async with redis.pipeline(transaction=True) as pipeline:
            pipeline.delete("waiting", "working", "working-runs")
            pipeline.zadd("waiting", {"daily": now_ms() / 1000 - 60, "busy": now_ms() / 1000 - 60})
            await pipeline.execute()
        pod.agents.pace.wake()
        await until(lambda: _is_due_at(redis, "daily", due))
        await until(lambda: _is_not_indexed(redis, "busy"), what="the removal of the entry of an active run")
        seen.gates["busy"].set()
        await until(lambda: redis.zscore("waiting", "busy"))
    assert (seen.count("daily"), seen.count("busy")) == (1, 1)
    assert not seen.overlaps


async def _is_due_at(redis, name, due):
    score = await redis.zscore("waiting", name)
    return score is not None and abs(score - due) < 0.001


async def _is_not_indexed(redis, name):
    return await in_sets(redis, name) == []


async def test_leader_paused_past_its_lease_moves_no_active_run(database, redis, seen):
    """It resumes with stale data, and names each entry that it moves by the run it saw."""
    async with Pod(database, redis, beat=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("beat") == 1)
        records, sets = AgentRepository(database, "late"), pod.agents.index_of
        wanted = OrphanCleanupSettings(threshold_ms=0)
        _, [stale_entry] = await sets("").running()
        seen.gates["beat"].set()
        await until(lambda: redis.zscore("waiting", "beat"))
        seen.gates["beat"].clear()
        assert await AgentAdmin(database, redis, AgentKeySettings(), "anna").trigger("beat")
        await until(lambda: seen.count("beat") == 2)
        assert await release_entries(records, sets(""), [stale_entry]) == 0
        async with Leases(database, "late").hold("late", kind="agents_cleanup", ttl_s=60) as lease:
            assert await Orphans(records, sets, pod.agents.registry, wanted, SystemClock()).sweep(lease) == 0
        assert await in_sets(redis, "beat") == ["working"]
        seen.gates["beat"].set()
    assert not seen.overlaps


@pytest.mark.parametrize("force_all_pods", [False, True])
async def test_overdue_entry_without_a_run_is_returned_once(database, redis, seen, force_all_pods):
    settings = {
        "scheduler__orphan_cleanup__threshold_ms": 0,
        "scheduler__orphan_cleanup__interval_ms": 50,
        "scheduler__orphan_cleanup__force_all_pods": force_all_pods,
        "scheduler__refresh_period_seconds": 600,
    }
    async with Pod(database, redis, settings=settings, daily=every(24 * HOUR_MS, seen.quick)) as pod:
        await until(lambda: seen.count("daily") == 1)
        due = await until(lambda: redis.zscore("waiting", "daily"))
        # Acquired by a live member, so no successor takes over, and unknown to that member.
        [fence] = (await pod.agents.repository.members()).values()
        async with redis.pipeline(transaction=True) as pipeline:
            pipeline.zrem("waiting", "daily")
            pipeline.zadd("working", {"daily": now_ms() / 1000 - 1})
            pipeline.hset("working-runs", "daily", f"7 {fence} 1000000 1000000")
            await pipeline.execute()
        await until(lambda: _is_due_at(redis, "daily", due))
        assert await until(lambda: pod.agents.health.orphans) == 1
    assert seen.count("daily") == 1
    assert await redis.hlen("working-runs") == 0


async def test_replica_that_loses_its_lease_rejoins_as_a_new_member(database, redis, seen):
    async with Pod(database, redis, lease_s=1.0, beat=every(50, seen.quick), held=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("beat") >= 1 and seen.count("held") == 1)
        [first] = await pod.agents.repository.members()
        await database.run(EXPIRE, first)
        await until(lambda: _has_new_member(pod, first), within_s=15)
        beats = seen.count("beat")
        await until(lambda: seen.count("beat") > beats, within_s=15)
        await until(lambda: seen.count("held") == 2, within_s=15)
    assert not seen.overlaps
    assert (await history(database, "held"))[0]["outcome"] == "LOST"
    assert await database.rows(RUNNING) == []


async def _has_new_member(pod, first):
    members = await pod.agents.repository.members()
    return members and first not in members


async def test_cron_agent_waits_for_its_time_also_after_a_redis_flush(database, redis, seen):
    settings = {"scheduler__refresh_period_seconds": 1}
    yearly = {"schedule": CronSchedule("0 0 29 2 *", "Europe/Berlin"), "body": seen.quick}
    async with Pod(database, redis, settings=settings, yearly=yearly, beat=every(50, seen.quick)):
        due = await until(lambda: redis.zscore("waiting", "yearly"))
        await redis.flushdb()
        await until(lambda: _is_due_at(redis, "yearly", due))
        beats = seen.count("beat")
        await until(lambda: seen.count("beat") > beats + 2)
    assert seen.count("yearly") == 0


async def test_metrics_report_the_scheduler_loop(database, redis, seen):
    """Read as Prometheus reads them: a busy replica, an entry that is not an agent, and a body that fails."""
    before = _metrics()
    settings = {
        "scheduler__refresh_period_seconds": 1,
        "scheduler__orphan_cleanup__interval_ms": 50,
        "scheduler__orphan_cleanup__threshold_ms": 0,
    }
    await redis.zadd("waiting", {"1700000000": 1.0})
    bad = seen.failing(RuntimeError("no luck"))
    async with Pod(database, redis, settings=settings, held=every(HOUR_MS, seen.hang), bad=every(HOUR_MS, bad)) as pod:
        await until(lambda: seen.count("held") and seen.count("bad"))
        await until(lambda: pod.agents.health._sampled, what="a sample of the sets")
        await until(lambda: _grew(before, 'rota_agents_validation_invalid_member_total{where="waiting"}'))
        await until(lambda: _metrics()["rota_agents_scheduler_active_agents"] == 1)
        now = _metrics()
    assert now["rota_agents_scheduler_registered_agents"] == 2
    assert now["rota_agents_scheduler_semaphore_available"] == 99
    assert now["rota_agents_scheduler_permit_mismatch"] == 0
    assert now["rota_agents_scheduler_degraded"] == 0
    assert abs(now["rota_agents_scheduler_time_offset_ms"]) < 60_000
    assert now["rota_agents_redis_pool_idle"] + now["rota_agents_redis_pool_active"] >= 1
    grown = (
        "rota_agents_acquire_attempts_total",
        "rota_agents_acquire_acquired_total",
        'rota_agents_acquire_time_seconds_count{mode="batch"}',
        'rota_agents_runs_total{outcome="FAILED"}',
        'rota_agents_run_cycle_time_seconds_count{success="true"}',
        "rota_agents_repopulate_time_seconds_count",
        'rota_agents_scripts_latency_seconds_count{script="acquire"}',
        'rota_agents_cleanup_time_seconds_count{type="orphan"}',
    )
    assert [name for name in grown if now.get(name, 0) <= before.get(name, 0)] == []


async def test_script_errors_are_counted_by_script_and_reason(database, redis, seen):
    before = _metrics()
    async with Pod(database, redis, beat=every(50, seen.quick)):
        await until(lambda: seen.count("beat") >= 1)
        await redis.delete("waiting")
        await redis.set("waiting", "not a sorted set")
        await until(lambda: _grew(before, 'rota_agents_scripts_errors_total{reason="script_failed",script="ready"}'))
        await redis.delete("waiting")


def _metrics():
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def _grew(before, name):
    return _metrics().get(name, 0) > before.get(name, 0)
