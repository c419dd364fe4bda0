"""`rota up` tells that frames wait for cores while the machine does little."""

from uuid import uuid4

import pytest

from rota.cli.local.idle_notice import IDLE_POLLS, REPEAT_AFTER_S, IdleNotice
from rota.placement.scoring import WorkerLoad
from rota.placement.workers import WorkerInfo
from rota.testing import MovableClock


class Allocations:
    def __init__(self, cores):
        self.cores = cores


class Up:
    """A worker of two cores, what is booked and waits, and what `rota up` has said."""

    def __init__(self):
        self.clock = MovableClock()
        self.worker = WorkerInfo(uuid4(), "anna", "local", 0.0)
        self.worker.cores = 200
        self.set(booked=200, cpu=4.0)
        self.waiting = {"pool_overloaded": 3}
        self.said = []
        self.notice = IdleNotice(lambda: self.worker, lambda: self.waiting, self.said.append, self.clock)

    def set(self, booked, cpu):
        self.worker.booked = Allocations(booked)
        self.worker.load = WorkerLoad(cpu=cpu)

    def poll(self, times=IDLE_POLLS):
        for _ in range(times):
            self.notice.poll()
        return self.said


@pytest.fixture
def up():
    return Up()


def test_waiting_frames_on_a_booked_but_idle_machine_are_told_once_an_hour(up):
    assert up.poll(IDLE_POLLS - 1) == []
    [told] = up.poll(10)
    assert "all 2 cores are booked" in told
    assert "4 % busy" in told
    up.clock.advance(REPEAT_AFTER_S)
    assert len(up.poll()) == 2


@pytest.mark.parametrize(
    "state", [{"booked": 200, "cpu": 80.0}, {"booked": 100, "cpu": 4.0}], ids=["machine is busy", "cores are free"]
)
def test_machine_that_is_busy_or_has_free_cores_is_not_told(up, state):
    up.set(**state)
    assert up.poll(10) == []


@pytest.mark.parametrize("waiting", [{}, {"quota_folder": 3}, {"no_workers": 1}], ids=str)
def test_booked_machine_without_frames_that_wait_for_it_is_not_told(up, waiting):
    up.waiting = waiting
    assert up.poll(10) == []


def test_idle_moment_between_two_frames_is_not_told(up):
    for _ in range(5):
        up.set(booked=200, cpu=4.0)
        up.poll(IDLE_POLLS - 1)
        up.set(booked=200, cpu=90.0)
        up.poll(1)
    assert up.said == []
