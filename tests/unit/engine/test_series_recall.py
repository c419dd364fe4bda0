"""Which series are handed back, because a slot is idle or a higher priority waits."""

from uuid import UUID

import pytest

from rota.engine.dispatch.pending_queues import PendingQueue, PendingQueues, QueueKey
from rota.engine.dispatch.rounds import RoundPlanner
from rota.engine.dispatch.series_recall import FORGET_AFTER_S, RECALL_AFTER_S, SeriesRecall
from rota.placement import requirements_of
from tests.support.placement import Fleet, id_of, pool, routes

NEED = requirements_of("t", cores=100)


class Farm:
    """Workers `w` and `v` with one slot each."""

    def __init__(self):
        self.fleet = Fleet(routes({"*": ("farm",), "other": ("moor",)}, pool("farm"), pool("moor")))
        self.queues = PendingQueues(self.fleet.clock, self.fleet.registry.usable_pools)
        self.planner = RoundPlanner(self.queues, self.fleet.registry, lambda: True)
        self.recall = SeriesRecall(self.fleet.registry, self.fleet.clock)
        for name in ("w", "v"):
            self.fleet.beat(name, slots=1, cores=100)
        self.fleet.beat("m", slots=1, cores=100, pool="moor")

    def queue(self, frames, *, show="film", topic="t", priority=5, counted=True):
        key = QueueKey(f"{show}/{topic}", id_of(show), UUID(int=1), UUID(int=2), requirements_of(topic, cores=100))
        return self.queues.add(PendingQueue(key, priority, [1], waiting=frames, counted=counted))

    def run(self, pending, worker, first, n, *, capped=False):
        self.fleet.registry.record_allocations(id_of(worker), [], NEED.need, series=[[(first, n)]])
        self.recall.add(pending, id_of(worker), [(first, n)], capped=capped)

    def refuse(self, pending):
        order = self.queues.order()
        assert pending in list(order)
        assert self.planner.plan_round(pending, self.queues.order()) is None
        self.recall.mark_refused(pending)

    def wait(self, seconds=RECALL_AFTER_S):
        self.fleet.clock.now_s += seconds + 0.001

    def due(self):
        return {
            self.fleet.registry.workers[worker].name: tokens
            for worker, tokens in self.recall.take_due(self.planner.room)[0].items()
        }

    def next_s(self):
        return self.recall.take_due(self.planner.room)[1]


@pytest.fixture
def farm():
    return Farm()


def test_series_beside_an_idle_slot_is_recalled_once(farm):
    farm.run(farm.queue(0), "w", 100, 5)
    assert farm.next_s() == pytest.approx(RECALL_AFTER_S)
    farm.wait()
    assert farm.due() == {"w": [(100, 5)]}
    farm.wait()
    assert farm.due() == {}


def test_series_is_not_recalled_while_its_queue_has_other_frames_for_the_slot(farm):
    pending = farm.queue(3)
    farm.run(pending, "w", 100, 5)
    farm.wait()
    assert farm.due() == {}
    pending.waiting, pending.counted = 0, False
    assert farm.due() == {}
    pending.counted = True
    assert farm.due() == {"w": [(100, 5)]}


def test_series_is_not_recalled_when_no_slot_is_idle(farm):
    pending = farm.queue(0)
    farm.run(pending, "w", 100, 5)
    farm.run(pending, "v", 200, 5)
    farm.wait()
    assert farm.due() == {}
    farm.fleet.registry.release_allocations(id_of("v"), [(200, 5)])
    assert farm.due() == {"w": [(100, 5)]}


def test_series_whose_last_frame_runs_is_not_recalled(farm):
    farm.run(farm.queue(0), "w", 100, 5)
    farm.fleet.registry.release_allocations(id_of("w"), [(100, 4)])
    farm.wait()
    assert farm.due() == {}


def test_only_as_many_series_are_recalled_as_idle_slots_can_run(farm):
    pending = farm.queue(0)
    for at, worker in enumerate(("w", "x", "y")):
        farm.fleet.beat(worker, slots=1, cores=100)
        farm.run(pending, worker, 100 * (at + 1), 2)
    farm.wait()
    assert farm.due() == {"w": [(100, 2)]}


def test_series_that_its_worker_hands_back_by_itself_is_forgotten(farm):
    farm.run(farm.queue(0), "w", 100, 5)
    farm.wait(FORGET_AFTER_S)
    assert farm.due() == {}


def test_series_of_a_lower_priority_is_recalled_for_a_higher_one_that_finds_no_slot(farm):
    low = farm.queue(10)
    farm.run(low, "w", 100, 5)
    farm.run(low, "v", 200, 5)
    high = farm.queue(1, priority=8)
    farm.wait()
    farm.refuse(high)
    assert farm.due() == {"w": [(100, 5)]}
    assert farm.due() == {}, "it has one already"
    farm.recall.mark_refused(high)
    assert farm.due() == {"v": [(200, 5)]}


def test_each_frame_of_a_higher_priority_gets_a_slot(farm):
    low = farm.queue(10)
    farm.run(low, "w", 100, 5)
    farm.run(low, "v", 200, 5)
    high = farm.queue(3, priority=8)
    farm.wait()
    farm.refuse(high)
    assert farm.due() == {"w": [(100, 5)], "v": [(200, 5)]}


@pytest.mark.parametrize("other", [{"priority": 5}, {"priority": 3}, {"show": "ad", "priority": 9}])
def test_series_is_not_recalled_for_an_equal_priority_or_another_show(farm, other):
    low = farm.queue(10)
    farm.run(low, "w", 100, 5)
    farm.run(low, "v", 200, 5)
    high = farm.queue(1, **{"topic": "u", **other})
    farm.wait()
    farm.refuse(high)
    assert farm.due() == {}


def test_series_in_a_pool_that_the_higher_priority_cannot_use_is_not_recalled(farm):
    low = farm.queue(10)
    farm.run(low, "w", 100, 5)
    farm.run(low, "v", 200, 5)
    farm.fleet.registry.record_allocations(id_of("m"), [(300, 1)], NEED.need)
    high = farm.queue(1, topic="other", priority=8)
    farm.wait()
    farm.refuse(high)
    assert farm.due() == {}


def test_refused_queue_that_was_served_meanwhile_recalls_nothing(farm):
    low = farm.queue(10)
    farm.run(low, "w", 100, 5)
    farm.run(low, "v", 200, 5)
    high = farm.queue(1, priority=8)
    farm.refuse(high)
    high.waiting = 0
    farm.wait()
    assert farm.due() == {}


def test_series_of_a_job_at_its_cap_is_recalled_for_a_priority_only(farm):
    """Its frames would be refused on the idle slot."""
    low = farm.queue(0)
    farm.run(low, "w", 100, 5, capped=True)
    farm.wait()
    assert farm.due() == {}
    farm.run(low, "v", 200, 5)
    farm.refuse(farm.queue(1, priority=8))
    assert farm.due() == {"w": [(100, 5)]}


def test_turn_does_not_look_at_series_that_have_ended(farm):
    """Not even while no slot is idle, when nothing is recalled."""
    for number in range(1000):
        farm.recall.add(farm.queue(0, topic=f"t{number}"), id_of("w"), [(1000 * number, 4)])
    farm.wait(FORGET_AFTER_S)
    looked = []
    assert farm.recall.take_due(looked.append) == ({}, None)
    assert looked == []
