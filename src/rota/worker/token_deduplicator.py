"""Tokens that a session has received, so that a redelivered assignment does not run again. No I/O."""

from __future__ import annotations

from bisect import bisect_right

from rota.model.token_ranges import TokenRange

RANGES_MAX = 10_000


class TokenDeduplicator:
    """Tokens received in this session. A message may be redelivered long after its frames have ended.

    Stores at most `RANGES_MAX` ranges; the lowest tokens are the oldest and are dropped first.
    Ranges are two sorted columns here, so that a lookup is a bisection.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def take_new(self, first: int, n: int) -> list[TokenRange]:
        """Records the range and returns the parts not received before."""
        end = first + n
        low = bisect_right(self._ends, first - 1)
        high = bisect_right(self._firsts, end)
        new, at = [], first
        for index in range(low, high):
            if at < self._firsts[index]:
                new.append((at, self._firsts[index] - at))
            at = max(at, self._ends[index])
        if at < end:
            new.append((at, end - at))
        if new:
            self._insert_range(first, end, low, high)
        return new

    def _insert_range(self, first: int, end: int, low: int, high: int) -> None:
        """Replaces ranges [low, high), which the new range touches, with their union."""
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]
        if len(self._firsts) > RANGES_MAX:
            del self._firsts[0], self._ends[0]
