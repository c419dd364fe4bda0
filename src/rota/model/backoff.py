"""How long to wait before trying again. Pure: the caller brings the chance."""

from __future__ import annotations

from typing import Final

import msgspec

DOUBLINGS_MAX: Final = 64
"""More than any cap needs, and far from where numbers end."""


class Backoff(msgspec.Struct, frozen=True):
    """Doubles from `first_s` to `longest_s`. Replicas that failed together must not come back together."""

    first_s: float
    longest_s: float

    def pause_s(self, streak: int, chance: float) -> float:
        """Pause after failure number `streak` (from 1), between half and all of the doubled time; 0 <= chance < 1."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(streak - 1, 30))
        return whole * (0.5 + chance / 2)


class DispatchBackoff(msgspec.Struct, frozen=True):
    """After failed dispatches: `min(first_s * 2^attempt + jitter, longest_s)`, the jitter from 0 up to `jitter_s`."""

    first_s: float = 1.0
    longest_s: float = 30.0
    jitter_s: float = 0.5

    def pause_s(self, attempt: int, chance: float) -> float:
        """Pause after attempt number `attempt` (from 0; what is below counts as 0) has failed; 0 <= chance < 1."""
        doubled = self.first_s * 2.0 ** min(max(attempt, 0), DOUBLINGS_MAX)
        return min(doubled + self.jitter_s * chance, self.longest_s)
