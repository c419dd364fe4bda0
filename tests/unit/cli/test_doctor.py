"""Grades of `rota doctor` checks: ok, warn or fail, with a remedy unless ok."""

import pytest

from rota.cli.doctor import view as doctor_view

CASES = [
    (doctor_view.clock_check("Redis", 0.3, 0.01), "ok"),
    (doctor_view.clock_check("Redis", -0.6, 0.01), "warn"),
    (doctor_view.clock_check("Redis", 0.6, 0.4), "ok"),  # within the round-trip time
    (doctor_view.clock_check("Redis", 90.0, 0.01), "fail"),
    (doctor_view.postgres_check("13.2", 130_002), "fail"),
    (doctor_view.postgres_check("14.0", 140_000), "ok"),
    (doctor_view.connections_check(10, 100), "ok"),
    (doctor_view.connections_check(80, 100), "warn"),
    (doctor_view.connections_check(98, 100), "fail"),
    (doctor_view.servers_check(None, 0), "fail"),
    (doctor_view.servers_check(None, 2), "warn"),
    (doctor_view.servers_check("a", 2), "ok"),
    (doctor_view.outbox_check(0, None, 0), "ok"),
    (doctor_view.outbox_check(3, 11.0, 0), "warn"),
    (doctor_view.outbox_check(3, 121.0, 0), "fail"),
    (doctor_view.outbox_check(0, None, 1), "warn"),
    (doctor_view.jobs_check(0, 0, 0), "ok"),
    (doctor_view.jobs_check(1, 2, 0), "warn"),
    (doctor_view.jobs_check(0, 0, 1), "fail"),
    (doctor_view.workers_check(2, [], 0), "ok"),
    (doctor_view.workers_check(2, ["anna"], 0), "warn"),
    (doctor_view.workers_check(2, [], 1), "warn"),
    (doctor_view.workers_check(0, [], 0), "warn"),
    (doctor_view.disk_check("disk", "/data", 50, 100), "ok"),
    (doctor_view.disk_check("disk", "/data", 9, 100), "warn"),
    (doctor_view.disk_check("disk", "/data", 2, 100), "fail"),
]


@pytest.mark.parametrize(("check", "grade"), CASES)
def test_doctor_check_has_the_expected_grade_and_a_remedy_unless_ok(check, grade):
    assert check.grade == grade, check
    assert bool(check.remedy) is (grade != "ok")
    assert check.sentence.endswith(".")
