"""Frame specs name exactly their frames, and queue numbers map to them and back."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.model.errors import InvalidInput
from rota.model.jobs.frame_ranges import (
    FRAME_NUMBER_MAX,
    FRAMES_MAX,
    RANGES_MAX,
    format_frames,
    frames_from_count,
    parse_frames,
)

numbers = st.integers(0, 300)
steps = st.integers(1, 12)
parts = st.one_of(
    numbers.map(lambda n: (n, n, None)),
    st.tuples(numbers, st.integers(0, 80)).map(lambda p: (p[0], p[0] + p[1], None)),
    st.tuples(numbers, st.integers(0, 80), steps).map(lambda p: (p[0], p[0] + p[1], p[2])),
)


def text(first, last, step):
    return f"{first}" if first == last and step is None else f"{first}-{last}" + ("" if step is None else f"x{step}")


def numbers_of(spec):
    return sorted({number for first, last, step in spec for number in range(first, last + 1, step or 1)})


@given(st.lists(parts, min_size=1, max_size=8))
def test_frame_spec_is_the_sorted_union_of_its_parts(spec):
    frames = parse_frames(",".join(text(*part) for part in spec))
    assert list(frames.numbers()) == numbers_of(spec)
    assert frames.count == len(numbers_of(spec))


@given(st.lists(parts, min_size=1, max_size=8))
def test_queue_numbers_map_to_frame_numbers_and_back(spec):
    frames = parse_frames(", ".join(text(*part) for part in spec))
    positions = [position for first, count in frames.queue_ranges() for position in range(first, first + count)]
    assert [frames.number(position) for position in positions] == numbers_of(spec)
    assert [frames.queue_number(number) for number in numbers_of(spec)] == positions
    missing = set(range(-5, 420)) - set(numbers_of(spec))
    assert all(frames.queue_number(number) is None for number in missing)


@given(st.lists(parts, min_size=1, max_size=8))
def test_queue_ranges_are_ascending_and_disjoint(spec):
    frames = parse_frames(",".join(text(*part) for part in spec))
    ranges = frames.queue_ranges()
    assert all(first >= 0 and count > 0 for first, count in ranges)
    assert all(first + count < after for (first, count), (after, _) in pairwise(ranges))


@given(st.lists(parts, min_size=1, max_size=8))
def test_formatted_frames_parse_to_the_same_frames(spec):
    frames = parse_frames(",".join(text(*part) for part in spec))
    assert parse_frames(format_frames(frames)) == frames


@given(numbers, st.integers(1, 1000), st.integers(1, 1000))
def test_evenly_spaced_frames_are_one_range(first, count, step):
    frames = parse_frames(f"{first}-{first + (count - 1) * step}x{step}")
    assert (frames.first, frames.count, frames.ranges) == (first, count, ())


@given(st.sets(numbers, min_size=2, max_size=2))
def test_two_frames_are_one_range(pair):
    assert parse_frames(",".join(map(str, pair))).ranges == ()


@given(st.text(max_size=20))
def test_any_text_is_valid_frames_or_refused(spec):
    try:
        count = parse_frames(spec).count
    except InvalidInput:
        return
    assert 1 <= count <= FRAMES_MAX


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "not a valid frame spec"),
        ("1-", "not a valid frame spec"),
        ("-1", "not a valid frame spec"),
        ("1x2", "not a valid frame spec"),
        ("1-5x", "not a valid frame spec"),
        ("1,,2", "not a valid frame spec"),
        ("1 - 5", "not a valid frame spec"),
        ("٣", "not a valid frame spec"),
        ("9-1", "runs backwards: write 1-9"),
        ("1-5x0", "step of 0"),
        (f"{FRAME_NUMBER_MAX + 1}", "too high"),
        ("99999999999", "not a valid frame spec"),
        (f"0-{FRAMES_MAX}", "more than 10000000 frames"),
        (",".join(f"0-{FRAMES_MAX - 1}" for _ in range(2)), "more than 10000000 frames"),
        (",".join(str(n * n) for n in range(RANGES_MAX + 2)), "has 1001 ranges"),
        ("0-200000x2,1-200000x3", "mixes steps over more than 100000 frames"),
        ("1," * 5000 + "1", "too long"),
    ],
)
def test_invalid_frame_spec_is_refused(spec, message):
    with pytest.raises(InvalidInput, match=message):
        parse_frames(spec)


def test_large_frame_specs_are_parsed_without_expansion():
    assert parse_frames("1-10000000").ranges == ()
    assert parse_frames("0-19999998x2").count == FRAMES_MAX
    assert parse_frames("1-1000000x10,1-1000000") == parse_frames("1-1000000")
    assert parse_frames(f"{FRAME_NUMBER_MAX}").first == FRAME_NUMBER_MAX


@pytest.mark.parametrize("count", [0, -1, FRAMES_MAX + 1])
def test_invalid_frame_count_is_refused(count):
    with pytest.raises(InvalidInput, match="is not a valid number of frames"):
        frames_from_count(count)
