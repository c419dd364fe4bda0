"""Exponential backoff between retries. Pure: the caller passes the random number."""

from __future__ import annotations

from typing import Final

import msgspec

DOUBLINGS_MAX: Final = 64
"""More doublings than any cap needs, and small enough not to overflow a float."""


class Backoff(msgspec.Struct, frozen=True):
    """Doubles from `first_s` to `longest_s`. Jitter keeps replicas that failed together from retrying together."""

    first_s: float
    longest_s: float

    def pause_s(self, streak: int, chance: float) -> float:
        """Pause after failure number `streak` (from 1): between half and all of the doubled time; 0 <= chance < 1."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(streak - 1, 30))
        return whole * (0.5 + chance / 2)


class DispatchBackoff(msgspec.Struct, frozen=True):
    """After failed dispatches: `min(first_s * 2^attempt + jitter, longest_s)`, with a jitter from 0 to `jitter_s`."""

    first_s: float = 1.0
    longest_s: float = 30.0
    jitter_s: float = 0.5

    def pause_s(self, attempt: int, chance: float) -> float:
        """Pause after failed attempt number `attempt` (from 0; negative numbers count as 0); 0 <= chance < 1."""
        doubled = self.first_s * 2.0 ** min(max(attempt, 0), DOUBLINGS_MAX)
        return min(doubled + self.jitter_s * chance, self.longest_s)
