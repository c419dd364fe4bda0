"""Consecutive tokens as ranges: make, expand, count, split, merge, subtract and intersect them. Pure.

Frames that are claimed together have consecutive tokens, so thousands of frames are a few ranges. There are two forms:
- a `TokenRange`, (first token, number of tokens), in messages and in memory;
- a `TokenSpan`, (first token, last token), in statements and scripts, where a range is a BETWEEN.

Functions that combine two lists need both sorted and without overlaps (`merge_ranges` makes them so); their cost grows
with the number of ranges, not of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

TokenRange = tuple[int, int]
"""First token and number of consecutive tokens."""
TokenSpan = tuple[int, int]
"""First and last of consecutive tokens."""


def to_ranges(tokens: Iterable[int]) -> list[TokenRange]:
    """The distinct tokens as the fewest ranges, ascending."""
    if isinstance(tokens, range) and tokens.step == 1:
        return [(tokens.start, len(tokens))] if tokens else []
    distinct = sorted(set(tokens))
    if distinct and distinct[-1] - distinct[0] < len(distinct):
        return [(distinct[0], len(distinct))]
    ranges: list[TokenRange] = []
    # Not by `to_spans`: one step of a generator per range would cost more than the loop.
    first = end = distinct[0] if distinct else 0
    for token in distinct:
        if token != end:
            ranges.append((first, end - first))
            first = token
        end = token + 1
    if first < end:
        ranges.append((first, end - first))
    return ranges


def to_spans(tokens: Iterable[int]) -> Iterator[TokenSpan]:
    """The tokens as spans in the given order: a token starts a new span unless it follows the one before it."""
    if isinstance(tokens, range) and tokens.step == 1:
        if tokens:
            yield tokens.start, tokens.stop - 1
        return
    first = last = None
    for token in tokens:
        if last is not None and token == last + 1:
            last = token
            continue
        if first is not None and last is not None:
            yield first, last
        first = last = token
    if first is not None and last is not None:
        yield first, last


def span_columns(ranges: Iterable[TokenRange]) -> tuple[list[int], list[int]]:
    """The first and the last tokens of the ranges, as two columns for a statement."""
    firsts: list[int] = []
    lasts: list[int] = []
    for first, n in ranges:
        firsts.append(first)
        lasts.append(first + n - 1)
    return firsts, lasts


def tokens_in_range(token_range: TokenRange) -> range:
    first, n = token_range
    return range(first, first + n)


def iterate_tokens(ranges: Iterable[TokenRange]) -> Iterator[int]:
    """Each token, in the order of the ranges, without a list of them all."""
    return (token for first, n in ranges for token in range(first, first + n))


def expand_ranges(ranges: Sequence[TokenRange]) -> Sequence[int]:
    """Each token, in the order of the ranges. A single range stays a `range`, which callees handle as a whole."""
    if len(ranges) == 1:
        return tokens_in_range(ranges[0])
    return [token for first, n in ranges for token in range(first, first + n)]


def count_tokens(ranges: Sequence[TokenRange]) -> int:
    if len(ranges) == 1:
        return ranges[0][1]
    return sum([n for _, n in ranges]) if ranges else 0


def split_ranges(ranges: Iterable[TokenRange], tokens_max: int) -> Iterator[list[TokenRange]]:
    """Ranges in order, in batches of at most `tokens_max` tokens; a range that does not fit is split."""
    batch: list[TokenRange] = []
    free = tokens_max
    for first, n in ranges:
        while n > 0:
            taken = min(n, free)
            batch.append((first, taken))
            first, n, free = first + taken, n - taken, free - taken
            if not free:
                yield batch
                batch, free = [], tokens_max
    if batch:
        yield batch


def merge_ranges(ranges: Iterable[TokenRange]) -> list[TokenRange]:
    """The same tokens as the fewest ranges, ascending; the input may overlap and be in any order."""
    merged: list[TokenRange] = []
    for first, n in sorted(ranges):
        if merged and first <= merged[-1][0] + merged[-1][1]:
            start, before = merged[-1]
            merged[-1] = (start, max(before, first + n - start))
        else:
            merged.append((first, n))
    return merged


def subtract_ranges(ranges: Iterable[TokenRange], others: Iterable[TokenRange]) -> list[TokenRange]:
    """Tokens of `ranges` that are not in `others`; both sorted and without overlaps."""
    result: list[TokenRange] = []
    rest = iter(others)
    low, high = _next_bounds(rest)
    for first, n in ranges:
        end = first + n
        while high is not None and high <= first:
            low, high = _next_bounds(rest)
        while high is not None and low < end:
            if first < low:
                result.append((first, low - first))
            first = max(first, high)
            if high > end:
                break
            low, high = _next_bounds(rest)
        if first < end:
            result.append((first, end - first))
    return result


def intersect_ranges(ranges: Sequence[TokenRange], others: Iterable[TokenRange]) -> list[TokenRange]:
    """Tokens of `ranges` that are also in `others`; both sorted and without overlaps."""
    return subtract_ranges(ranges, subtract_ranges(ranges, others))


def intersect_range(token_range: TokenRange, first: int, end: int) -> range:
    """Tokens of one range in [first, end)."""
    return range(max(token_range[0], first), min(token_range[0] + token_range[1], end))


def _next_bounds(rest: Iterator[TokenRange]) -> tuple[int, int | None]:
    """The first token of the next range and the one after its last; (0, None) if there is none."""
    each = next(rest, None)
    return (0, None) if each is None else (each[0], each[0] + each[1])
