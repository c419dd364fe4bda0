"""How long to wait before trying again. Pure: the caller brings the chance."""

from __future__ import annotations

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Doubles from `first_s` to `longest_s`. Replicas that failed together must not come back together."""

    first_s: float
    longest_s: float

    def pause_s(self, streak: int, chance: float) -> float:
        """Pause after failure number `streak` (from 1), between half and all of the doubled time; 0 <= chance < 1."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(streak - 1, 30))
        return whole * (0.5 + chance / 2)
