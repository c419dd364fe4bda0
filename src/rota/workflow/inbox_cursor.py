"""Lowest inbox id that can still be unprocessed, so that scans skip dead rows.

While an old snapshot holds back vacuum, deleted inbox rows stay in the index and scans over them become ever slower.
Ids are assigned before a commit, and other servers may hold messages briefly, so the cursor lags by `LAG_S`, and once
per `POLL_INTERVAL_S` the whole inbox is scanned.
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
        self._recent: deque[tuple[float, int]] = deque()
        self._full_scan_at = float("-inf")

    def record_taken(self, first: int) -> None:
        """A batch has processed messages from this id on, and found none before it."""
        now = self._clock.monotonic()
        if not self._recent or now - self._recent[-1][0] > LAG_S / 10:
            self._recent.append((now, first))

    def position(self) -> int:
        now = self._clock.monotonic()
        while self._recent and now - self._recent[0][0] > LAG_S:
            self._since = self._recent.popleft()[1]
        if now - self._full_scan_at >= POLL_INTERVAL_S:
            self._full_scan_at = now
            return 0
        return self._since
