"""`python -m bench shows`: the farm whose turns are timed, and what is made of the samples."""

import pytest

from bench.report import Report
from bench.shows import sustained, turns
from bench.shows.in_memory import Turn
from bench.shows.sustained import Load, Sample, progress
from bench.shows.turns import CLASSES, PRIORITIES, SHOWS, SLOTS, WORKERS, FullFarm

SAMPLES = [
    Sample(at_s, ended, cpu_s=5.0 + at_s)
    for at_s, ended in [(0.0, 100), (1.1, 210), (2.0, 300), (3.0, 380), (4.0, 460)]
]
"""100 frames a second at first, then 80, with one core."""


async def test_full_farm_while_frames_end_stays_full_and_all_queues_wait():
    farm = FullFarm(folders=1)
    taken = await farm.take_turns(30)
    assert len(taken) == 30
    assert all(turn.wall_ms > 0 for turn in taken)
    assert farm.queues == farm.pending == SHOWS * CLASSES * len(PRIORITIES)
    assert 0.95 < farm.cores_used / (100 * WORKERS * SLOTS) <= 1.0


async def test_farm_that_is_a_day_old_is_still_busy():
    farm = FullFarm(folders=1)
    before_s = farm._clock.now_s
    assert len(await farm.take_turns(5, after_s=turns.DAY_S)) == 5
    assert farm._clock.now_s >= before_s + turns.DAY_S
    # Beside load a turn is cut before it has filled what ended.
    assert 0.8 < farm.cores_used / (100 * WORKERS * SLOTS) <= 1.0


@pytest.mark.parametrize(("longest_ms", "passes"), [(9.9, True), (10.1, False)])
def test_turn_figure_is_the_longest_turn(longest_ms, passes):
    report = Report(turns.figures([Turn(1.0, 1.0)] * 200 + [Turn(longest_ms, 1.0)], queues=5000))
    longest, p99 = report.figures[:2]
    assert (longest.name, longest.value, p99.value) == ("turn_ms_5000_queues", longest_ms, 1.0)
    assert report.within_bars is passes


@pytest.mark.parametrize(("from_s", "to_s", "rate"), [(0.0, 1.0, 100.0), (1.0, 2.0, 100.0), (2.0, 9.0, 80.0)])
def test_progress_is_counted_between_the_samples_of_its_period(from_s, to_s, rate):
    assert progress(SAMPLES, from_s, to_s) == pytest.approx((rate, 1e6 / rate))


def test_sustained_figure_below_its_bar_fails():
    report = Report(sustained.figures(SAMPLES, Load(seconds=4.0, first_s=2.0, last_s=2.0)))
    assert [figure.value for figure in report.figures[:2]] == pytest.approx([0.8, 1.25])
    assert not report.within_bars
