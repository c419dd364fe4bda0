"""Assignments are divided into messages that NATS accepts."""

from uuid import UUID

import pytest

from rota.engine.dispatch.booking_requests import MESSAGE_BYTES_MAX, LayerExecution, WorkerSlice, split_by_size
from rota.queue.claims import ClaimedRange

MIB = 1024 * 1024
HALF = MESSAGE_BYTES_MAX // 2


def part(work=b"work", given=None, tokens=range(1, 11)):
    claimed = ClaimedRange(tokens, UUID(int=1), UUID(int=2), tokens, 1, given)
    return WorkerSlice(claimed, UUID(int=3), tokens, LayerExecution(work, None, None, False, None, 0, 1))


def messages(*slices):
    """The tokens of each message."""
    return [[list(tokens) for _, tokens in each] for each in split_by_size(slices)]


def test_small_slices_share_a_message():
    assert messages((part(), [1, 2]), (part(), [5])) == [[[1, 2], [5]]]


@pytest.mark.parametrize(("works", "count"), [((b"a" * HALF, b"b" * HALF), 1), ((b"a" * HALF, b"b" * HALF, b"c"), 2)])
def test_works_count(works, count):
    assert len(messages(*((part(work), [at]) for at, work in enumerate(works)))) == count


def test_work_of_a_layer_counts_once_per_message():
    work = b"w" * (MESSAGE_BYTES_MAX - 10)
    assert messages(*((part(work, b"12345"), [at]) for at in range(4))) == [[[0], [1]], [[2], [3]]]


def test_input_counts_for_each_range_of_a_slice():
    given = b"i" * HALF
    assert messages((part(b"", given), [1, 2, 3, 7, 11])) == [[[1, 2, 3], [7]], [[11]]]


def test_largest_range_has_a_message_of_its_own():
    large = part(b"w" * MESSAGE_BYTES_MAX, b"i" * (MIB // 2))
    assert messages((part(), [1]), (large, [2, 3]), (part(), [4])) == [[[1]], [[2, 3]], [[4]]]
