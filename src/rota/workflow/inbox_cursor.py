"""From which number on news is looked for: what was before is gone.

While somebody reads an old state of the database, rows that are gone lie around, and looking through them would take
longer and longer. Numbers are given out before a commit, and news may be held by others for a moment, so the floor is
that of some seconds ago, and every second all of it is looked at.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rota.infra.clock import Clock

POLL_INTERVAL_S: Final = 1.0
LAG_S: Final = 2.0


class InboxCursor:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0
        self._lately: deque[tuple[float, int]] = deque()
        self._all_at = float("-inf")

    def record_taken(self, first: int) -> None:
        """A batch has taken up news, of which this is the first; none before it was to be had."""
        now = self._clock.monotonic()
        if not self._lately or now - self._lately[-1][0] > LAG_S / 10:
            self._lately.append((now, first))

    def position(self) -> int:
        now = self._clock.monotonic()
        while self._lately and now - self._lately[0][0] > LAG_S:
            self._since = self._lately.popleft()[1]
        if now - self._all_at >= POLL_INTERVAL_S:
            self._all_at = now
            return 0
        return self._since
