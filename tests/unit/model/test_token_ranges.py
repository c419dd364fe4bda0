"""Token ranges compared with plain lists and sets of tokens."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.model.token_ranges import (
    count_tokens,
    expand_ranges,
    intersect_range,
    intersect_ranges,
    iterate_tokens,
    merge_ranges,
    span_columns,
    split_ranges,
    subtract_ranges,
    to_ranges,
    to_spans,
    tokens_in_range,
)

TOKENS = st.lists(st.integers(0, 40), max_size=30)
ANY_RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12)
"""In any order, with overlaps and duplicates."""
SORTED_RANGES = ANY_RANGES.map(merge_ranges)
BOUNDS = st.integers(0, 60)


def tokens_of(ranges):
    return [first + offset for first, n in ranges for offset in range(n)]


def are_fewest(ranges):
    """Whether the ranges ascend with a gap between each two, so that no two could be one."""
    return all(n > 0 for _, n in ranges) and all(first + n < after for (first, n), (after, _) in pairwise(ranges))


@given(TOKENS)
def test_to_ranges_has_each_token_once_in_the_fewest_ranges(tokens):
    found = to_ranges(tokens)
    assert tokens_of(found) == sorted(set(tokens))
    assert are_fewest(found)
    assert to_ranges(dict.fromkeys(tokens)) == to_ranges(iter(tokens)) == found


@given(BOUNDS, BOUNDS, st.integers(-3, 3).filter(bool))
def test_to_ranges_of_a_python_range_equals_that_of_its_tokens(start, stop, step):
    tokens = range(start, stop, step)
    assert to_ranges(tokens) == to_ranges(list(tokens))


@given(TOKENS)
def test_to_spans_keeps_the_order_and_joins_only_consecutive_tokens(tokens):
    found = list(to_spans(tokens))
    assert [token for first, last in found for token in range(first, last + 1)] == tokens
    assert all(last + 1 != first for (_, last), (first, _) in pairwise(found))


@given(BOUNDS, BOUNDS, st.integers(-3, 3).filter(bool))
def test_to_spans_of_a_python_range_equals_that_of_its_tokens(start, stop, step):
    tokens = range(start, stop, step)
    assert list(to_spans(tokens)) == list(to_spans(list(tokens)))


@given(TOKENS)
def test_span_columns_are_the_spans_of_the_same_tokens(tokens):
    firsts, lasts = span_columns(to_ranges(tokens))
    assert list(zip(firsts, lasts, strict=True)) == list(to_spans(sorted(set(tokens))))


@given(ANY_RANGES)
def test_expanded_ranges_have_every_token_in_order(ranges):
    expected = tokens_of(ranges)
    assert list(expand_ranges(ranges)) == list(iterate_tokens(ranges)) == expected
    assert count_tokens(ranges) == len(expected)


def test_single_range_expands_to_a_python_range():
    assert expand_ranges([(5, 3)]) == tokens_in_range((5, 3)) == range(5, 8)
    assert expand_ranges([]) == []


@given(ANY_RANGES, st.integers(1, 20))
def test_split_ranges_fill_each_batch_but_the_last(ranges, tokens_max):
    batches = list(split_ranges(ranges, tokens_max))
    assert [token for batch in batches for token in tokens_of(batch)] == tokens_of(ranges)
    sizes = [count_tokens(batch) for batch in batches]
    assert all(size == tokens_max for size in sizes[:-1])
    assert all(0 < size <= tokens_max for size in sizes)


@given(ANY_RANGES)
def test_merged_ranges_have_the_same_tokens_once_in_the_fewest_ranges(ranges):
    found = merge_ranges(ranges)
    assert tokens_of(found) == sorted(set(tokens_of(ranges)))
    assert are_fewest(found)


@given(SORTED_RANGES, SORTED_RANGES)
def test_subtract_and_intersect_equal_the_operations_on_sets(some, others):
    assert tokens_of(subtract_ranges(some, others)) == sorted(set(tokens_of(some)) - set(tokens_of(others)))
    assert tokens_of(intersect_ranges(some, others)) == sorted(set(tokens_of(some)) & set(tokens_of(others)))


@given(st.tuples(st.integers(0, 60), st.integers(1, 12)), BOUNDS, BOUNDS)
def test_intersect_range_has_the_tokens_between_two_bounds(token_range, first, end):
    expected = [token for token in tokens_of([token_range]) if first <= token < end]
    assert list(intersect_range(token_range, first, end)) == expected


@pytest.mark.parametrize("empty", [[], range(0), range(7, 7), range(7, 3)])
def test_no_tokens_are_no_ranges(empty):
    assert to_ranges(empty) == list(to_spans(empty)) == []
    assert list(split_ranges([], 5)) == merge_ranges([]) == subtract_ranges([], [(1, 2)]) == []
