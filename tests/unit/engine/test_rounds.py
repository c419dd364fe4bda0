"""How large a round is, and which queues it serves."""

from uuid import UUID

import pytest

from rota.engine.dispatch.pending_queues import PendingQueue, PendingQueues, QueueKey
from rota.engine.dispatch.rounds import RoundPlanner
from rota.placement import requirements_of
from tests.support.placement import Fleet, id_of, pool, routes

SLOTS = 100


class Rounds:
    """A planner for a worker with 100 slots."""

    def __init__(self):
        self.fleet = Fleet(routes({"*": ("farm",)}, pool("farm")))
        self.queues = PendingQueues(self.fleet.clock, self.fleet.registry.usable_pools)
        self.planner = RoundPlanner(self.queues, self.fleet.registry, lambda: True)
        self.fleet.beat(slots=SLOTS, cores=100 * SLOTS)

    def queue(self, show, frames, topic="t", priority=5, *, counted=True, name="q", cores=100):
        needs = requirements_of(topic, cores=cores)
        key = QueueKey(f"{show}/{topic}/{name}", id_of(show), UUID(int=1), UUID(int=2), needs)
        return self.queues.add(PendingQueue(key, priority, [1], waiting=frames, counted=counted))

    def turn(self):
        """Plan all rounds that may begin now; returns the frames of each."""
        order, planned = self.queues.order(), []
        for pending in order:
            found = self.planner.plan_round(pending, order)
            if found is not None:
                planned.append(found)
        return [sum(part.plan.planned for part in each.parts) for each in planned]


@pytest.fixture
def rounds():
    return Rounds()


def test_round_takes_no_more_room_than_frames_wait(rounds):
    rounds.queue("film", frames=30)
    assert rounds.turn() == [30]
    assert rounds.fleet.registry.fitting_frames(requirements_of("t")) == SLOTS - 30


def plan_first(rounds):
    """The frames of each queue in the first round."""
    order = rounds.queues.order()
    found = rounds.planner.plan_round(next(iter(order)), order)
    return {part.pending.key.queue.rsplit("/", 1)[1]: part.plan.planned for part in found.parts}


def test_queues_that_are_not_counted_yet_divide_a_round(rounds):
    for number in range(10):
        rounds.queue("film", frames=1, name=str(number), counted=False)
    assert plan_first(rounds) == {str(number): 10 for number in range(10)}


def test_queue_that_is_not_counted_leaves_nothing_to_lower_ranks(rounds):
    rounds.queue("film", frames=5, name="counted", priority=8)
    rounds.queue("film", frames=1, name="new", counted=False)
    rounds.queue("film", frames=1, name="lower", priority=4)
    assert plan_first(rounds) == {"counted": 5, "new": 95}


def test_room_that_cannot_be_divided_evenly_goes_to_no_lower_rank(rounds):
    for number in range(64):
        rounds.queue("film", frames=1, name=str(number), counted=False, priority=8)
    rounds.queue("film", frames=36, name="lower", priority=4)
    assert rounds.turn() == [SLOTS]


def test_queue_that_cannot_use_its_portion_leaves_it_to_those_that_came_with_it(rounds):
    rounds.queue("film", frames=1, name="free", counted=False)
    rounds.queue("film", frames=1, name="refused", counted=False).budget = 3
    assert plan_first(rounds) == {"free": SLOTS}


@pytest.mark.parametrize(("first", "second"), [(100, 200), (200, 100)])
def test_queues_whose_frames_need_different_amounts_leave_nothing_to_lower_ranks(rounds, first, second):
    rounds.queue("film", frames=1, name="first", counted=False, cores=first)
    rounds.queue("film", frames=1, name="second", counted=False, cores=second)
    rounds.queue("film", frames=50, name="lower", priority=4)
    found = plan_first(rounds)
    assert found["first"] * first + found.get("second", 0) * second == 100 * SLOTS


def test_queue_that_came_later_does_not_divide_what_an_older_one_may_need(rounds):
    rounds.queue("film", frames=1, name="old", counted=False).since_s = rounds.fleet.clock.now_s - 10.0
    rounds.queue("film", frames=1, name="new").since_s = rounds.fleet.clock.now_s
    assert plan_first(rounds) == {"old": 100}
