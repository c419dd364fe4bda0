"""How large a round is, and which rounds wait for those that are under way."""

from uuid import UUID

import pytest

from rota.engine.dispatch.pending_queues import PendingQueue, PendingQueues, QueueKey
from rota.engine.dispatch.rounds import RoundPlanner
from rota.placement import requirements_of
from tests.support.placement import Fleet, id_of, pool, routes

SLOTS = 100


class Rounds:
    """A planner for workers with 100 slots in each of two pools."""

    def __init__(self):
        self.fleet = Fleet(routes({"*": ("farm",), "other": ("second",)}, pool("farm"), pool("second")))
        self.queues = PendingQueues(self.fleet.clock, self.fleet.registry.usable_pools)
        self.planner = RoundPlanner(self.queues, self.fleet.registry)
        for name, where in (("w", "farm"), ("v", "second")):
            self.fleet.beat(name, pool=where, slots=SLOTS, cores=100 * SLOTS)
        self.under_way = []

    def queue(self, show, frames, topic="t", priority=5, *, counted=True, name="q"):
        key = QueueKey(f"{show}/{topic}/{name}", id_of(show), UUID(int=1), UUID(int=2), requirements_of(topic))
        return self.queues.add(PendingQueue(key, priority, [1], waiting=frames, counted=counted))

    def turn(self):
        """Plan all rounds that may begin now, and claim their frames; returns the frames of each."""
        order, planned = self.queues.order(), []
        for pending in order:
            found = self.planner.plan_round(pending, order, self.under_way)
            if found is not None:
                planned.append(found)
                self.under_way.append(found)
        for part in (part for each in planned for part in each.parts):
            part.pending.busy = False
            part.pending.waiting -= part.plan.planned
        return [each.frames for each in planned]

    def end(self, *, released):
        """The first round under way ends, and workers release so many frames."""
        for part in self.under_way.pop(0).parts:
            self.queues.shrink_share(part.pending, part.share, 0)
            self.fleet.registry.shrink(part.reservation, part.plan.planned - released)


@pytest.fixture
def rounds():
    return Rounds()


def test_round_takes_no_more_room_than_frames_wait(rounds):
    rounds.queue("film", frames=30)
    assert rounds.turn() == [30]
    assert rounds.fleet.registry.fitting_frames(requirements_of("t")) == SLOTS - 30


def test_round_that_would_be_small_waits_for_a_large_one_that_is_under_way(rounds):
    rounds.queue("film", frames=90)
    rounds.turn()
    rounds.queue("short", frames=500)
    assert rounds.turn() == []
    rounds.end(released=40)
    assert rounds.turn() == [50]


def test_room_of_a_round_that_waits_goes_to_no_queue_behind_it(rounds):
    rounds.queue("film", frames=90)
    rounds.turn()
    rounds.queue("short", frames=500, priority=8)
    rounds.queue("film", frames=1, topic="u", priority=1)
    farm = id_of("pool farm")
    rounds.queues.set_shares({(id_of("film"), farm): (100, 9000), (id_of("short"), farm): (100, 0)})
    assert rounds.turn() == []


def test_round_does_not_wait_for_rounds_that_are_smaller(rounds):
    rounds.queue("film", frames=40)
    rounds.turn()
    rounds.queue("short", frames=500)
    assert rounds.turn() == [60]


def test_round_of_all_that_waits_does_not_wait_for_others(rounds):
    rounds.queue("film", frames=90)
    rounds.turn()
    rounds.queue("short", frames=3)
    assert rounds.turn() == [3]


def test_round_does_not_wait_for_rounds_in_other_pools(rounds):
    rounds.queue("film", frames=90, topic="other")
    rounds.turn()
    rounds.queue("short", frames=500)
    assert rounds.turn() == [SLOTS]


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


def test_queue_that_came_later_does_not_divide_what_an_older_one_may_need(rounds):
    rounds.queue("film", frames=1, name="old", counted=False).since_s = rounds.fleet.clock.now_s - 10.0
    rounds.queue("film", frames=1, name="new").since_s = rounds.fleet.clock.now_s
    assert plan_first(rounds) == {"old": 100}
