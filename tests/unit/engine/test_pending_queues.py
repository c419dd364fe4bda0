"""What a refusal means for the next round of its queue."""

from types import SimpleNamespace
from uuid import UUID

import pytest

from rota.engine.dispatch.pending_queues import BookingMoment, PendingQueue, PendingQueues
from rota.model.reasons import Reason

SHOW, OTHER, POOL = UUID(int=1), UUID(int=2), UUID(int=3)


class StoppedClock:
    def monotonic(self):
        return 1000.0


@pytest.fixture
def queues():
    return PendingQueues(None, None, StoppedClock())


@pytest.fixture
def pending(queues):
    return queues.entries.setdefault(("q", 1), PendingQueue(SimpleNamespace(show=SHOW), 1, [7], waiting=5))


def test_refused_queue_backs_off(queues, pending):
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, BookingMoment.of(pending))
    assert (queues.schedulable(), pending.budget) == ([], 0)


def test_release_during_the_booking_is_tried_at_once(queues, pending):
    asked = BookingMoment.of(pending)
    queues.capacity_released(SHOW, 3)
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, asked)
    assert (queues.schedulable(), pending.budget) == ([pending], 3)


def test_release_of_another_show_or_before_the_booking_ends_no_back_off(queues, pending):
    queues.capacity_released(SHOW, 3)
    asked = BookingMoment.of(pending)
    queues.capacity_released(OTHER, 3)
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, asked)
    assert (queues.schedulable(), pending.budget) == ([], 0)


def test_limit_changed_during_the_booking_is_tried_at_once(queues, pending):
    asked = BookingMoment.of(pending)
    queues.capacity_released()
    queues.mark_refused(pending, Reason.QUOTA_FOLDER, asked)
    queues.exclude_pool(pending, POOL, asked)
    assert (queues.schedulable(), pending.budget, queues.excluded_pools(pending)) == ([pending], None, set())


def test_returned_frames_are_seen_although_a_round_found_none(queues, pending):
    pending.waiting = 0
    queues.frames_returned(pending, 4)
    assert queues.schedulable() == [pending]
