"""Agent administration: pause, resume, trigger, remove, and the history of runs."""

from itertools import pairwise

import pytest

from rota.agents.admin import AgentAdmin
from rota.model.errors import NotFound, Refused
from rota.model.settings.agents import AgentKeySettings
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, in_sets, now_ms, row
from tests.support.queue import sql
from tests.support.waiting import until

MAKE_LATE = sql("UPDATE rota.agent SET ts_due = ts_due - interval '3 h', ts_slot = ts_slot - interval '3 h'")
AUDIT = sql("SELECT actor, action, target FROM rota.audit ORDER BY seq")


@pytest.fixture
def seen():
    return RunRecorder()


@pytest.fixture
def admin(database, redis):
    return AgentAdmin(database, redis, AgentKeySettings(), "anna")


async def test_paused_agent_starts_no_run_until_resumed(database, redis, seen, admin):
    async with Pod(database, redis, beat=every(50, seen.quick), other=every(50, seen.quick)):
        await until(lambda: seen.count("beat") >= 2)
        assert await admin.pause("beat")
        assert not await admin.pause("beat")
        await until(lambda: _is_idle(database, "beat"))
        began, others = seen.count("beat"), seen.count("other")
        await until(lambda: seen.count("other") > others + 3)
        assert seen.count("beat") == began
        assert (await admin.show("beat")).state == "PAUSED"
        assert await in_sets(redis, "beat") == []
        assert await admin.resume("beat")
        assert not await admin.resume("beat")
        await until(lambda: seen.count("beat") > began)


async def _is_idle(database, name):
    return (await row(database, name))["running"] is None


async def test_active_run_outlives_a_pause(database, redis, seen, admin):
    async with Pod(database, redis, beat=every(50, seen.hang)):
        await until(lambda: seen.count("beat") == 1)
        await admin.pause("beat")
        seen.gates["beat"].set()
        [run] = await until(lambda: admin.history("beat"))
        assert run.outcome == "SUCCEEDED"
        await until(lambda: _is_not_indexed(redis, "beat"))
    assert seen.count("beat") == 1


async def _is_not_indexed(redis, name):
    return await in_sets(redis, name) == []


async def test_pause_survives_a_redis_flush(database, redis, seen, admin):
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(database, redis, settings=settings, beat=every(50, seen.quick), other=every(HOUR_MS, seen.quick)):
        await until(lambda: seen.count("beat") >= 1)
        await admin.pause("beat")
        await until(lambda: _is_idle(database, "beat"))
        began = seen.count("beat")
        await redis.flushdb()
        await until(lambda: redis.zscore("waiting", "other"))
        assert await in_sets(redis, "beat") == []
        assert seen.count("beat") == began


async def test_trigger_runs_an_agent_at_once(database, redis, seen, admin):
    async with Pod(database, redis, daily=every(24 * HOUR_MS, seen.quick)):
        await until(lambda: _has_run(admin, "daily", 1))
        asked_ms = now_ms()
        assert await admin.trigger("daily")
        await until(lambda: _has_run(admin, "daily", 2))
        assert seen.runs[-1].acquired_ms - asked_ms < 3000
        await until(lambda: redis.zscore("waiting", "daily"))
        assert await redis.zscore("waiting", "daily") == pytest.approx(now_ms() / 1000 + 24 * 3600, abs=30)


async def _has_run(admin, name, times):
    return len(await admin.history(name)) >= times


async def test_trigger_during_a_run_is_queued_once_or_refused(database, redis, seen, admin):
    agents = {"queues": every(HOUR_MS, seen.hang, overlap="queue"), "skips": every(HOUR_MS, seen.hang)}
    async with Pod(database, redis, **agents):
        await until(lambda: len(seen.runs) == 2)
        with pytest.raises(Refused, match="runs on pod"):
            await admin.trigger("skips")
        assert not await admin.trigger("queues")
        assert not await admin.trigger("queues")
        seen.gates["queues"].set()
        await until(lambda: _has_run(admin, "queues", 2))
        await until(lambda: redis.zscore("waiting", "queues"))
        assert await redis.zscore("waiting", "queues") == pytest.approx(now_ms() / 1000 + 3600, abs=30)
    assert not seen.overlaps


async def test_trigger_of_paused_agent_is_refused(database, redis, seen, admin):
    async with Pod(database, redis, daily=every(HOUR_MS, seen.quick)):
        await until(lambda: seen.count("daily") == 1)
        await admin.pause("daily")
        with pytest.raises(Refused, match="is paused"):
            await admin.trigger("daily")


async def test_resume_does_not_run_slots_skipped_while_paused(database, redis, seen, admin):
    agents = {"skips": every(HOUR_MS, seen.quick, catch_up="skip"), "once": every(HOUR_MS, seen.quick)}
    async with Pod(database, redis, **agents):
        for name in agents:
            await until(lambda name=name: _has_run(admin, name, 1))
            await admin.pause(name)
        await database.run(MAKE_LATE)
        for name in agents:
            await admin.resume(name)
        await until(lambda: seen.count("once") == 2)
    assert seen.count("skips") == 1
    assert (await row(database, "skips"))["due_ms"] > now_ms()


async def test_removed_agent_loses_its_history(database, redis, seen, admin):
    async with Pod(database, redis, beat=every(HOUR_MS, seen.quick)):
        await until(lambda: _has_run(admin, "beat", 1))
    await admin.remove("beat")
    assert await in_sets(redis, "beat") == []
    for call in (admin.show, admin.history, admin.pause, admin.resume, admin.trigger, admin.remove):
        with pytest.raises(NotFound, match="no agent 'beat'"):
            await call("beat")


async def test_history_has_durations_and_errors_and_is_bounded(database, redis, seen, admin):
    async with Pod(database, redis, bad=every(5, seen.failing(*[ValueError(f"no {n}") for n in range(60)]))):
        await until(lambda: seen.count("bad") >= 56, within_s=30)
    runs = await admin.history("bad")
    assert len(runs) == 50
    assert all(before.started >= after.started for before, after in pairwise(runs))
    assert {run.outcome for run in runs} <= {"FAILED", "CANCELLED", "SUCCEEDED"}
    assert "ValueError: no" in next(run.error for run in runs if run.outcome == "FAILED")
    assert len(await admin.history("bad", 5)) == 5


async def test_agent_changes_are_audited(database, redis, seen, admin):
    before = len(await database.rows(AUDIT))
    async with Pod(database, redis, beat=every(HOUR_MS, seen.quick)):
        await until(lambda: _has_run(admin, "beat", 1))
        await admin.pause("beat")
        await admin.resume("beat")
        await admin.trigger("beat")
    entries = [tuple(each.values()) for each in await database.rows(AUDIT)][before:]
    assert entries == [("anna", f"agent.{what}", "agent:beat") for what in ("pause", "resume", "trigger")]
