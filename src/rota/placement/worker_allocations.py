"""What is booked on one worker, as runs of tokens. Pure; costs grow with runs, not with frames.

The totals always equal the sum over the spans: adding what is there changes nothing, removing what is not neither.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rota.model.protocol import TokenRange
from rota.placement.requirements import Resources

ABSENT_HEARTBEATS_MAX: Final = 2
"""Heartbeats in a row that do not list a frame before it is taken to have ended."""


class AllocatedRange:
    """Consecutive tokens with one need. `since` is the last heartbeat that was heard before they were assigned."""

    __slots__ = ("absent", "end", "first", "need", "since")

    def __init__(self, first: int, end: int, need: Resources, since: int, absent: int = 0) -> None:
        self.first = first
        self.end = end
        self.need = need
        self.since = since
        self.absent = absent

    def subrange(self, first: int, end: int) -> AllocatedRange:
        return AllocatedRange(first, end, self.need, self.since, self.absent)

    def continues(self, before: AllocatedRange) -> bool:
        return before.end == self.first and (before.need, before.since, before.absent) == (
            self.need,
            self.since,
            self.absent,
        )


class WorkerAllocations:
    __slots__ = ("_firsts", "_spans", "cores", "gpus", "memory_mb", "tokens")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._spans: list[AllocatedRange] = []
        self.tokens = 0
        self.cores = 0
        self.gpus = 0
        self.memory_mb = 0

    def token_ranges(self) -> Iterator[TokenRange]:
        return ((span.first, span.end - span.first) for span in self._spans)

    def add(self, first: int, n: int, need: Resources, since: int) -> None:
        self.remove(first, n)
        self._insert(AllocatedRange(first, first + n, need, since))

    def remove(self, first: int, n: int) -> int:
        """How many of these tokens were there."""
        end = first + n
        begin = bisect_right(self._firsts, first) - 1
        if begin < 0 or self._spans[begin].end <= first:
            begin += 1
        stop, kept, removed = begin, [], 0
        while stop < len(self._spans) and (span := self._spans[stop]).first < end:
            low, high = max(first, span.first), min(end, span.end)
            removed += high - low
            self._count(span.need, low - high)
            kept += [span.subrange(*each) for each in ((span.first, low), (high, span.end)) if each[0] < each[1]]
            stop += 1
        if stop > begin:
            self._spans[begin:stop] = kept
            self._firsts[begin:stop] = [span.first for span in kept]
        return removed

    def reconcile(self, held: Sequence[TokenRange], number: int) -> list[TokenRange]:
        """Compare with what heartbeat `number` lists, in order; returns listed tokens that nobody booked here.

        A beat that was under way when a frame was assigned cannot list it. The first one heard afterwards may be that
        one, so only those behind it count.
        """
        if not self._spans:
            return list(held)
        for first, n in subtract_ranges(self.token_ranges(), held):
            self._count_absence(first, n, number)
        return subtract_ranges(held, self.token_ranges())

    def _count_absence(self, first: int, n: int, number: int) -> None:
        span = self._spans[bisect_right(self._firsts, first) - 1]
        if number <= span.since + 1:
            return
        self.remove(first, n)
        if span.absent + 1 < ABSENT_HEARTBEATS_MAX:
            self._insert(AllocatedRange(first, first + n, span.need, span.since, span.absent + 1))

    def _insert(self, span: AllocatedRange) -> None:
        """Into a gap."""
        at = bisect_right(self._firsts, span.first)
        self._count(span.need, span.end - span.first)
        if at and span.continues(self._spans[at - 1]):
            self._spans[at - 1].end = span.end
            return
        self._spans.insert(at, span)
        self._firsts.insert(at, span.first)

    def _count(self, need: Resources, n: int) -> None:
        self.tokens += n
        self.cores += n * need.cores
        self.gpus += n * need.gpus
        self.memory_mb += n * need.memory_mb


def subtract_ranges(runs: Iterable[TokenRange], others: Iterable[TokenRange]) -> list[TokenRange]:
    """What of `runs` is not in `others`; both in order and without overlaps."""
    left: list[TokenRange] = []
    rest = iter(others)
    low, high = _next_bounds(rest)
    for first, n in runs:
        end = first + n
        while high is not None and high <= first:
            low, high = _next_bounds(rest)
        while high is not None and low < end:
            if first < low:
                left.append((first, low - first))
            first = max(first, high)
            if high > end:
                break
            low, high = _next_bounds(rest)
        if first < end:
            left.append((first, end - first))
    return left


def intersect_ranges(runs: Sequence[TokenRange], others: Sequence[TokenRange]) -> list[TokenRange]:
    return subtract_ranges(runs, subtract_ranges(runs, others))


def merge_ranges(runs: Iterable[TokenRange]) -> list[TokenRange]:
    """Sorted, and merged where they touch or overlap."""
    merged: list[TokenRange] = []
    for first, n in sorted(runs):
        if merged and first <= merged[-1][0] + merged[-1][1]:
            start, before = merged[-1]
            merged[-1] = (start, max(before, first + n - start))
        else:
            merged.append((first, n))
    return merged


def _next_bounds(rest: Iterator[TokenRange]) -> tuple[int, int | None]:
    run = next(rest, None)
    return (0, None) if run is None else (run[0], run[0] + run[1])
