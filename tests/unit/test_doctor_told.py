"""What `rota doctor` makes of what it finds: well, worth a warning, or wrong; with a remedy wherever it is not well."""

import pytest

from rota.cli import doctor_told as told

CASES = [
    (told.clock("Redis", 0.3, 0.01), "ok"),
    (told.clock("Redis", -0.6, 0.01), "warn"),
    (told.clock("Redis", 0.6, 0.4), "ok"),  # the way there may have taken that long
    (told.clock("Redis", 90.0, 0.01), "fail"),
    (told.postgres("13.2", 130_002), "fail"),
    (told.postgres("14.0", 140_000), "ok"),
    (told.connections(10, 100), "ok"),
    (told.connections(80, 100), "warn"),
    (told.connections(98, 100), "fail"),
    (told.server(None, 0), "fail"),
    (told.server(None, 2), "warn"),
    (told.server("a", 2), "ok"),
    (told.outbox(0, None, 0), "ok"),
    (told.outbox(3, 11.0, 0), "warn"),
    (told.outbox(3, 121.0, 0), "fail"),
    (told.outbox(0, None, 1), "warn"),
    (told.jobs(0, 0, 0), "ok"),
    (told.jobs(1, 2, 0), "warn"),
    (told.jobs(0, 0, 1), "fail"),
    (told.workers(2, [], 0), "ok"),
    (told.workers(2, ["anna"], 0), "warn"),
    (told.workers(2, [], 1), "warn"),
    (told.workers(0, [], 0), "warn"),
    (told.disk("disk", "/data", 50, 100), "ok"),
    (told.disk("disk", "/data", 9, 100), "warn"),
    (told.disk("disk", "/data", 2, 100), "fail"),
]


@pytest.mark.parametrize(("check", "grade"), CASES)
def test_what_is_found_is_graded_and_what_is_not_well_has_a_remedy(check, grade):
    assert check.grade == grade, check
    assert bool(check.remedy) is (grade != "ok")
    assert check.sentence.endswith(".")
