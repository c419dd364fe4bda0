"""Cron by the wall clock of a time zone, over the days on which it jumps."""

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
    """The next slots, each asked for anew from the one before, in UTC."""
    found, after_ms = [], ms(after)
    for _ in range(times):
        after_ms = next_slot(cron, after_ms)
        found.append(datetime.fromtimestamp(after_ms / 1000, UTC).strftime("%m-%dT%H:%M"))
    return found


def test_a_time_that_is_skipped_in_spring_runs_when_the_clock_has_jumped():
    nightly = CronSchedule("30 2 * * *", BERLIN)
    assert walk(nightly, "2026-03-27T12:00Z", 4) == ["03-28T01:30", "03-29T01:00", "03-30T00:30", "03-31T00:30"]


def test_a_time_that_comes_twice_in_autumn_runs_once():
    nightly = CronSchedule("30 2 * * *", BERLIN)
    assert walk(nightly, "2026-10-24T12:00Z", 3) == ["10-25T00:30", "10-26T01:30", "10-27T01:30"]


@pytest.mark.parametrize("asked", ["2026-10-25T00:45Z", "2026-10-25T01:10Z", "2026-10-25T01:30Z", "2026-10-25T01:59Z"])
def test_whoever_asks_in_the_hour_that_comes_twice_is_not_sent_back(asked):
    assert walk(CronSchedule("30 2 * * *", BERLIN), asked, 1) == ["10-26T01:30"]


def test_what_runs_every_so_often_takes_no_notice():
    hourly = CronSchedule("0 * * * *", BERLIN)
    assert walk(hourly, "2026-10-24T23:30Z", 3) == ["10-25T00:00", "10-25T01:00", "10-25T02:00"]
    assert walk(hourly, "2026-03-29T00:30Z", 2) == ["03-29T01:00", "03-29T02:00"]


def test_a_slot_lies_after_the_moment_that_was_asked_about():
    daily = CronSchedule("0 2 * * *")
    assert next_slot(daily, ms("2026-01-01T02:00Z")) == ms("2026-01-02T02:00Z")
    assert next_slot(daily, ms("2026-01-01T02:00Z") - 1) == ms("2026-01-01T02:00Z")
    assert next_slot(daily, ms("2026-01-01T02:00Z") + 1) == ms("2026-01-02T02:00Z")


def test_a_new_agent_by_cron_waits_for_its_time():
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
def test_missed_slots_become_one_or_are_run_one_by_one(catch_up, due, slot):
    spec = AgentSpec(name="nightly", schedule=CronSchedule("0 2 * * *"), catch_up=catch_up)
    ended = AgentRunResult(
        outcome=AgentOutcome.SUCCEEDED,
        acquired_ms=ms("2026-01-05T11:59Z"),
        now_ms=ms("2026-01-05T12:00Z"),
        slot_ms=ms("2026-01-01T02:00Z"),
        streak=0,
    )
    assert plan_next_run(spec, ended, FailureBackoffSettings(), 0.0, 0.5) == NextRun(ms(due), ms(slot))


def test_a_failure_without_an_error_interval_waits_for_the_next_slot():
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
def test_what_never_comes_is_refused_with_a_sentence(expression, zone, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        validate_agent(AgentSpec(name="nightly", schedule=CronSchedule(expression, zone)))


def test_cron_is_declared_with_its_time_zone():
    app = Rota()
    app.agent(cron="0 2 * * MON-FRI", tz=BERLIN, name="nightly")(lambda: None)
    assert app.recurring["nightly"].spec.schedule == CronSchedule("0 2 * * MON-FRI", BERLIN)
    with pytest.raises(InvalidInput, match="needs exactly one schedule"):
        app.agent(cron="0 2 * * *", every=5, name="both")(lambda: None)


@pytest.mark.parametrize(
    ("zone", "jumps"),
    [
        (BERLIN, ("2026-03-28T22:00Z", "2026-10-24T22:00Z")),
        ("America/New_York", ("2026-03-08T04:00Z", "2026-11-01T03:00Z")),
        ("Australia/Lord_Howe", ("2026-04-04T12:00Z", "2026-10-03T12:00Z")),  # half an hour, in the southern autumn
        ("Asia/Kolkata", ("2026-03-28T22:00Z", "2026-10-24T22:00Z")),
    ],
)
def test_every_quarter_of_an_hour_comes_once_over_the_days_on_which_clocks_jump(zone, jumps):
    for jump in jumps:
        slot_ms, slots = ms(jump), []
        for _ in range(48):
            slot_ms = next_slot(CronSchedule("*/15 * * * *", zone), slot_ms)
            slots.append(slot_ms)
        assert {after - before for before, after in pairwise(slots)} == {15 * 60_000}


def test_days_that_not_every_month_has():
    assert walk(CronSchedule("0 0 29 2 *"), "2026-01-01T00:00Z", 1) == ["02-29T00:00"]
    assert next_slot(CronSchedule("0 0 29 2 *"), ms("2026-01-01T00:00Z")) == ms("2028-02-29T00:00Z")
    assert walk(CronSchedule("0 0 L * *"), "2026-01-15T00:00Z", 3) == ["01-31T00:00", "02-28T00:00", "03-31T00:00"]
    assert walk(CronSchedule("0 9 * * MON#2"), "2026-01-01T00:00Z", 2) == ["01-12T09:00", "02-09T09:00"]


def test_slots_between_two_moments_are_those_of_the_wall_clock():
    nightly = CronSchedule("30 2 * * *", BERLIN)
    found = slots_between(nightly, ms("2026-10-24T00:00Z"), ms("2026-10-27T00:00Z"), 10)
    assert found == [ms("2026-10-24T00:30Z"), ms("2026-10-25T00:30Z"), ms("2026-10-26T01:30Z")]
    assert slots_between(nightly, ms("2026-10-24T00:30Z"), ms("2026-10-25T00:30Z"), 10) == [ms("2026-10-24T00:30Z")]
    assert slots_between(IntervalSchedule(1000), 5000, 8000, 2) == [5000, 6000]
    assert slots_between(OneTimeSchedule(5000), 5000, 8000, 2) == [5000]
    assert slots_between(OneTimeSchedule(5000), 5001, 8000, 2) == []


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
def test_a_daily_run_over_a_jump_comes_once_a_day(catch_up):
    """As the loop asks: after each run, a few seconds past its slot."""
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
