"""Shows whose bookings are refused for a while: Redis may count frames that have ended. Pure.

A release that never reached Redis takes from a show's limit, in the worst case all of it. Causes are many (a process
that died or was cancelled, a reply that was lost twice), so this looks at the effect: a show that is refused for longer
than a moment is compared with PostgreSQL. A show may be at its limit for hours, so comparisons of a large one become
rare: they never take more than a small part of the time.
"""

from __future__ import annotations

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


class _Suspicion(msgspec.Struct):
    due_s: float
    refused_s: float


class SuspectedShows:
    def __init__(self) -> None:
        self._suspicions: dict[ShowId, _Suspicion] = {}

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

    def compared(self, show: ShowId, took_s: float, now_s: float) -> None:
        if (suspicion := self._suspicions.get(show)) is not None:
            suspicion.due_s = max(suspicion.due_s, now_s + took_s * PAUSE_PER_DURATION)
