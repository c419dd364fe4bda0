"""Shows whose bookings are refused for a while: Redis may count frames that have ended. Pure.

A release that never reached Redis takes from a show's limit, in the worst case all of it. Causes are many (a process
that died or was cancelled, a reply that was lost twice), so this looks at the effect: a show that is refused for longer
than a moment is compared with PostgreSQL. A show may be at its limit for hours, so comparisons of a large one become
rare: they never take more than a small part of the time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from rota.model.ids import ShowId

PATIENCE_S: Final = 1.0
"""A show is compared when it is still refused after this time, because most releases are on their way."""
INTERVAL_S: Final = 2.0
"""Shortest time between comparisons of a show."""
FORGET_S: Final = 5.0
"""A show that is not refused for so long is not suspected any more; a queue that is refused tries again each second."""
PAUSE_PER_DURATION: Final = 50.0
"""A comparison is followed by a pause that is so many times as long."""


ROWLESS_S: Final = 1.5
"""A booking is in Redis for a moment before it has a row in PostgreSQL; after this time it counts as given up."""


class _Suspicion(msgspec.Struct):
    due_s: float
    refused_s: float


class SuspectedShows:
    def __init__(self) -> None:
        self._suspicions: dict[ShowId, _Suspicion] = {}
        self._rowless: dict[ShowId, dict[int, float]] = {}
        """Tokens that Redis alone counted at the last comparison, and since when."""

    def refused(self, show: ShowId, now_s: float) -> bool:
        """A limit that frames share refused a booking. Returns whether the show is to be compared now."""
        suspicion = self._suspicions.get(show)
        if suspicion is None or now_s - suspicion.refused_s > FORGET_S:
            self._suspicions[show] = _Suspicion(now_s + PATIENCE_S, now_s)
            return False
        suspicion.refused_s = now_s
        if now_s < suspicion.due_s:
            return False
        suspicion.due_s = now_s + INTERVAL_S
        return True

    def is_refused(self, show: ShowId, now_s: float) -> bool:
        suspicion = self._suspicions.get(show)
        return suspicion is not None and now_s - suspicion.refused_s <= FORGET_S

    def compared(self, show: ShowId, took_s: float, now_s: float) -> None:
        if (suspicion := self._suspicions.get(show)) is not None:
            suspicion.due_s = max(suspicion.due_s, now_s + took_s * PAUSE_PER_DURATION)

    def rowless_before(self, show: ShowId, tokens: Collection[int], now_s: float) -> list[int]:
        """Those of these tokens without a row that had none `ROWLESS_S` ago either."""
        since = self._rowless.get(show, {})
        return sorted(token for token in tokens if now_s - since.get(token, now_s) >= ROWLESS_S)

    def set_rowless(self, show: ShowId, tokens: Collection[int], took_s: float, now_s: float) -> float | None:
        """All tokens that Redis alone counts, by a comparison that took this long. Returns when to compare again: in so
        many seconds, or None if none of them is new."""
        before = self._rowless.pop(show, {})
        if tokens:
            self._rowless[show] = {token: before.get(token, now_s) for token in tokens}
        new = any(token not in before for token in tokens)
        return max(ROWLESS_S, took_s * PAUSE_PER_DURATION) if new else None
