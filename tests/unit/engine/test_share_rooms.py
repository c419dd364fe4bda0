"""Room of shares that have refused: what rounds may ask for, in scheduling order."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.engine.dispatch.share_rooms import PROBE_INTERVAL_S, PROBE_WAIT_S, ShareRooms
from rota.model.quota import Ask, Level, Refusal, Resource, Usage

SHOW, OTHER, POOL, SECOND = UUID(int=1), UUID(int=2), UUID(int=3), UUID(int=4)
ONE, WIDE, ON_GPU = Ask(100), Ask(400), Ask(100, 1)
NOW_S = 1000.0


def at(current, limit, resource=Resource.CORES):
    return Refusal(Level.SUBSCRIPTION, resource, current, limit, 100)


@pytest.fixture
def rooms():
    return ShareRooms()


@pytest.fixture
def full(rooms):
    rooms.refused(SHOW, POOL, at(600, 600), rooms.moment(SHOW), NOW_S)
    return rooms


def test_share_that_has_not_refused_limits_nothing(rooms):
    assert rooms.frames_max(SHOW, ONE, NOW_S) == {}
    rooms.released(SHOW, {POOL: Usage(100)})
    assert rooms.frames_max(SHOW, ONE, NOW_S) == {}


def test_refusal_limits_the_frames_of_its_show_and_pool_only(rooms):
    rooms.refused(SHOW, POOL, at(350, 600), rooms.moment(SHOW), NOW_S)
    assert rooms.frames_max(SHOW, ONE, NOW_S) == {POOL: 2}
    assert rooms.frames_max(SHOW, WIDE, NOW_S) == {POOL: 0}
    assert rooms.frames_max(OTHER, ONE, NOW_S) == {}


def test_refused_gpus_do_not_limit_frames_without_gpus(rooms):
    rooms.refused(SHOW, POOL, at(2, 2, Resource.GPUS), rooms.moment(SHOW), NOW_S)
    assert rooms.frames_max(SHOW, ON_GPU, NOW_S) == {POOL: 0}
    assert rooms.frames_max(SHOW, ONE, NOW_S) == {}


def test_released_room_is_reserved_by_the_first_who_asks(full):
    full.released(SHOW, {POOL: Usage(200), SECOND: Usage(900)})
    first = full.reserve(SHOW, ONE, [(POOL, 2)], NOW_S)
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 0}
    assert full.shrink(first, 1), "a frame less than planned was claimed"
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 1}
    assert full.shrink(first, 0)
    assert not full.shrink(first, 0)
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 2}


def test_room_too_small_for_one_queue_is_left_for_another(full):
    full.released(SHOW, {POOL: Usage(300)})
    assert full.frames_max(SHOW, WIDE, NOW_S) == {POOL: 0}
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 3}


def test_release_after_the_booking_was_asked_for_is_room(rooms):
    asked = rooms.moment(SHOW)
    rooms.released(SHOW, {POOL: Usage(100)})
    rooms.refused(SHOW, POOL, at(600, 600), asked, NOW_S)
    assert rooms.frames_max(SHOW, ONE, NOW_S) == {POOL: 1}


def test_booking_that_a_later_refusal_has_counted_is_not_counted_again(full):
    full.released(SHOW, {POOL: Usage(300)})
    asked = full.moment(SHOW)
    full.refused(SHOW, POOL, at(400, 600), asked, NOW_S)
    full.booked(SHOW, POOL, ONE, 1, asked)
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 2}
    full.booked(SHOW, POOL, ONE, 1, full.moment(SHOW))
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 1}


def test_full_share_is_probed_by_one_round_at_a_time(full):
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 0}
    later_s = NOW_S + PROBE_INTERVAL_S
    assert full.frames_max(SHOW, ONE, later_s) == {POOL: 1}
    full.reserve(SHOW, ONE, [(POOL, 1)], later_s)
    assert full.frames_max(SHOW, ONE, later_s) == {POOL: 0}


def test_probe_that_is_long_due_waits_for_the_last_frame_of_the_first_queue(full):
    """Both would be booked at once, and accounting might grant the second queue what was released."""
    full.released(SHOW, {POOL: Usage(100)})
    late_s = NOW_S + 10 * PROBE_INTERVAL_S
    last = full.reserve(SHOW, ONE, [(POOL, 1)], late_s)
    assert full.frames_max(SHOW, ONE, late_s) == {POOL: 0}
    asked = full.moment(SHOW)
    full.shrink(last, 0)
    full.booked(SHOW, POOL, ONE, 1, asked)
    assert full.frames_max(SHOW, ONE, late_s) == {POOL: 1}, "a probe"


def test_queue_that_waits_for_a_probe_of_a_busy_share_lets_rounds_end_before_others_begin(full):
    full.released(SHOW, {POOL: Usage(300)})
    due_s = NOW_S + PROBE_INTERVAL_S
    under_way = full.reserve(SHOW, ONE, [(POOL, 1)], NOW_S)
    assert full.hold_until_s(SHOW, WIDE, NOW_S) == due_s
    assert full.hold_until_s(SHOW, WIDE, due_s) == due_s + PROBE_INTERVAL_S + PROBE_WAIT_S
    assert full.frames_max(SHOW, ONE, due_s) == {POOL: 2}
    assert full.frames_max(SHOW, ONE, due_s + PROBE_INTERVAL_S) == {POOL: 0}
    full.shrink(under_way, 0)
    assert full.frames_max(SHOW, WIDE, due_s + PROBE_INTERVAL_S) == {POOL: 1}


def test_probe_is_made_in_the_end_although_another_queue_always_takes_the_room(full):
    full.released(SHOW, {POOL: Usage(100)})
    due_s = NOW_S + PROBE_INTERVAL_S
    probed_s = None
    for step in range(300):
        now_s = due_s + step * 0.01
        small = full.reserve(SHOW, ONE, [(POOL, min(1, full.frames_max(SHOW, ONE, now_s)[POOL]))], now_s)
        if full.frames_max(SHOW, WIDE, now_s)[POOL]:
            probed_s = now_s - due_s
            break
        full.hold_until_s(SHOW, WIDE, now_s)
        full.shrink(small, 0)
    assert probed_s is not None
    assert probed_s <= PROBE_INTERVAL_S + PROBE_WAIT_S + 0.02


def test_queue_that_no_longer_waits_for_its_probe_holds_up_no_others(full):
    full.released(SHOW, {POOL: Usage(200)})
    due_s = NOW_S + PROBE_INTERVAL_S
    full.reserve(SHOW, ONE, [(POOL, 1)], NOW_S)
    full.hold_until_s(SHOW, WIDE, due_s)
    for later_s in (PROBE_INTERVAL_S + PROBE_WAIT_S, 100.0):
        assert full.frames_max(SHOW, ONE, due_s + later_s) == {POOL: 1}


def test_rounds_without_gpus_do_not_delay_the_probe_of_gpus(rooms):
    rooms.refused(SHOW, POOL, at(2, 2, Resource.GPUS), rooms.moment(SHOW), NOW_S)
    due_s = NOW_S + PROBE_INTERVAL_S
    rooms.reserve(SHOW, ONE, [(POOL, 5)], due_s)
    assert rooms.frames_max(SHOW, ON_GPU, due_s) == {POOL: 1}


def test_share_that_grants_more_than_its_room_is_asked_for_twice_as_much_at_once(full):
    for frames in (1, 2, 4):
        full.booked(SHOW, POOL, ONE, frames, full.moment(SHOW))
        assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 2 * frames}
    full.refused(SHOW, POOL, at(600, 600), full.moment(SHOW), NOW_S)
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 0}
    assert full.frames_max(SHOW, ONE, NOW_S + PROBE_INTERVAL_S) == {POOL: 1}


def test_changed_limits_let_one_round_ask_for_much_and_ignore_refusals_under_way(full):
    asked = full.moment(SHOW)
    full.reset()
    full.refused(SHOW, POOL, at(600, 600), asked, NOW_S)
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 64}
    full.reserve(SHOW, ONE, [(POOL, 64)], NOW_S)
    assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: 0}, "no other queue may be faster"


def test_share_that_grants_all_that_is_asked_for_has_no_room_to_keep(full):
    full.reset()
    for frames in (64, 128, 256, 512):
        assert full.frames_max(SHOW, ONE, NOW_S) == {POOL: frames}
        full.booked(SHOW, POOL, ONE, frames, full.moment(SHOW))
    assert full.frames_max(SHOW, ONE, NOW_S) == {}


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.sampled_from(["round", "end"]), st.integers(1, 4), st.integers(1, 8)), max_size=60),
)
def test_rounds_of_one_dispatcher_are_refused_only_to_learn_the_room(limit, steps):
    """Once a share has refused, the room is exact: as nobody else books, accounting refuses no round again."""
    rooms, used, running, known = ShareRooms(), 0, [], False
    limit *= 100
    for what, cores, frames in steps:
        ask = Ask(cores * 100)
        if what == "end" and running:
            used -= (ended := running.pop())
            rooms.released(SHOW, {POOL: Usage(ended)})
            continue
        frames = min(frames, rooms.frames_max(SHOW, ask, NOW_S).get(POOL, frames))
        held = rooms.reserve(SHOW, ask, [(POOL, frames)], NOW_S)
        asked = rooms.moment(SHOW)
        fit = min(frames, (limit - used) // ask.cores)
        rooms.shrink(held, 0)
        used += fit * ask.cores
        running += [ask.cores] * fit
        rooms.booked(SHOW, POOL, ask, fit, asked)
        assert fit == frames or not known
        if fit < frames:
            rooms.refused(SHOW, POOL, Refusal(Level.SUBSCRIPTION, Resource.CORES, used, limit, ask.cores), asked, NOW_S)
            known = True
