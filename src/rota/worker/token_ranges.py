"""Runs of consecutive tokens: joined, cut, and remembered. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from rota.model.protocol import TokenRange

RANGES_MAX = 10_000


def merge_ranges(runs: Iterable[TokenRange]) -> list[TokenRange]:
    """The same tokens in as few runs as can be, in order; runs may overlap."""
    found: list[TokenRange] = []
    for first, n in sorted(runs):
        if found and first <= found[-1][0] + found[-1][1]:
            start = found[-1][0]
            found[-1] = (start, max(found[-1][1], first + n - start))
        else:
            found.append((first, n))
    return found


def intersect_range(run: TokenRange, first: int, end: int) -> range:
    """Tokens of `run` from `first` to before `end`."""
    return range(max(run[0], first), min(run[0] + run[1], end))


class TokenDeduplicator:
    """Tokens that came here before. A message may be delivered again long after its frames have ended.

    Kept as runs, `REMEMBERED` of them at most; the lowest tokens are forgotten first, being the oldest.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def take_new(self, first: int, n: int) -> list[TokenRange]:
        """Those of the run that were never seen, which they are from now on."""
        end = first + n
        low = bisect_right(self._ends, first - 1)
        high = bisect_right(self._firsts, end)
        found, at = [], first
        for place in range(low, high):
            if at < self._firsts[place]:
                found.append((at, self._firsts[place] - at))
            at = max(at, self._ends[place])
        if at < end:
            found.append((at, end - at))
        if found:
            self._insert_range(first, end, low, high)
        return found

    def _insert_range(self, first: int, end: int, low: int, high: int) -> None:
        """Put the run in the place of all those from `low` to before `high`, which it touches."""
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]
        if len(self._firsts) > RANGES_MAX:
            del self._firsts[0], self._ends[0]
