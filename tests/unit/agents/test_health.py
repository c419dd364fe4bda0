"""Agent scheduler health: the summary line, the degraded state and the watchdogs."""

import pytest

from rota.agents import health as health_module
from rota.agents.acquisition import CycleResult, attempts_of, batch_size_of
from rota.agents.circuit_breakers import acquisition_rules, redis_rules
from rota.agents.concurrency_permits import UNBOUNDED_FREE, PermitPool
from rota.agents.health import (
    STALLS,
    CycleSnapshot,
    Health,
    Watchdogs,
    degraded_reason,
    is_stalled,
    watchdog_conditions,
)
from rota.agents.metrics import SCHEDULER_GAUGES
from rota.model.circuit_breaker import ProbesByDuration, WindowedFailures
from rota.model.settings.agents import BatchOperationsSettings, CircuitBreakerSettings
from tests.support.agents import ignore


def tick(*, ready=0, mine=0, passed=0, acquired=0, overdue_ms=0, **more):
    seen = CycleResult(ready=ready, mine=mine, passed=passed, acquired=acquired, oldest_overdue_ms=overdue_ms, now_ms=1)
    given = {
        "registered": 5,
        "active": 0,
        "permits_most": 100,
        "permits_free": 100,
        "slots": 100,
        "completions": 0,
        "redis_closed": True,
        "shortest_ms": 30_000,
    }
    return CycleSnapshot(seen=seen, **{**given, **more})


def triggered(**given):
    return {name for name, holds in watchdog_conditions(tick(**given)).items() if holds}


def test_watchdogs_when_nothing_is_due_or_everything_was_acquired_are_silent():
    assert triggered() == set()
    assert triggered(ready=50, mine=50, acquired=50) == set()


def test_permit_leak_is_suspected_when_agents_wait_without_free_permits_or_active_runs():
    assert "permit_leak_suspect" in triggered(mine=1, permits_free=0, slots=0)
    assert "permit_leak_suspect" not in triggered(mine=1, permits_free=0, slots=0, active=100)
    assert "permit_leak_suspect" not in triggered(permits_free=0, slots=0)
    assert "permit_leak_suspect" not in triggered(mine=1, permits_free=0, permits_most=0)


def test_capacity_skew_is_suspected_when_free_slots_acquire_almost_nothing():
    assert "capacity_skew" in triggered(mine=50, acquired=4)
    assert "capacity_skew" not in triggered(mine=50, acquired=5)
    assert "capacity_skew" not in triggered(mine=50, acquired=4, permits_free=90)


def test_zero_progress_is_suspected_when_due_agents_are_not_acquired_and_redis_is_up():
    assert "zero_progress" in triggered(mine=1)
    assert "zero_progress" not in triggered(mine=1, redis_closed=False)
    assert "zero_progress" not in triggered(mine=1, slots=0), "a full pool is busy, not stuck"
    assert triggered(redis_closed=False) == {"redis_stall"}


def test_watchdog_triggers_after_three_consecutive_cycles_then_counts_from_zero():
    watchdogs = Watchdogs()
    triggers = [watchdogs.update({"zero_progress": holds}, now) for now, holds in enumerate([1, 1, 0, 1, 1, 1, 1])]
    assert triggers == [[], [], [], [], [], ["zero_progress"], []]
    assert watchdogs.triggered_since(5) == ["zero_progress"]
    assert watchdogs.triggered_since(6) == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mine": 1, "overdue_ms": 30_000}, ""),
        ({"mine": 1, "overdue_ms": 30_001}, "overdue"),
        ({"mine": 1, "overdue_ms": 30_001, "shortest_ms": 0}, ""),
        ({"ready": 200, "passed": 200, "acquired": 0}, "slots_unfilled"),
        ({"ready": 200, "passed": 20, "acquired": 80}, ""),
        ({"ready": 50, "passed": 50, "acquired": 0}, ""),
    ],
)
def test_degraded_reason_for_overdue_agents_or_slots_left_unfilled_by_other_pools(given, reason):
    assert degraded_reason(tick(**given)) == reason


def test_summary_has_the_documented_format():
    health = Health(600, scripts=7)
    health.zombies = 2
    health.set_overlap_sample(50, 0)
    health.update(tick(ready=5, mine=10, permits_free=55, slots=50, registered=500, active=45), 0.0)
    assert health.summary(1.0) == (
        "Scheduler health | health=HEALTHY | [agents registered=500 active=futures=45 scripts=7]"
        " [backlog ready=10 oldest_overdue=0s capacity_per_cycle=50] [permits 55/100 (55.0%)]"
        " [cleanup zombies_cleaned=2 orphans_cleaned=0] [consistency violations=0 sampled=50] queue_depth=5"
    )
    health.update(tick(active=3, stuck=1), 1.5)
    assert "active=3 futures=4" in health.summary(1.5)
    health.update(tick(mine=1, overdue_ms=90_000, permits_most=0), 2.0)
    assert health.state == "DEGRADED"
    assert "health=DEGRADED reason=overdue" in health.summary(3.0)
    assert "[permits n/a]" in health.summary(3.0)


class Log:
    def __init__(self):
        self.records = []

    def __getattr__(self, level):
        return lambda event, **_facts: self.records.append((level, event))


@pytest.fixture
def log(monkeypatch):
    recorder = Log()
    monkeypatch.setattr(health_module, "log", recorder)
    return recorder


def test_summary_is_logged_once_per_period_as_warning_when_degraded_and_never_without_period(log):
    summaries = []
    for period_s, ticks in ((600, 5), (0, 5)):
        health = Health(period_s)
        for minute in range(ticks):
            log.records.clear()
            health.update(tick(mine=1, overdue_ms=90_000 if minute == 4 else 0, acquired=1), minute * 300.0)
            summaries += [(period_s, minute, level) for level, event in log.records if "Scheduler health" in event]
    assert summaries == [(600, 2, "info"), (600, 4, "warning")]


def test_set_overlap_sample_degrades_health_until_a_clean_sample():
    health = Health(600)
    health.set_overlap_sample(50, 2)
    health.update(tick(), 0.0)
    assert (health.state, health.reason) == ("DEGRADED", "set_overlap")
    assert "[consistency violations=2 sampled=50]" in health.summary(0.0)
    health.set_overlap_sample(50, 0)
    health.update(tick(), 1.0)
    assert health.state == "HEALTHY"


def test_degraded_warnings_are_at_least_ten_minutes_apart(log):
    health = Health(0)
    for minute in range(21):
        health.update(tick(mine=1, acquired=1, overdue_ms=90_000 if minute % 2 == 0 else 0), minute * 60.0)
    assert log.records == [("warning", "agents_degraded")] * 3


def test_watchdog_that_stays_triggered_is_logged_once_a_minute(log):
    health = Health(0)
    for second in range(100):
        health.update(tick(redis_closed=False), float(second))
    assert log.records == [("warning", "agents_watchdog")] * 2


def test_starvation_is_reported_after_three_cycles_without_permits_or_active_runs():
    health = Health(600)
    starved = {"mine": 1, "overdue_ms": 90_000, "permits_free": 0, "slots": 0}
    for second in range(3):
        assert "starvation" not in health.summary(float(second))
        health.update(tick(**starved), float(second))
    assert health.summary(3.5).endswith(" starvation=[degraded_for_ms=3500 ticks=3]")
    health.update(tick(**starved, active=1), 4.0)
    assert "starvation" not in health.summary(4.0)


@pytest.mark.parametrize(
    ("given", "stalled"),
    [
        ({}, True),
        ({"next_ms": 30_002}, True),
        ({"next_ms": 30_001}, False),
        ({"ready": 1}, False),
        ({"active": 1}, False),
        ({"recurring_ms": 0}, False),
    ],
)
def test_stall_is_detected_when_nothing_is_due_within_the_shortest_interval(given, stalled):
    given = {"recurring_ms": 30_000, **given}
    next_ms = given.pop("next_ms", 0)
    found = tick(**given)
    found.seen.next_ms = next_ms
    assert is_stalled(found) == stalled


def test_stall_is_counted_every_five_minutes():
    health, before = Health(0), STALLS._value.get()
    for minute in range(11):
        health.update(tick(recurring_ms=30_000), minute * 60.0)
    assert STALLS._value.get() - before == 3


def test_gauges_expose_clock_offset_and_unheld_permits():
    found = tick(mine=30, slots=10, active=4, permits_held=5)
    found.seen.offset_ms = -250
    Health(0).update(found, 0.0)
    shown = {name: gauge._value.get() for name, gauge in SCHEDULER_GAUGES.items()}
    assert shown["time_offset_ms"] == -250
    assert shown["permit_mismatch"] == 1
    assert shown["ready_to_capacity_ratio"] == 3


def test_redis_breaker_rules_are_derived_from_acquisition_settings():
    settings = CircuitBreakerSettings()
    assert acquisition_rules(settings).counting == WindowedFailures(5, 10_000)
    assert acquisition_rules(settings).open_ms == 30_000
    redis = redis_rules(settings)
    assert (redis.counting, redis.open_ms) == (WindowedFailures(3, 5_000), 21_000)
    assert redis.probing == ProbesByDuration(3_000)
    assert redis_rules(CircuitBreakerSettings(enabled=False)).counting.failures == 2**31 - 1


@pytest.mark.parametrize(
    ("batch_size", "multiplier", "slots", "batch", "attempts"),
    [
        (0, 0.0, 100, 100, 1),
        (0, 0.0, 1000, 200, 5),
        (10, 0.0, 100, 10, 10),
        (10, 1.5, 100, 10, 15),
        (10, 100.0, 100, 10, 100),
        (0, 3.0, 50, 50, 3),
        (-1, 0.0, 0, 1, 1),
    ],
)
def test_batch_size_and_attempts_are_derived_from_free_slots(batch_size, multiplier, slots, batch, attempts):
    settings = BatchOperationsSettings(batch_size=batch_size, chunk_attempt_multiplier=multiplier)
    assert batch_size_of(settings, slots) == batch
    assert attempts_of(settings, slots, batch) == attempts


def test_permit_released_twice_is_returned_once():
    free_after_release = []
    permits = PermitPool(2, lambda: free_after_release.append(permits.free))
    one, two = permits.take(5)
    assert permits.free == 0
    assert one.release()
    assert not one.release()
    assert two.release()
    assert free_after_release == [1, 2]


def test_permit_pool_without_limit_never_runs_out():
    permits = PermitPool(0, ignore)
    assert len(permits.take(500)) == 500
    assert permits.free == UNBOUNDED_FREE
