"""Allocations on one worker, as ranges of tokens. Pure; the cost grows with ranges, not with frames.

The totals always equal the sum over the ranges: adding an existing token or removing a missing one changes nothing.
Frames in series (ADR 23) take the slot and the resources of one frame, until the last of them is removed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rota.model.token_ranges import TokenRange, subtract_ranges
from rota.placement.requirements import Resources

ABSENT_HEARTBEATS_MAX: Final = 2
"""Consecutive heartbeats that do not list a frame before it counts as ended."""


class SeriesAllocation:
    """How many tokens of a series are allocated."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = 0


class AllocatedRange:
    """Consecutive tokens with one need. `since` is the last heartbeat received before they were assigned."""

    __slots__ = ("absent", "end", "first", "need", "series", "since")

    def __init__(
        self,
        first: int,
        end: int,
        need: Resources,
        since: int,
        *,
        absent: int = 0,
        series: SeriesAllocation | None = None,
    ) -> None:
        self.first = first
        self.end = end
        self.need = need
        self.since = since
        self.absent = absent
        self.series = series
        """None: each token takes a slot and the need."""

    def subrange(self, first: int, end: int) -> AllocatedRange:
        return AllocatedRange(first, end, self.need, self.since, absent=self.absent, series=self.series)

    def continues(self, before: AllocatedRange) -> bool:
        return (
            before.end == self.first
            and before.series is self.series
            and (before.need, before.since, before.absent) == (self.need, self.since, self.absent)
        )


class WorkerAllocations:
    __slots__ = ("_firsts", "_spans", "cores", "gpus", "memory_mb", "slots")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._spans: list[AllocatedRange] = []
        self.slots = 0
        """Frames that run at the same time."""
        self.cores = 0
        self.gpus = 0
        self.memory_mb = 0

    def token_ranges(self) -> Iterator[TokenRange]:
        return ((span.first, span.end - span.first) for span in self._spans)

    def add(self, first: int, n: int, need: Resources, since: int) -> None:
        self.remove(first, n)
        self._insert(AllocatedRange(first, first + n, need, since))

    def add_series(self, ranges: Iterable[TokenRange], need: Resources, since: int) -> None:
        """Add frames that run one after the other."""
        series = SeriesAllocation()
        for first, n in ranges:
            self.remove(first, n)
            self._insert(AllocatedRange(first, first + n, need, since, series=series))

    def remove(self, first: int, n: int) -> int:
        """Returns how many of these tokens were allocated."""
        end = first + n
        begin = bisect_right(self._firsts, first) - 1
        if begin < 0 or self._spans[begin].end <= first:
            begin += 1
        stop, remaining, removed = begin, [], 0
        while stop < len(self._spans) and (span := self._spans[stop]).first < end:
            low, high = max(first, span.first), min(end, span.end)
            removed += high - low
            self._count(span, low - high)
            remaining += [span.subrange(*each) for each in ((span.first, low), (high, span.end)) if each[0] < each[1]]
            stop += 1
        if stop > begin:
            self._spans[begin:stop] = remaining
            self._firsts[begin:stop] = [span.first for span in remaining]
        return removed

    def count(self, first: int, n: int) -> int:
        """How many of these tokens are allocated."""
        end, at, found = first + n, max(0, bisect_right(self._firsts, first) - 1), 0
        while at < len(self._spans) and (span := self._spans[at]).first < end:
            found += max(0, min(end, span.end) - max(first, span.first))
            at += 1
        return found

    def reconcile(self, listed: Sequence[TokenRange], number: int) -> list[TokenRange]:
        """Compare with the sorted ranges of heartbeat `number`; returns listed tokens that were not booked here.

        A heartbeat in flight when a frame was assigned cannot list it. The first one received afterwards may be that
        one, so only later ones count.
        """
        if not self._spans:
            return list(listed)
        for first, n in subtract_ranges(self.token_ranges(), listed):
            self._count_absence(first, n, number)
        return subtract_ranges(listed, self.token_ranges())

    def _count_absence(self, first: int, n: int, number: int) -> None:
        span = self._spans[bisect_right(self._firsts, first) - 1]
        if number <= span.since + 1:
            return
        self.remove(first, n)
        if span.absent + 1 < ABSENT_HEARTBEATS_MAX:
            again = span.subrange(first, first + n)
            again.absent += 1
            self._insert(again)

    def _insert(self, span: AllocatedRange) -> None:
        """Insert a range that overlaps no other."""
        at = bisect_right(self._firsts, span.first)
        self._count(span, span.end - span.first)
        if at and span.continues(self._spans[at - 1]):
            self._spans[at - 1].end = span.end
            return
        self._spans.insert(at, span)
        self._firsts.insert(at, span.first)

    def _count(self, span: AllocatedRange, tokens: int) -> None:
        """Add so many tokens of a range, or subtract them if negative."""
        n, need = tokens, span.need
        if (series := span.series) is not None:
            before, series.tokens = series.tokens, series.tokens + tokens
            n = (series.tokens > 0) - (before > 0)
        self.slots += n
        self.cores += n * need.cores
        self.gpus += n * need.gpus
        self.memory_mb += n * need.memory_mb
