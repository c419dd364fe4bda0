"""The order of dispatch in virtual time: the real order, rounds and placement, on random farms and histories."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.property.dispatch.simulation import SimulatedFarm
from tests.support.harness.effort import effort
from tests.support.placement import id_of

DAY_S = 86_400.0
ROUND_S = (0.003, 0.004)
"""A claim, and a booking with the messages to workers, as on a machine with other work."""
JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.floats(0.0, DAY_S / 2),
            "show": st.sampled_from(["film", "short"]),
            "queue": st.sampled_from(["a", "b", "c"]),
            "priority": st.integers(1, 9),
            "frames": st.integers(1, 40),
            "runs_s": st.sampled_from([30.0, 700.0, 4000.0]),
        }
    ),
    min_size=2,
    max_size=10,
)


@settings(max_examples=effort(15, 10_000), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(JOBS, st.integers(1, 3), st.integers(1, 6))
def test_no_frame_starts_before_one_of_higher_rank_of_its_show(jobs, workers, slots):
    farm = SimulatedFarm({"film": 4, "short": 2}, workers=workers, slots=slots, reads_s=300.0, beats_s=600.0)
    for job in jobs:
        farm.submit_at(job.pop("at_s"), job.pop("show"), **job)
    farm.run_until(DAY_S)
    assert farm.inversions == []
    ran_s = sum(job["frames"] * job["runs_s"] for job in jobs)
    if ran_s < workers * slots * DAY_S / 4:
        assert len(farm.starts) == sum(job["frames"] for job in jobs)


@pytest.mark.parametrize("elsewhere", [{}, {"short": 1200}])
@pytest.mark.parametrize("runs_s", [0.2, 3.0, 60.0])
def test_busy_shows_use_the_farm_in_proportion_to_their_sizes(runs_s, elsewhere):
    farm = SimulatedFarm({"film": 96, "short": 32}, workers=4, slots=32, elsewhere=elsewhere)
    span_s = max(60.0, 40 * runs_s)
    for show in ("film", "short"):
        farm.submit(show, frames=int(2 * 128 * span_s / runs_s), runs_s=runs_s)
    farm.run_until(span_s / 4)
    farm.reset_shares()
    farm.run_until(span_s)
    assert farm.shares()["film"] == pytest.approx(0.75, abs=0.02)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=20))
def test_free_slots_are_divided_by_size_however_many_shows_wait(sizes):
    """As many slots as the shows have together become free at once, for frames that run for long."""
    farm = SimulatedFarm({str(n): size for n, size in enumerate(sizes)}, slots=sum(sizes), round_s=ROUND_S)
    for n in range(len(sizes)):
        farm.submit(str(n), frames=20, runs_s=3600.0)
    farm.run_until(10.0)
    assert Counter(start.show for start in farm.starts) == {str(n): size for n, size in enumerate(sizes)}


@pytest.mark.parametrize(("film_s", "short_s"), [(0.1, 10.0), (10.0, 0.1), (1.0, 60.0)])
def test_frames_of_different_length_do_not_change_the_shares(film_s, short_s):
    farm = SimulatedFarm({"film": 96, "short": 32}, workers=4, slots=32)
    farm.submit("film", frames=int(256 * 300 / film_s), runs_s=film_s)
    farm.submit("short", frames=int(256 * 300 / short_s), runs_s=short_s)
    farm.run_until(70.0)
    farm.reset_shares()
    farm.run_until(300.0)
    assert farm.shares()["film"] == pytest.approx(0.75, abs=0.02)


def test_show_that_comes_later_has_its_share_as_soon_as_frames_end():
    farm = SimulatedFarm({"film": 50, "short": 50}, slots=100)
    farm.submit("film", frames=100_000, runs_s=10.0)
    farm.submit_at(100.0, "short", frames=100_000, runs_s=10.0)
    farm.run_until(115.0)
    farm.reset_shares()
    farm.run_until(300.0)
    assert farm.shares()["short"] == pytest.approx(0.5, abs=0.02)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 9), st.sampled_from([3.0, 60.0]))
def test_folder_below_its_minimum_is_served_first_and_above_it_by_priority(least, priority, other, runs_s):
    farm = SimulatedFarm({"film": 20}, slots=20, minimums={"small": least})
    farm.submit("film", folder="large", priority=other, frames=20_000, runs_s=runs_s)
    farm.submit_at(100.0, "film", folder="small", priority=priority, frames=20_000, runs_s=runs_s)
    farm.run_until(100.0 + 2 * runs_s)
    served = farm.used_by_folder[farm._shows["film"], id_of("small")] // 100
    # Waiting counts for less than one level, so priorities that differ decide.
    expected = 20 if priority > other else least if priority < other else None
    assert served == expected if expected is not None else served >= least


@pytest.mark.parametrize("shows", [2, 10, 50])
def test_rounds_of_many_shows_are_large_where_frames_are_short(shows):
    def rounds(names):
        """For 40,000 frames."""
        farm = SimulatedFarm(dict.fromkeys(names, 4), slots=500)
        for name in names:
            farm.submit(name, frames=40_000 // len(names), runs_s=0.1)
        farm.run_until(15.0)
        assert len(farm.starts) == 40_000
        return farm.rounds

    assert rounds([str(n) for n in range(shows)]) < 40_000 / 40


def test_no_show_waits_for_long_where_many_are_busy():
    farm = SimulatedFarm({str(n): 4 for n in range(50)}, slots=500)
    for n in range(50):
        farm.submit(str(n), frames=4_000, runs_s=0.1)
    farm.run_until(20.0)
    times = {str(n): [start.at_s for start in farm.starts if start.show == str(n)] for n in range(50)}
    longest = max(later - earlier for each in times.values() for earlier, later in pairwise(each))
    assert longest < 3.0


@settings(deadline=None)
@given(st.integers(1, 64))
def test_frames_on_equal_idle_workers_differ_by_one_at_most(frames):
    farm = SimulatedFarm({"film": 4}, workers=4, slots=32)
    farm.run_until(1.0)
    farm.submit("film", frames=frames, runs_s=60.0)
    by_worker = Counter(start.worker for start in farm.starts)
    assert sum(by_worker.values()) == frames
    assert max(by_worker.values()) - (min(by_worker.values()) if len(by_worker) == 4 else 0) <= 1


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(0, 8))
def test_frames_of_every_class_start_at_once_where_there_is_room(classes, frames):
    farm = SimulatedFarm({"film": 4}, workers=4, slots=128)
    farm.run_until(1.0)
    for number in range(classes):
        farm.submit("film", frames=1 + frames, runs_s=60.0, memory_mb=0, cores=100 + number % 7, queue=str(number))
    assert {start.at_s for start in farm.starts} == {1.0}
    assert len(farm.starts) == min(classes * (1 + frames), 512)


@pytest.mark.parametrize("classes", [2, 20])
@pytest.mark.parametrize("seed", range(effort(2, 40)))
def test_frame_of_another_class_starts_within_20_ms_while_rounds_run(seed, classes):
    """A round may reserve all that is free, until it knows how many frames wait; there is room all the time."""
    chance = Random(seed)
    farm = SimulatedFarm({"film": 4}, workers=4, slots=256, round_s=ROUND_S)
    for _ in range(600):
        frames, runs_s = chance.choice([(1, 2.0), (8, 0.5), (60, 0.05)])
        farm.submit_at(chance.uniform(1.0, 11.0), "film", queue="busy", frames=frames, runs_s=runs_s)
    for number in range(400):
        other = {"queue": f"{number % (classes - 1)}", "cores": 101 + number % (classes - 1)}
        farm.submit_at(chance.uniform(1.0, 11.0), "film", priority=3, **other)
    farm.run_until(15.0)
    waited_s = sorted(start.waited_s for start in farm.starts if start.priority == 3)
    assert len(waited_s) == 400
    assert waited_s[int(0.99 * len(waited_s))] <= 0.02
    assert farm.rounds > 500, "rounds of the other class run all the time"


def test_thousand_small_queues_are_served_in_few_rounds():
    farm = SimulatedFarm({"film": 4}, slots=2000, cores=2000)
    farm.run_until(1.0)
    held = farm.registry.is_full
    farm.registry.is_full = lambda _pools: True
    for number in range(1000):
        farm.submit("film", queue=str(number))
    farm.registry.is_full = held
    for pending in farm.queues.entries.values():
        pending.counted = True
    before = farm.rounds
    farm._take_turns()
    assert len(farm.starts) == 1000
    assert farm.rounds - before <= 20
