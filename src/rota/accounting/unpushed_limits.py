"""Changes of limits in PostgreSQL that nobody has pushed to Redis yet. Pure.

Whoever changes a limit pushes it right after the commit. If that process dies in between, or the change was made by
hand in SQL, nobody does. PostgreSQL notifies of both the change and the push, so a change without its push is known.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from rota.model.ids import ShowId

LIMITS_CHANNEL: Final = "rota_limits"
PUSHED: Final = "pushed:"
PATIENCE_S: Final = 1.0
"""The process that made the change has this time to push it."""


class UnpushedLimits:
    def __init__(self) -> None:
        self._changed_s: dict[ShowId, float] = {}

    def notified(self, payload: str, now_s: float) -> None:
        """A notification on `LIMITS_CHANNEL`: a show whose limits have changed, or have been pushed."""
        try:
            show = ShowId(UUID(payload.removeprefix(PUSHED)))
        except ValueError:
            return  # sent by hand, to wake the dispatchers
        if payload.startswith(PUSHED):
            self._changed_s.pop(show, None)
        else:
            self._changed_s.setdefault(show, now_s)

    def take_due(self, now_s: float) -> set[ShowId]:
        """Shows that somebody else must push now."""
        due = {show for show, changed_s in self._changed_s.items() if now_s - changed_s >= PATIENCE_S}
        for show in due:
            del self._changed_s[show]
        return due
