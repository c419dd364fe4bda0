"""Backfill: past slots of a schedule run one by one between scheduled runs, and each once."""

from datetime import UTC, datetime, timedelta

import pytest

from rota.agents.admin import AgentAdmin
from rota.model.errors import InvalidInput, Refused
from rota.model.schedules import CronSchedule, OneTimeSchedule
from rota.model.settings.agents import AgentKeySettings
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, now_ms, row
from tests.support.waiting import until

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
NIGHTLY = CronSchedule("0 2 * * *")


@pytest.fixture
def seen():
    return RunRecorder()


@pytest.fixture
def admin(database, redis):
    return AgentAdmin(database, redis, AgentKeySettings(), "anna")


def day(number, hour=2):
    return NEW_YEAR + timedelta(days=number - 1, hours=hour)


def slots(seen):
    return [datetime.fromtimestamp(run.slot_ms / 1000, UTC) for run in seen.runs if run.backfill]


def cron(body, **more):
    return {"schedule": NIGHTLY, "body": body, **more}


async def test_backfill_runs_past_slots_in_order_and_keeps_the_schedule(database, redis, seen, admin):
    async with Pod(database, redis, nightly=cron(seen.quick)):
        due = await until(lambda: redis.zscore("waiting", "nightly"))
        planned = await admin.backfill("nightly", day(1), day(5))
        assert (planned.runs, planned.first, planned.last) == (4, day(1), day(4))
        await until(lambda: _is_finished(admin, "nightly"))
        assert slots(seen) == [day(1), day(2), day(3), day(4)]
        assert await until(lambda: redis.zscore("waiting", "nightly")) == pytest.approx(due, abs=0.001)
    runs = await admin.history("nightly")
    assert [(run.slot, run.backfill) for run in reversed(runs)] == [(slot, True) for slot in slots(seen)]
    assert not seen.overlaps


async def _is_finished(admin, name):
    found = await admin.show(name)
    return found.backfill is None and found.run is None


async def test_scheduled_run_goes_before_a_backfill(database, redis, seen, admin):
    async with Pod(database, redis, hourly=every(HOUR_MS, seen.hang)):
        await until(lambda: seen.count("hourly") == 1)
        await admin.backfill("hourly", day(1, 0), day(1, 3))
        await admin.stop_backfill("hourly")
        await admin.backfill("hourly", day(1, 0), day(1, 2))
        assert not seen.runs[0].backfill
        seen.gates["hourly"].set()
        await until(lambda: _is_finished(admin, "hourly"))
        assert slots(seen) == [day(1, 0), day(1, 1)]
        assert await admin.trigger("hourly")
        await until(lambda: seen.count("hourly") == 4)
        assert not seen.runs[-1].backfill
    assert not seen.overlaps


async def test_trigger_is_served_during_a_backfill(database, redis, seen, admin):
    async with Pod(database, redis, nightly=cron(seen.hang, overlap="queue")):
        await until(lambda: redis.zscore("waiting", "nightly"))
        await admin.backfill("nightly", day(1), day(3))
        await until(lambda: seen.count("nightly") == 1)
        assert not await admin.trigger("nightly"), "it runs, so this is queued"
        seen.gates["nightly"].set()
        await until(lambda: seen.count("nightly") == 3)
        await until(lambda: _is_finished(admin, "nightly"))
    assert [run.backfill for run in seen.runs] == [True, False, True]
    assert slots(seen) == [day(1), day(2)]


async def test_backfill_resumes_elsewhere_with_the_interrupted_slot(database, redis, seen, admin):
    async with Pod(database, redis, name="one", nightly=cron(seen.hang)):
        await until(lambda: redis.zscore("waiting", "nightly"))
        await admin.backfill("nightly", day(1), day(3))
        await until(lambda: seen.count("nightly") == 1)
    seen.gates["nightly"].set()
    async with Pod(database, redis, name="two", nightly=cron(seen.hang)):
        await until(lambda: _is_finished(admin, "nightly"))
    assert slots(seen) == [day(1), day(1), day(2)]


async def test_backfill_survives_a_redis_flush(database, redis, seen, admin):
    settings = {"scheduler__refresh_period_seconds": 1}
    async with Pod(database, redis, settings=settings, nightly=cron(seen.quick)):
        await until(lambda: redis.zscore("waiting", "nightly"))
        await admin.pause("nightly")
        await admin.backfill("nightly", day(1), day(3))
        await redis.flushdb()
        assert seen.runs == []
        await admin.resume("nightly")
        await redis.flushdb()
        await until(lambda: _is_finished(admin, "nightly"))
    assert slots(seen) == [day(1), day(2)]


async def test_failed_backfill_slot_is_not_retried_and_the_rest_continues(database, redis, seen, admin):
    fails = seen.failing(ValueError("no data for that day"))
    async with Pod(database, redis, nightly=cron(fails, catch_up="skip")):
        await until(lambda: redis.zscore("waiting", "nightly"))
        await admin.backfill("nightly", day(1), day(4))
        await until(lambda: _is_finished(admin, "nightly"))
    assert slots(seen) == [day(1), day(2), day(3)]
    assert [run.outcome for run in await admin.history("nightly")] == ["SUCCEEDED", "SUCCEEDED", "FAILED"]


async def test_stopped_backfill_starts_no_more_runs(database, redis, seen, admin):
    async with Pod(database, redis, nightly=cron(seen.hang), beat=every(50, seen.quick)):
        await until(lambda: redis.zscore("waiting", "nightly"))
        await admin.backfill("nightly", day(1), day(20))
        await until(lambda: seen.count("nightly") == 1)
        assert await admin.stop_backfill("nightly")
        assert not await admin.stop_backfill("nightly")
        seen.gates["nightly"].set()
        await until(lambda: _is_finished(admin, "nightly"))
        beats = seen.count("beat")
        await until(lambda: seen.count("beat") > beats + 3)
        assert (await row(database, "nightly"))["due_ms"] > now_ms()
    assert slots(seen) == [day(1)]


async def test_invalid_backfill_is_refused_with_a_sentence(database, redis, seen, admin):
    agents = {"nightly": cron(seen.quick), "beat": every(HOUR_MS, seen.quick)}
    agents["never"] = {"schedule": OneTimeSchedule(now_ms() + HOUR_MS), "body": seen.quick}
    async with Pod(database, redis, **agents):
        await until(lambda: redis.zscore("waiting", "nightly"))
        invalid = [
            ("nightly", day(2), day(1), "no slot in that time"),
            ("nightly", day(1), datetime.now(UTC) + timedelta(hours=1), "in the future"),
            ("nightly", day(1).replace(tzinfo=None), day(2), "time zone"),
            ("nightly", datetime.min.replace(tzinfo=UTC), day(2), "before 1970"),
            ("nightly", datetime.max.replace(tzinfo=UTC), day(2), "no slot in that time"),
            ("beat", day(1), day(90), "more than 1000 runs"),
            ("never", day(1), day(90), "no slot in that time"),
        ]
        for name, first, last, complaint in invalid:
            with pytest.raises(InvalidInput, match=complaint):
                await admin.backfill(name, first, last)
        await admin.pause("nightly")
        await admin.backfill("nightly", day(1), day(3))
        with pytest.raises(Refused, match="already has a backfill"):
            await admin.backfill("nightly", day(5), day(6))
    assert not slots(seen)


async def test_run_of_a_stopped_backfill_does_not_advance_a_new_one(database, redis, seen, admin):
    async with Pod(database, redis, nightly=cron(seen.hang)):
        await until(lambda: redis.zscore("waiting", "nightly"))
        await admin.backfill("nightly", day(1), day(20))
        await until(lambda: seen.count("nightly") == 1)
        await admin.stop_backfill("nightly")
        await admin.backfill("nightly", day(10), day(12))
        seen.gates["nightly"].set()
        await until(lambda: _is_finished(admin, "nightly"))
    assert slots(seen) == [day(1), day(10), day(11)]


async def test_cancelled_run_does_not_revive_a_stopped_backfill(database, redis, seen, admin):
    async with Pod(database, redis, nightly=cron(seen.hang)):
        await until(lambda: redis.zscore("waiting", "nightly"))
        await admin.backfill("nightly", day(1), day(20))
        await until(lambda: seen.count("nightly") == 1)
        await admin.stop_backfill("nightly")
    assert [run.outcome for run in await admin.history("nightly")] == ["CANCELLED"]
    assert (await admin.show("nightly")).due > datetime.now(UTC)
