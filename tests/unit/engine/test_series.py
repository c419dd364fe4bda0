"""Which frames share a slot in a series, and how many."""

import random
from types import SimpleNamespace
from uuid import UUID

import pytest

from rota.accounting.ledger import BookingOutcome
from rota.engine.dispatch.booking_requests import LayerExecution, booked_slices, frames_with, series_requests
from rota.engine.dispatch.series import (
    ALONE,
    ROUND_FRAMES_MAX,
    SERIES_BYTES_MAX,
    SERIES_FRAMES_MAX,
    WORKS_MAX,
    SeriesLength,
    SeriesLimit,
    WorkDurations,
    frames_to_claim,
    slots_to_use,
    split_into_series,
    timing_key_of,
)
from rota.queue.claims import ClaimedRange
from rota.queue.tokens import CLAIM_ID_STEP, CLAIM_MAX

NEXT_CLAIM = CLAIM_MAX * CLAIM_ID_STEP
"""From a token of a claim to the same place in the next claim of its slot."""
ANY = SeriesLimit(256, None, b"", 0)


def durations(*seen, key=7):
    """Frames, and how long they ran and kept their slots in total."""
    known = WorkDurations()
    for frames, run_s, slot_s in seen:
        known.record(key, frames, run_s, slot_s)
    return known


def claimed(first, n, layer=1, *, attempt=1):
    tokens = range(first, first + n)
    return ClaimedRange(tokens, UUID(int=100 + layer), UUID(int=layer), tokens, attempt, None)


def split(ranges, slots, limit=ANY):
    """Series as lists of tokens."""
    limit_of = limit if callable(limit) else lambda _: limit
    found = split_into_series(ranges, slots, [limit_of(each) for each in ranges])
    return [[token for segment in series for token in segment.tokens] for series in found]


def test_frames_of_unknown_work_run_alone():
    assert durations().series_length(7) == ALONE == (1, 1)
    assert durations((100, 0.1, 0.1), key=8).series_length(7) == ALONE


@pytest.mark.parametrize(
    ("seen", "length"),
    [
        ((1, 0.001, 0.001), (1, 1)),
        ((3, 0.003, 0.003), (3, 2)),
        ((1000, 1.0, 1.0), (100, 2)),
        ((1000, 0.1, 1.0), (100, 20)),
        ((1000, 0.001, 0.001), (SERIES_FRAMES_MAX, SERIES_FRAMES_MAX)),
        ((1000, 0.0, 0.0), (SERIES_FRAMES_MAX, SERIES_FRAMES_MAX)),
        ((1000, 0.0, 10.0), (10, 10)),
        ((1000, 3.0, 3.0), (33, 1)),
        ((1000, 100.0, 100.0), (1, 1)),
        ((1000, 10_000.0, 10_000.0), (1, 1)),
    ],
)
def test_series_is_as_long_as_its_expected_time_and_experience_allow(seen, length):
    assert durations(seen).series_length(7) == length


def test_work_that_becomes_slow_loses_its_series_within_a_few_frames():
    known = durations((10_000, 10.0, 10.0))
    assert known.series_length(7) == (100, 2)
    for _ in range(3):
        known.record(7, 1, 10.0, 10.0)
    assert known.series_length(7) == ALONE


def test_durations_of_few_works_are_kept():
    known = durations((100, 0.1, 0.1))
    for key in range(1000, 1000 + WORKS_MAX):
        known.record(key, 1, 1.0, 1.0)
    assert known.series_length(7) == ALONE
    assert len(known._known) == WORKS_MAX


def test_shorter_of_two_lengths_is_the_shorter_in_each_way():
    assert SeriesLength(100, 2).shortest(SeriesLength(50, 20)) == (50, 2)
    assert SeriesLength(100, 20).at_most(10) == (10, 10)
    assert SeriesLength(100, 2).at_most(10) == (10, 2)
    assert SeriesLength(100, 2).at_most(0) == ALONE


def test_timing_key_depends_on_the_work_alone():
    assert timing_key_of(b"one") == timing_key_of(b"one") != timing_key_of(b"two")
    assert 0 < timing_key_of(b"one") < 2**53


@pytest.mark.parametrize(
    ("slots", "length", "waiting", "frames"),
    [
        (2, (1, 1), None, 2),
        (2, (50, 1), None, 100),
        (2, (50, 1), 10_000, 100),
        (2, (50, 1), 100, 50),
        (2, (50, 1), 10, 6),
        (2, (50, 1), 4, 2),
        (2, (50, 1), 1, 2),
        (2, (50, 20), 1, 2),
        (2, (50, 20), 30, 30),
        (2, (50, 20), 60, 40),
        (2, (256, 256), None, 512),
        (256, (256, 1), None, 1024),
        (257, (256, 1), None, 257),
        (500, (256, 256), None, ROUND_FRAMES_MAX),
        (500, (256, 2), None, 1000),
        (1000, (256, 1), None, 1000),
        (2000, (256, 256), None, 2000),
    ],
)
def test_claim_fills_slots_with_series_that_shrink_towards_the_end(slots, length, waiting, frames):
    assert frames_to_claim(slots, SeriesLength(*length), waiting) == frames <= max(slots, ROUND_FRAMES_MAX)


def test_claim_for_a_later_part_of_a_round_is_bounded_by_what_the_others_left():
    assert frames_to_claim(2, SeriesLength(50, 50), None, 40) == 40
    assert frames_to_claim(2, SeriesLength(50, 50), None, 0) == 2


@pytest.mark.parametrize(
    ("slots", "frames", "used"),
    [
        (4, [(100, (50, 1))], 4),
        (4, [(100, (50, 50))], 2),
        (4, [(10, (50, 50))], 1),
        (200, [(1000, (256, 20))], 50),
        (4, [(10, (50, 50)), (1, (1, 1))], 2),
        (4, [(10, (50, 10)), (2, (1, 1))], 3),
        (4, [], 1),
    ],
)
def test_very_short_frames_share_slots_while_others_are_free(slots, frames, used):
    assert slots_to_use(slots, [(n, SeriesLength(*length)) for n, length in frames]) == used


def test_frames_are_divided_equally_between_slots():
    assert [len(series) for series in split([claimed(10, 100)], 4)] == [25, 25, 25, 25]
    assert [len(series) for series in split([claimed(10, 10)], 4)] == [3, 3, 2, 2]


def test_series_is_no_longer_than_the_limit_of_its_frames_and_the_rest_is_left_over():
    assert [len(series) for series in split([claimed(10, 100)], 4, SeriesLimit(5, None, b"", 0))] == [5] * 20


def test_frames_of_different_limits_use_up_a_series_in_proportion():
    limits = {UUID(int=1): SeriesLimit(10, None, b"", 0), UUID(int=2): SeriesLimit(4, None, b"", 0)}
    ranges = [claimed(10, 5, 1), claimed(15, 5, 2)]
    assert split(ranges, 1, lambda each: limits[each.layer]) == [[10, 11, 12, 13, 14, 15, 16], [17, 18, 19]]


def test_layers_with_caps_have_series_of_their_own():
    limits = {UUID(int=layer): SeriesLimit(100, UUID(int=layer), b"", 0) for layer in (1, 2)}
    ranges = [claimed(10, 3, 1), claimed(13, 3, 2)]
    assert split(ranges, 1, lambda each: limits[each.layer]) == [[10, 11, 12], [13, 14, 15]]
    assert split(ranges, 1) == [[10, 11, 12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("then", "joined"),
    [
        (NEXT_CLAIM + 5, True),  # the same claim
        (2 * NEXT_CLAIM, True),  # the next one, in the same slot of the ring
        (2 * NEXT_CLAIM + 7 * CLAIM_MAX, True),  # in another slot
        (3 * NEXT_CLAIM, False),
        (5, False),
    ],
)
def test_series_goes_on_in_the_next_claim_but_not_past_claims_of_others(then, joined):
    first, second = list(range(NEXT_CLAIM, NEXT_CLAIM + 3)), [then, then + 1, then + 2]
    found = split([claimed(NEXT_CLAIM, 3), claimed(then, 3)], 1)
    assert found == ([first + second] if joined else [first, second])


def test_frame_that_must_run_alone_ends_the_series_before_it():
    def limit_of(each):
        return ANY if each.attempt == 1 else SeriesLimit(1, None, b"", 0)

    ranges = [claimed(10, 3), claimed(13, 2, attempt=2), claimed(15, 3)]
    assert split(ranges, 1, limit_of) == [[10, 11, 12], [13], [14], [15, 16, 17]]


def test_inputs_of_a_series_fit_in_a_message():
    big = SeriesLimit(256, None, b"", SERIES_BYTES_MAX // 2)
    ranges = [claimed(10 + at, 1, at) for at in range(5)]
    assert split(ranges, 1, big) == [[10, 11], [12, 13], [14]]


def test_works_of_a_series_fit_in_a_message():
    works = [bytes([at]) * (SERIES_BYTES_MAX // 2) for at in range(2)]
    limits = {UUID(int=at): SeriesLimit(256, None, works[at % 2 if at < 4 else 0], 0) for at in range(6)}
    ranges = [claimed(10 + at, 1, at) for at in range(6)]
    assert split(ranges, 1, lambda each: limits[each.layer]) == [[10, 11], [12, 13], [14, 15]]


@pytest.mark.parametrize("seed", range(50))
def test_booked_frames_are_of_the_claim_that_has_their_tokens(seed):
    """Else a worker would be told another frame number."""
    rng = random.Random(seed)
    ranges, executions, limits, first = [], {}, [], NEXT_CLAIM
    for _ in range(rng.randrange(1, 8)):
        layer = rng.randrange(3)
        each = claimed(first, rng.randrange(1, 4), layer)
        capped = rng.random() < 0.5
        executions[each.layer] = LayerExecution(b"", None, None, capped, None, 0, 1)
        limits.append(SeriesLimit(rng.choice([1, 4]), rng.choice([None, each.layer]), b"", 0))
        ranges.append(each)
        first = (first // NEXT_CLAIM + 1) * NEXT_CLAIM
    portions = [SimpleNamespace(worker=UUID(int=n), n=2, pool_id=UUID(int=9)) for n in range(rng.randrange(1, 4))]
    plan = SimpleNamespace(portions=portions, planned=2 * len(portions))
    cls = SimpleNamespace(need=SimpleNamespace(cores=100, gpus=0))
    key = SimpleNamespace(cls=cls, folder=UUID(int=8), dept=UUID(int=7))
    part = SimpleNamespace(plan=plan, pending=SimpleNamespace(key=key))
    found = series_requests(part, ranges, executions, limits, rng.randrange(1, plan.planned + 1))
    tokens = list(found.left_over)
    for request in found.requests:
        asked = list(request.asked.tokens)
        booked = asked if rng.random() < 0.5 else asked[: rng.randrange(len(asked) + 1)]
        slices = booked_slices(request, BookingOutcome(booked))
        assert sum(len(of_slice) for _, of_slice in slices) == len(frames_with(request, booked))
        for each, of_slice in slices:
            assert all(token in each.claimed_range.tokens for token in of_slice)
        tokens += frames_with(request, asked)
    assert sorted(tokens) == [token for each in ranges for token in each.tokens]


@pytest.mark.parametrize("seed", range(50))
def test_every_frame_is_in_one_series_in_order_and_within_its_limits(seed):
    rng = random.Random(seed)
    ranges, first, limits = [], 10, {}
    for layer in range(rng.randrange(1, 12)):
        first += rng.choice([0, 0, 0, 5, NEXT_CLAIM, 2 * NEXT_CLAIM])
        n = rng.randrange(1, 30)
        ranges.append(claimed(first, n, layer))
        limits[UUID(int=layer)] = SeriesLimit(
            rng.choice([1, 2, 7, 30, 256]),
            rng.choice([None, UUID(int=layer)]),
            rng.choice([b"", b"work", b"x" * 20_000]),
            rng.choice([0, 100, 20_000]),
        )
        first += n
    slots = rng.randrange(1, 10)
    series = list(split_into_series(ranges, slots, [limits[each.layer] for each in ranges]))
    tokens = [token for each in series for segment in each for token in segment.tokens]
    assert tokens == [token for each in ranges for token in each.tokens]
    for each in series:
        mine = [token for segment in each for token in segment.tokens]
        assert mine == sorted(mine)
        assert mine[-1] // NEXT_CLAIM - mine[0] // NEXT_CLAIM <= len({token // NEXT_CLAIM for token in mine}) - 1
        assert all(token in segment.claimed.tokens for segment in each for token in segment.tokens)
        assert sum(len(segment.tokens) / limits[segment.claimed.layer].frames_max for segment in each) <= 1 + 1e-6
        assert len({limits[segment.claimed.layer].group for segment in each}) == 1
        if len(each) > 1:
            mine = [limits[segment.claimed.layer] for segment in each]
            works = [limit.work for at, limit in enumerate(mine) if at == 0 or limit.work != mine[at - 1].work]
            assert sum(limit.input_bytes for limit in mine) + sum(map(len, works)) <= SERIES_BYTES_MAX
