"""Peers of a benchmark: shapes they are tried in, what counts as a finished lap, and peers that are not installed."""

import subprocess
import sys

import pytest

from bench import peers
from bench.contender_process import Stopped
from bench.contenders.marks import Marks
from bench.peer_laps import Load, PeerLap, Shape, _Lap, best_shape, shapes, warm_jobs


class FakeContender:
    """Marks its jobs when its workers start; `repeats` and `left` are what goes wrong."""

    def __init__(self, marks, *, left=0, repeats=0, ended=0):
        self.asked = []
        self._marks = marks
        self._left = left
        self._repeats = repeats
        self._ended = ended
        self._filled = 0

    async def ask(self, do, url="", n=0, **more):
        self.asked.append(do)
        if do == "fill":
            self._filled = more["first"] + n
        if do in ("fill", "start") and "start" in self.asked and not self._ended:
            for number in range(self._filled):
                if number >= self._marks.first_unmarked():
                    self._marks.mark(number)
            for number in range(self._repeats):
                self._marks.mark(number)
        return {"fill": 0.5, "left": self._left, "ended": self._ended}.get(do, 0)

    def stopped(self, what):
        return Stopped(what)


class FakeServer:
    async def checkpoint(self):
        pass


@pytest.fixture
def lap(tmp_path):
    def make(n=10, warm=0, **trouble):
        marks = Marks.make(tmp_path / "marks", warm + n)
        contender = FakeContender(marks, **trouble)
        return contender, _Lap(contender, "url", Load("async", n), Shape(1, 2), tmp_path / "marks", marks)

    return make


@pytest.mark.parametrize(
    ("peer", "at_once", "divisions"),
    [
        ("celery", 8, [(8, 1)]),
        ("dramatiq", 2, [(1, 2), (2, 1)]),
        ("dramatiq", 8, [(1, 8), (2, 4), (4, 2)]),
        ("pgqueuer", 8, [(1, 8), (2, 4)]),
        ("awa", 1, [(1, 1)]),
    ],
)
def test_shapes_divide_the_concurrency_without_changing_it(peer, at_once, divisions):
    found = shapes(peer, at_once)
    assert [(shape.processes, shape.each) for shape in found] == divisions
    assert {shape.at_once for shape in found} == {at_once}


async def test_best_shape_is_the_fastest_in_either_order():
    rates = {Shape(1, 8): 100, Shape(2, 4): 300, Shape(2, 4, filled_first=True): 400}

    async def measure(shape):
        return PeerLap(rates[shape], 0.1, 1.0)

    assert await best_shape(list(rates)[:2], measure, both_orders=True) == (Shape(2, 4, filled_first=True), 400.0)
    assert await best_shape(list(rates)[:2], measure, both_orders=False) == (Shape(2, 4), 300.0)


@pytest.mark.parametrize(
    ("shape", "jobs"), [(Shape(1, 2), 100), (Shape(2, 16), 256), (Shape(1, 1024), 1000), (Shape(2, 16, True), 0)]
)
def test_warm_up_grows_with_the_concurrency_within_bounds(shape, jobs):
    assert warm_jobs(shape) == jobs


async def test_lap_filled_first_counts_enqueueing_and_work(lap):
    contender, running = lap()
    found = await running.filled_first(FakeServer())
    assert contender.asked == ["fill", "start", "left", "stop"]
    assert found.drain_s is not None
    assert found.seconds == pytest.approx(0.5 + found.drain_s)
    assert found.enqueue_per_s == 20


async def test_overlapped_lap_leaves_its_warm_up_out(lap):
    contender, running = lap(n=10, warm=5)
    found = await running.overlapped(5)
    assert contender.asked == ["start", "fill", "fill", "left", "stop"]
    assert (found.n, found.drain_s) == (10, None)
    assert found.seconds == pytest.approx(0.5, abs=0.4)


@pytest.mark.parametrize(
    ("trouble", "what"),
    [({"repeats": 3}, "ran 3 jobs again"), ({"ended": 1}, "lost a worker"), ({"left": 2}, "2 jobs")],
)
async def test_lap_of_a_peer_that_does_not_complete_its_jobs_fails(lap, monkeypatch, trouble, what):
    monkeypatch.setattr("bench.peer_laps.SETTLE_TIMEOUT_S", 0.0)
    _, running = lap(**trouble)
    with pytest.raises(Stopped, match=what):
        await running.filled_first(FakeServer())


@pytest.fixture
def no_peers(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTA_BENCH_PEERS", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "lacking"), [("defaults", "dramatiq"), ("agents", "apscheduler"), ("queue", "awa-pg")]
)
def test_benchmark_without_its_peers_is_refused_at_once(no_peers, name, lacking):
    done = subprocess.run([sys.executable, "-m", "bench", name], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert lacking in done.stderr
    assert "python -m bench setup" in done.stderr


def test_missing_peers_are_none_for_a_benchmark_that_compares_with_none(no_peers):
    assert peers.missing(()) == ""
