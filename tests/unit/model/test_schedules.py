"""Cron schedules in a time zone, across daylight-saving changes."""

from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from rota import Rota
from rota.model.agents import (
    AgentOutcome,
    AgentRunResult,
    AgentSpec,
    NextRun,
    plan_first_run,
    plan_next_run,
    validate_agent,
)
from rota.model.errors import InvalidInput
from rota.model.schedules import CronSchedule, IntervalSchedule, OneTimeSchedule, next_slot, slots_between
from rota.model.settings.agents import FailureBackoffSettings

BERLIN = "Europe/Berlin"


def ms(text):
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def walk(cron, after, times):
    """The next slots in UTC, each computed from the one before."""
    found, after_ms = [], ms(after)
    for _ in range(times):
        after_ms = next_slot(cron, after_ms)
        found.append(datetime.fromtimestamp(after_ms / 1000, UTC).strftime("%m-%dT%H:%M"))
    return found


def test_cron_time_skipped_by_dst_runs_right_after_the_change():
    nightly = CronSchedule("30 2 * * *", BERLIN)
    assert walk(nightly, "2026-03-27T12:00Z", 4) == ["03-28T01:30", "03-29T01:00", "03-30T00:30", "03-31T00:30"]


def test_cron_time_repeated_by_dst_runs_once():
    nightly = CronSchedule("30 2 * * *", BERLIN)
    assert walk(nightly, "2026-10-24T12:00Z", 3) == ["10-25T00:30", "10-26T01:30", "10-27T01:30"]


@pytest.mark.parametrize("after", ["2026-10-25T00:45Z", "2026-10-25T01:10Z", "2026-10-25T01:30Z", "2026-10-25T01:59Z"])
def test_cron_next_slot_from_within_the_repeated_hour_is_the_next_day(after):
    assert walk(CronSchedule("30 2 * * *", BERLIN), after, 1) == ["10-26T01:30"]


def test_hourly_cron_is_not_affected_by_dst():
    hourly = CronSchedule("0 * * * *", BERLIN)
    assert walk(hourly, "2026-10-24T23:30Z", 3) == ["10-25T00:00", "10-25T01:00", "10-25T02:00"]
    assert walk(hourly, "2026-03-29T00:30Z", 2) == ["03-29T01:00", "03-29T02:00"]


def test_next_slot_is_strictly_after_the_given_time():
    daily = CronSchedule("0 2 * * *")
    assert next_slot(daily, ms("2026-01-01T02:00Z")) == ms("2026-01-02T02:00Z")
    assert next_slot(daily, ms("2026-01-01T02:00Z") - 1) == ms("2026-01-01T02:00Z")
    assert next_slot(daily, ms("2026-01-01T02:00Z") + 1) == ms("2026-01-02T02:00Z")


def test_new_cron_agent_waits_for_its_first_slot():
    spec = AgentSpec(name="nightly", schedule=CronSchedule("0 2 * * *"))
    slot_ms = ms("2026-01-02T02:00Z")
    assert plan_first_run(spec, ms("2026-01-01T12:00Z"), 5000) == NextRun(slot_ms, slot_ms)


@pytest.mark.parametrize(
    ("catch_up", "due", "slot"),
    [
        ("one", "2026-01-06T02:00Z", "2026-01-06T02:00Z"),
        ("skip", "2026-01-06T02:00Z", "2026-01-06T02:00Z"),
        ("all", "2026-01-05T12:00Z", "2026-01-02T02:00Z"),
    ],
)
def test_missed_slots_are_merged_or_run_one_by_one_by_catch_up(catch_up, due, slot):
    spec = AgentSpec(name="nightly", schedule=CronSchedule("0 2 * * *"), catch_up=catch_up)
    ended = AgentRunResult(
        outcome=AgentOutcome.SUCCEEDED,
        acquired_ms=ms("2026-01-05T11:59Z"),
        now_ms=ms("2026-01-05T12:00Z"),
        slot_ms=ms("2026-01-01T02:00Z"),
        streak=0,
    )
    assert plan_next_run(spec, ended, FailureBackoffSettings(), 0.0, 0.5) == NextRun(ms(due), ms(slot))


def test_failed_cron_run_without_error_interval_waits_for_the_next_slot():
    spec = AgentSpec(name="nightly", schedule=CronSchedule("0 2 * * *"))
    now_ms = ms("2026-01-01T02:05Z")
    ended = AgentRunResult(
        outcome=AgentOutcome.FAILED, acquired_ms=now_ms, now_ms=now_ms, slot_ms=ms("2026-01-01T02:00Z"), streak=0
    )
    assert plan_next_run(spec, ended, FailureBackoffSettings(), 0.0, 0.5).due_ms == ms("2026-01-02T02:00Z")


@pytest.mark.parametrize(
    ("expression", "zone", "complaint"),
    [
        ("", "UTC", "not a valid cron expression"),
        ("* * * *", "UTC", "not a valid cron expression"),
        ("61 * * * *", "UTC", "Bad minute"),
        ("0 0 30 2 *", "UTC", "cron expression"),
        ("0 2 * * *", "Mars/Olympus", "not a known time zone"),
        ("0 2 * * *", "../etc/passwd", "not a known time zone"),
        ("0 2 * * *", "", "not a known time zone"),
    ],
)
def test_invalid_cron_or_time_zone_is_refused_with_a_reason(expression, zone, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        validate_agent(AgentSpec(name="nightly", schedule=CronSchedule(expression, zone)))


def test_cron_agent_is_declared_with_its_time_zone():
    app = Rota()
    app.agent(cron="0 2 * * MON-FRI", tz=BERLIN, name="nightly")(lambda: None)
    assert app.recurring["nightly"].spec.schedule == CronSchedule("0 2 * * MON-FRI", BERLIN)
    with pytest.raises(InvalidInput, match="needs exactly one schedule"):
        app.agent(cron="0 2 * * *", every=5, name="both")(lambda: None)


@pytest.mark.parametrize(
    ("zone", "changes"),
    [
        (BERLIN, ("2026-03-28T22:00Z", "2026-10-24T22:00Z")),
        ("America/New_York", ("2026-03-08T04:00Z", "2026-11-01T03:00Z")),
        (
            "Australia/Lord_Howe",
            ("2026-04-04T12:00Z", "2026-10-03T12:00Z"),
        ),  # shifts by half an hour, southern hemisphere
        ("Asia/Kolkata", ("2026-03-28T22:00Z", "2026-10-24T22:00Z")),
    ],
)
def test_quarter_hour_cron_is_evenly_spaced_across_dst_changes(zone, changes):
    for change in changes:
        slot_ms, slots = ms(change), []
        for _ in range(48):
            slot_ms = next_slot(CronSchedule("*/15 * * * *", zone), slot_ms)
            slots.append(slot_ms)
        assert {after - before for before, after in pairwise(slots)} == {15 * 60_000}


def test_cron_days_that_some_months_lack():
    assert walk(CronSchedule("0 0 29 2 *"), "2026-01-01T00:00Z", 1) == ["02-29T00:00"]
    assert next_slot(CronSchedule("0 0 29 2 *"), ms("2026-01-01T00:00Z")) == ms("2028-02-29T00:00Z")
    assert walk(CronSchedule("0 0 L * *"), "2026-01-15T00:00Z", 3) == ["01-31T00:00", "02-28T00:00", "03-31T00:00"]
    assert walk(CronSchedule("0 9 * * MON#2"), "2026-01-01T00:00Z", 2) == ["01-12T09:00", "02-09T09:00"]


def test_slots_between_two_times_follow_the_wall_clock():
    nightly = CronSchedule("30 2 * * *", BERLIN)
    found = slots_between(nightly, ms("2026-10-24T00:00Z"), ms("2026-10-27T00:00Z"), 10)
    assert found == [ms("2026-10-24T00:30Z"), ms("2026-10-25T00:30Z"), ms("2026-10-26T01:30Z")]
    assert slots_between(nightly, ms("2026-10-24T00:30Z"), ms("2026-10-25T00:30Z"), 10) == [ms("2026-10-24T00:30Z")]
    assert slots_between(IntervalSchedule(1000), 5000, 8000, 2) == [5000, 6000]
    assert slots_between(OneTimeSchedule(5000), 5000, 8000, 2) == [5000]
    assert slots_between(OneTimeSchedule(5000), 5001, 8000, 2) == []


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
def test_daily_cron_across_dst_runs_once_a_day(catch_up):
    """As the scheduler does: computed after each run, a few seconds past its slot."""
    spec = AgentSpec(name="nightly", schedule=CronSchedule("30 2 * * *", BERLIN), catch_up=catch_up)
    slot_ms, days = ms("2026-10-23T00:30Z"), []
    for _ in range(5):
        now_ms = slot_ms + 5000
        ended = AgentRunResult(
            outcome=AgentOutcome.SUCCEEDED, acquired_ms=slot_ms, now_ms=now_ms, slot_ms=slot_ms, streak=0
        )
        slot_ms = plan_next_run(spec, ended, FailureBackoffSettings(), 0.0, 0.5).slot_ms
        days.append(datetime.fromtimestamp(slot_ms / 1000, ZoneInfo(BERLIN)).strftime("%d %H:%M"))
    assert days == [f"{day} 02:30" for day in range(24, 29)]
