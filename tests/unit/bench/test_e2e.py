"""`python -m bench e2e`: what is made of the laps, and the file of moments that bodies write."""

import pytest

from bench.contenders.marks import Marks
from bench.e2e import COMPONENTS, Own, lonely, pickup
from bench.e2e.deployment import Lap
from bench.report import Report


def own(*, cpu_us, wal_bytes):
    """One lap of a thousand frames and one of a thousand jobs that cost as much."""
    lap = Lap(1000, 1.0, dict.fromkeys(COMPONENTS, 0.0) | {"postgres": cpu_us / 1000})
    return Own([lap], [lap], [0.001], [0.001], [wal_bytes], [wal_bytes])


@pytest.mark.parametrize(
    ("cpu_us", "wal_bytes", "missed"),
    [
        (29.0, 1300.0, set()),
        (31.0, 1300.0, {"cpu_us_per_frame"}),
        (111.0, 1301.0, {"cpu_us_per_frame", "cpu_us_per_job", "wal_bytes_per_job"}),
    ],
)
def test_cpu_and_wal_per_job_have_bars(cpu_us, wal_bytes, missed):
    figures = list(own(cpu_us=cpu_us, wal_bytes=wal_bytes).figures())
    assert {figure.name for figure in figures if not figure.within_bar} == missed


@pytest.mark.parametrize(("cpu_ms", "passes"), [(4.9, True), (5.1, False)])
def test_lonely_job_has_a_bar(cpu_ms, passes):
    assert Report(list(lonely._figures([cpu_ms], [0.02]))).within_bars is passes


def test_pickup_of_four_and_ten_milliseconds_is_the_limit():
    found = pickup.Pickups([[4.0] * 98 + [10.0, 10.0]], [[5.0]], [1.0])
    bars = {figure.name: (figure.bar, figure.within_bar) for figure in found.figures() if figure.bar}
    assert bars == {"pickup_p50_ms": (4.0, True), "pickup_p99_ms": (10.0, True)}


def test_marks_tell_the_first_entry_that_has_not_run_and_count_repeats(tmp_path):
    marks = Marks.make(tmp_path / "marks", 3)
    other = Marks(tmp_path / "marks")
    other.mark(0)
    other.mark(2)
    assert (marks.first_unmarked(), marks.repeated) == (1, 0)
    other.mark(1)
    other.mark(2)
    assert (marks.first_unmarked(), marks.repeated) == (3, 1)
    assert all(marks.read())
    assert len(marks.read()) == 3
