"""What a refusal means for the next round of its queue."""

from types import SimpleNamespace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.engine.dispatch.minimums import Minimums
from rota.engine.dispatch.pending_queues import (
    BACKOFF_S,
    ORDER_MAX_AGE_S,
    UNSERVED_BACKOFF_S,
    PendingPosition,
    PendingQueue,
    PendingQueues,
    QueueKey,
)
from rota.engine.dispatch.pending_reader import PendingReader
from rota.model.quota import Ask, Level, Refusal, Resource, Usage
from rota.model.reasons import Reason
from rota.placement import PlacementRequirements
from rota.placement.requirements import Resources
from rota.queue.queue import ClaimableLane

SHOW, OTHER, POOL = UUID(int=1), UUID(int=2), UUID(int=3)
FULL = Refusal(Level.SUBSCRIPTION, Resource.CORES, 400, 400, 100)
CLASS = PlacementRequirements(topic="default", need=Resources(cores=100))


class StoppedClock:
    now_s = 1000.0

    def monotonic(self):
        return self.now_s


def key_of(queue, show):
    return QueueKey(queue, show, UUID(int=8), UUID(int=9), CLASS)


@pytest.fixture
def queues():
    return PendingQueues(StoppedClock(), lambda _cls: (POOL,))


@pytest.fixture
def pending(queues):
    return queues.add(PendingQueue(key_of("q", SHOW), 1, [7], waiting=5))


def another(queues):
    return queues.add(PendingQueue(key_of("r", OTHER), 1, [8], waiting=5))


def in_order(queues):
    return list(queues.order())


def test_refused_queue_backs_off(queues, pending):
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, queues.moment(pending))
    assert (in_order(queues), pending.budget) == ([], 0)


def test_queues_of_a_show_that_cannot_be_booked_try_again_in_order(queues, pending):
    lower = queues.add(PendingQueue(key_of("lower", SHOW), 0, [9], waiting=5))
    other = another(queues)
    queues.mark_refused(pending, Reason.BOOKS_UNAVAILABLE, queues.moment(pending), whole_show=True)
    assert in_order(queues) == [other]
    queues._clock.now_s += BACKOFF_S
    assert [each for each in in_order(queues) if each is not other] == [pending, lower]


def test_minimum_that_is_removed_and_set_again_counts_no_round_of_before(queues, pending):
    least = {(SHOW, pending.key.folder): Usage(1000, 0)}
    ask = Ask(100, 0)
    minimums = Minimums()
    minimums.replace(least, {key: Usage() for key in least})
    minimums.reserve(list(least), ask, 8)
    minimums.replace({}, {})
    minimums.reserve(list(least), ask, -8)
    minimums.replace(least, {key: Usage() for key in least})
    assert minimums.frames_lacking(list(least), ask) == 10


def test_release_during_the_booking_is_tried_at_once(queues, pending):
    asked = queues.moment(pending)
    queues.capacity_released(SHOW, 3)
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, asked)
    assert (in_order(queues), pending.budget) == ([pending], 3)


def test_release_of_another_show_or_before_the_booking_ends_no_back_off(queues, pending):
    queues.capacity_released(SHOW, 3)
    asked = queues.moment(pending)
    queues.capacity_released(OTHER, 3)
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, asked)
    assert (in_order(queues), pending.budget) == ([], 0)


def test_limit_changed_during_the_booking_is_tried_at_once(queues, pending):
    asked = queues.moment(pending)
    queues.capacity_released()
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, asked)
    queues.share_refused(pending, POOL, FULL, asked)
    assert (in_order(queues), pending.budget, queues.share_limits(pending)) == ([pending], None, {})


def test_returned_frames_are_seen_although_a_round_found_none(queues, pending):
    pending.waiting = 0
    queues.frames_returned(pending, 4)
    assert in_order(queues) == [pending]


def a_plan(*portions):
    shares = [SimpleNamespace(pool_id=pool, n=n) for pool, n in portions]
    return SimpleNamespace(portions=shares)


def test_round_takes_a_part_of_what_is_free_while_several_shows_wait(queues, pending):
    assert queues.frames_max(pending, 20) == 512
    another(queues)
    queues.order()  # begins a turn
    assert [queues.frames_max(pending, room) for room in (0, 1, 21, 10_000)] == [1, 1, 11, 512]


def test_frames_of_rounds_under_way_count_as_used(queues, pending):
    other = another(queues)
    queues.set_shares({(SHOW, POOL): (3200, 0), (OTHER, POOL): (3200, 100)})
    assert in_order(queues) == [pending, other]
    reserved = queues.reserve_share(pending, a_plan((POOL, 2)))
    assert in_order(queues) == [other, pending]
    queues.shrink_share(pending, reserved, 0)
    assert in_order(queues) == [pending, other]


def test_sizes_in_pools_that_cannot_run_the_frames_do_not_count(queues, pending):
    other = another(queues)
    queues.set_shares({(SHOW, POOL): (600, 300), (OTHER, POOL): (200, 200), (OTHER, UUID(int=9)): (120_000, 0)})
    assert in_order(queues) == [pending, other]


def test_released_frames_are_not_used_any_more(queues, pending):
    other = another(queues)
    queues.set_shares({(SHOW, POOL): (3200, 0), (OTHER, POOL): (3200, 0)})
    queues.frames_booked(pending, POOL, 4, queues.moment(pending))
    assert in_order(queues) == [other, pending]
    queues.capacity_released(SHOW, 4, {POOL: Usage(400)})
    queues.frames_booked(other, POOL, 1, queues.moment(other))
    assert in_order(queues) == [pending, other]


class Lanes:
    """The part of the queue that says what waits, and for how long."""

    def __init__(self):
        self.waiting = {}
        """By lane: queue, priority and the age of its first frame."""
        self.meanwhile = lambda: None

    async def candidates(self, _queues=None):
        self.meanwhile()
        return [ClaimableLane(lane, queue, priority, 10, 0) for lane, (queue, priority, _) in self.waiting.items()]

    async def head_ages_s(self, lanes):
        return {lane: self.waiting[lane][2] for lane in lanes}


@pytest.fixture
def aged():
    lanes = Lanes()
    clock = StoppedClock()
    queues = PendingQueues(clock, lambda _cls: (POOL,))
    reader = PendingReader(queues, None, lanes, clock)
    reader._keys = {name: key_of(name, SHOW) for name in ("old", "new")}
    return queues, reader, lanes


async def test_frames_that_return_while_counts_are_read_are_not_forgotten(aged):
    queues, reader, lanes = aged
    lanes.waiting = {1: ("old", 1, 0.0)}
    await reader.refresh()
    pending = queues.entries["old", 1]
    lanes.waiting = {}
    lanes.meanwhile = lambda: queues.frames_returned(pending, 1)
    await reader.refresh()
    assert in_order(queues) == [pending]
    lanes.meanwhile = lambda: None
    await reader.refresh()
    assert in_order(queues) == []


async def names_in_order(queues, reader):
    await reader.refresh()
    return [(pending.key.queue, pending.priority) for pending in in_order(queues)]


async def test_queue_that_was_idle_gains_no_priority(aged):
    queues, reader, lanes = aged
    lanes.waiting = {1: ("old", 1, 0.0)}
    await reader.refresh()
    lanes.waiting = {}
    await reader.refresh()
    queues._clock.now_s += 86_400.0
    lanes.waiting = {1: ("old", 1, 0.0), 2: ("new", 9, 0.0)}
    assert await names_in_order(queues, reader) == [("new", 9), ("old", 1)]
    queues.entries["old", 1].waiting = 0
    queues._clock.now_s += 86_400.0
    queues.mark_notified("old")
    assert queues.entries["old", 1].since_s == queues._clock.now_s


@pytest.mark.parametrize(("age_s", "first"), [(200.0, "new"), (301.0, "old"), (10 * 86_400.0, "old")])
async def test_waiting_time_counts_as_priority(aged, age_s, first):
    queues, reader, lanes = aged
    lanes.waiting = {1: ("old", 5, age_s), 2: ("new", 6, 0.0)}
    assert (await names_in_order(queues, reader))[0][0] == first


async def test_waiting_time_never_counts_as_more_than_two_levels(aged):
    queues, reader, lanes = aged
    lanes.waiting = {1: ("old", 5, 10 * 86_400.0), 2: ("new", 8, 0.0)}
    assert await names_in_order(queues, reader) == [("new", 8), ("old", 5)]


async def test_age_of_a_queue_is_that_of_its_longest_waiting_lane(aged):
    queues, reader, lanes = aged
    lanes.waiting = {1: ("old", 5, 1.0), 2: ("old", 5, 7.0), 3: ("old", 5, 3.0)}
    await reader.refresh()
    assert queues.entries["old", 5].since_s == 993.0
    lanes.waiting = {1: ("old", 5, 5.0), 3: ("old", 5, 4.0)}
    await reader.refresh(["old"])
    assert queues.entries["old", 5].since_s == 995.0


def test_show_that_used_nothing_for_an_hour_and_hears_of_a_release_has_its_turn(queues, pending):
    another(queues)
    queues.set_shares({(SHOW, POOL): (400, 0), (OTHER, POOL): (400, 0)})
    for _ in range(3600):
        queues._clock.now_s += 1.0
        in_order(queues)
    queues.capacity_released(SHOW, 1, {POOL: Usage(100)})
    assert queues.frames_max(pending, 10) == 5


def test_show_that_cannot_start_frames_takes_no_part_of_a_pool(queues, pending):
    other = another(queues)
    queues.set_shares({(SHOW, POOL): (500, 500), (OTHER, POOL): (500, 0)})
    queues.order()
    assert queues.frames_max(pending, 5) == 1
    queues.mark_refused(other, Reason.QUOTA_FOLDER)
    queues.order()
    assert queues.frames_max(pending, 5) == 512


def test_frames_that_start_and_end_between_two_turns_are_known_to_be_short(queues, pending):
    another(queues)
    queues.set_shares({(SHOW, POOL): (500, 0), (OTHER, POOL): (500, 0)})
    queues.order()
    queues.frames_booked(pending, POOL, 10, queues.moment(pending))
    queues._clock.now_s += 0.01
    queues.capacity_released(SHOW, 10, {POOL: Usage(1000)})
    queues.order()
    assert queues.frames_max(pending, 20) == 512


def test_release_does_not_end_the_wait_for_workers(queues, pending):
    queues.no_capacity(pending, Reason.POOL_OVERLOADED, {})
    queues.capacity_released(SHOW, 1)
    assert in_order(queues) == []
    queues.workers_changed()
    assert in_order(queues) == [pending]


def test_claim_whose_frames_were_subtracted_by_a_count_leaves_what_waits(aged):
    queues, _, lanes = aged
    lanes.waiting = {1: ("old", 1, 0.0)}
    pending = queues.add(PendingQueue(key_of("old", SHOW), 1, [1], waiting=110))
    pending.busy = True
    queues.set_counts([ClaimableLane(1, "old", 1, 10, 0)], {"old": pending.key}, {}, queues.arrivals(None), None)
    queues.frames_claimed(pending, 100, 100, pending.arrivals, ended=True)
    pending.busy = False
    assert in_order(queues) == [pending]


def test_frames_that_were_claimed_and_returned_wait_again_with_those_behind_them(queues, pending):
    pending.waiting, pending.counted = 2, True
    queues.frames_claimed(pending, 1, 1, pending.arrivals, ended=True)
    queues.frames_returned(pending, 1)
    queues.frames_claimed(pending, 1, 1, pending.arrivals, ended=True)
    assert in_order(queues) == [pending]


def test_queue_that_no_worker_can_serve_waits_for_one(queues, pending):
    queues._pools_of, queues._pools_version = lambda _cls: (), lambda: 1
    queues.no_capacity(pending, Reason.NO_WORKERS, {})
    queues._clock.now_s += 5.0
    queues.workers_changed()
    assert in_order(queues) == [], "workers that cannot run it make no difference"
    queues._pools_version = lambda: 2
    assert in_order(queues) == [pending]
    queues.no_capacity(pending, Reason.NO_WORKERS, {})
    queues._clock.now_s += UNSERVED_BACKOFF_S
    assert in_order(queues) == [pending]


def test_full_share_is_asked_again_by_the_highest_priority(queues, pending):
    """A release may come at that moment, so a queue that was held earlier must not be the one that asks."""
    queues.share_refused(pending, POOL, FULL, queues.moment(pending))
    queues.no_capacity(pending, Reason.NO_WORKERS, queues.share_limits(pending))
    queues._clock.now_s += 0.7
    higher = queues.add(PendingQueue(key_of("q", SHOW), 8, [9], waiting=1, since_s=queues._clock.now_s))
    queues.no_capacity(higher, Reason.NO_WORKERS, queues.share_limits(higher))
    assert list(queues.order()) == []
    queues._clock.now_s += 0.31
    assert list(queues.order()) == [higher, pending]


def test_release_while_refused_frames_return_is_kept_for_them(queues, pending):
    """The room of the share was not known when the round began, for example because a limit had changed."""
    lower = queues.add(PendingQueue(key_of("q", SHOW), 0, [9], waiting=1, since_s=queues._clock.now_s))
    asked, reservation = queues.moment(pending), queues.reserve_share(pending, a_plan((POOL, 5)))
    queues.frames_claimed(pending, 5, 5, pending.arrivals, ended=True)
    queues.share_refused(pending, POOL, FULL, asked, reservation)
    queues.capacity_released(SHOW, 1, {POOL: Usage(100)})
    assert queues.share_limits(lower) == {POOL: 0}
    queues.frames_returned(pending, 5)
    queues.shrink_share(pending, reservation, 0)
    assert queues.share_limits(pending) == {POOL: 1}
    assert next(iter(queues.order())) is pending


def lane_of(pending, waiting):
    return ClaimableLane(pending.lanes[0], pending.key.queue, pending.priority, waiting, 0)


CHANGES = {
    "time": lambda queues, _each, number: setattr(queues._clock, "now_s", queues._clock.now_s + number / 4),
    "turn": lambda queues, _each, _number: None,
    "notified": lambda queues, each, _number: queues.mark_notified(each.key.queue),
    "refused": lambda queues, each, _number: queues.mark_refused(each, Reason.QUOTA_FOLDER, queues.moment(each)),
    "no_workers": lambda queues, each, _number: queues.no_capacity(each, Reason.NO_WORKERS, {}),
    "full": lambda queues, each, _number: queues.no_capacity(each, Reason.POOL_OVERLOADED, {}),
    "at_share": lambda queues, each, _number: queues.no_capacity(each, Reason.NO_WORKERS, {POOL: 0}),
    "share_freed": lambda queues, each, _number: queues._end_holds_at_share(each.key.show),
    "returned": lambda queues, each, number: queues.frames_returned(each, number),
    "claimed": lambda queues, each, number: queues.frames_claimed(each, 9, number % 9, each.arrivals, ended=True),
    "claimed_all": lambda queues, each, _number: queues.frames_claimed(each, 5, 5, each.arrivals, ended=False),
    "released": lambda queues, each, number: queues.capacity_released(each.key.show, number),
    "limits": lambda queues, _each, _number: queues.capacity_released(),
    "workers": lambda queues, _each, _number: queues.workers_changed(),
    "pools": lambda queues, _each, number: setattr(queues, "_pools_version", lambda: number),
    "counted": lambda queues, each, number: queues.set_counts(
        [lane_of(each, number)], {each.key.queue: each.key}, {}, {}, None
    ),
    "counted_one": lambda queues, each, number: queues.set_counts(
        [lane_of(each, number)], {each.key.queue: each.key}, {}, {}, [each.key.queue]
    ),
    "new": lambda queues, each, number: queues.add(
        PendingQueue(key_of(f"q{len(queues.entries)}", each.key.show), 1, [99], waiting=number)
    ),
}


HOLDS = ("refused", "no_workers", "full", "at_share")


def two_queues():
    queues = PendingQueues(StoppedClock(), lambda _cls: ())
    return queues, [queues.add(PendingQueue(key_of(f"q{n}", (SHOW, OTHER)[n]), n, [n], waiting=5)) for n in range(2)]


def check_turns(queues):
    """Of three turns in a row the last may leave queues out."""
    now, version = queues._clock.monotonic(), queues._pools_version()
    eligible = {id(each) for each in queues.entries.values() if queues._is_eligible(each, now, version)}
    for _ in range(3):
        assert {id(each) for each in in_order(queues)} == eligible


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("what", sorted(CHANGES))
def test_change_while_all_queues_are_held_is_seen_by_the_next_turn(hold, what):
    queues, known = two_queues()
    for each in known:
        CHANGES[hold](queues, each, 1)
    check_turns(queues)
    CHANGES[what](queues, known[0], 5)
    check_turns(queues)
    queues._clock.now_s += 1.25 * BACKOFF_S
    check_turns(queues)


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_change_while_queues_have_no_frames_is_seen_by_the_next_turn(what):
    queues, known = two_queues()
    for each in known:
        queues.frames_claimed(each, 9, 5, each.arrivals, ended=True)
    check_turns(queues)
    CHANGES[what](queues, known[0], 5)
    check_turns(queues)


@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 1), st.integers(0, 12)), max_size=40))
def test_turn_that_looks_at_no_queue_would_have_found_none(steps):
    queues, known = two_queues()
    for what, at, number in steps:
        CHANGES[what](queues, known[at], number)
        check_turns(queues)


def test_queues_that_are_all_held_are_not_looked_at_in_every_turn(monkeypatch):
    queues = PendingQueues(StoppedClock(), lambda _cls: ())
    pending = queues.add(PendingQueue(key_of("q", SHOW), 1, [7], waiting=5))
    looked, is_eligible = [], queues._is_eligible
    monkeypatch.setattr(queues, "_is_eligible", lambda *args, **more: looked.append(1) or is_eligible(*args, **more))

    def looks(turns):
        looked.clear()
        for _ in range(turns):
            assert in_order(queues) == []
        return len(looked)

    queues.no_capacity(pending, Reason.NO_WORKERS, {})
    looks(2)
    assert looks(5) == 0
    queues._clock.now_s += ORDER_MAX_AGE_S
    assert looks(1) == 1
    queues._clock.now_s += UNSERVED_BACKOFF_S
    assert in_order(queues) == [pending]


def test_position_counts_frames_of_another_show_until_it_uses_as_much_of_its_size(queues, pending):
    """The other show uses nothing of 2 cores, this one 6 of 12: after one frame both use half."""
    pending.waiting = 50
    another(queues)
    queues.set_shares({(SHOW, POOL): (1200, 600), (OTHER, POOL): (200, 0)})
    assert queues.position("q", 1) == PendingPosition(queues=1, frames=1, by_share=1)
    assert queues.position("r", 1) == PendingPosition()
    queues.set_shares({(SHOW, POOL): (1200, 600), (OTHER, POOL): (200, 100)})
    assert queues.position("q", 1).frames + queues.position("r", 1).frames <= 1, "one of two equals is first"
    queues.set_shares({(SHOW, POOL): (0, 600), (OTHER, POOL): (200, 900)})
    assert queues.position("q", 1) == PendingPosition(queues=1, frames=5, by_share=5)


def test_position_divides_the_lead_of_another_show_between_its_queues(queues, pending):
    another(queues)
    queues.add(PendingQueue(key_of("s", OTHER), 5, [9], waiting=2))
    queues.set_shares({(SHOW, POOL): (400, 400), (OTHER, POOL): (400, 0)})
    assert queues.position("q", 1) == PendingPosition(queues=2, frames=4, by_share=4)


def test_position_tells_the_frames_of_its_show_from_those_of_others(queues, pending):
    another(queues)
    queues.add(PendingQueue(key_of("s", SHOW), 5, [9], waiting=30))
    queues.set_shares({(SHOW, POOL): (400, 400), (OTHER, POOL): (400, 200)})
    assert queues.position("q", 1) == PendingPosition(queues=2, frames=32, by_share=2)


def test_position_counts_a_queue_below_its_minimum_up_to_it(queues, pending):
    """Above the minimum its lower priority counts again."""
    owed = QueueKey("owed", SHOW, UUID(int=4), UUID(int=9), CLASS)
    queues.add(PendingQueue(owed, 0, [9], waiting=30))
    queues.set_minimums({(SHOW, UUID(int=4)): Usage(300)}, {(SHOW, UUID(int=4)): Usage(100)})
    assert queues.position("q", 1) == PendingPosition(queues=1, frames=2)
    assert queues.position("owed", 0) == PendingPosition()


def test_position_counts_no_queue_that_runs_in_other_pools():
    elsewhere = PlacementRequirements(topic="elsewhere", need=Resources(cores=100))
    queues = PendingQueues(StoppedClock(), lambda cls: (POOL,) if cls is CLASS else (UUID(int=5),))
    queues.add(PendingQueue(key_of("q", SHOW), 1, [7], waiting=5))
    queues.add(PendingQueue(QueueKey("r", SHOW, UUID(int=8), UUID(int=9), elsewhere), 5, [8], waiting=5))
    assert queues.position("q", 1) == PendingPosition()
