"""When a worker counts as silent, from the heartbeat interval that its session was given. No I/O."""

from __future__ import annotations

from typing import Final

HEARTBEAT_INTERVAL_S: Final = 2.0
"""For a session that was registered before the interval was recorded."""
SILENT_INTERVALS: Final = 1.75
SILENT_MIN_S: Final = 3.5
"""A worker is silent after `SILENT_INTERVALS` of its heartbeat interval: 3.5 s for 2 s, so that with the tick of the
reconciler a lost worker's frames are queued again within 5 s."""


def silent_after_s(heartbeat_interval_s: float) -> float:
    """How long a live worker may be silent."""
    return max(SILENT_MIN_S, SILENT_INTERVALS * heartbeat_interval_s)
