"""Shows whose limits changed in PostgreSQL: the leader copies them to Redis a moment later. Pure.

The process that changes a limit pushes it to Redis after the commit, so the copy usually changes nothing. The copy is
needed when that process has died in between, or when an operator has changed the limit in SQL.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from rota.model.ids import ShowId

LIMITS_CHANNEL: Final = "rota_limits"
"""PostgreSQL notifies of changed limits here, with the id of the show; servers notify of pushed limits and of repaired
counts, with other payloads, so that dispatchers try again."""
COPY_DELAY_S: Final = 1.0


class ChangedLimits:
    def __init__(self) -> None:
        self._changed_s: dict[ShowId, float] = {}

    def notified(self, payload: str, now_s: float) -> None:
        """A notification on `LIMITS_CHANNEL`; only those whose payload is the id of a show tell of a change."""
        try:
            show = ShowId(UUID(payload))
        except ValueError:
            return
        self._changed_s.setdefault(show, now_s)

    def take_due(self, now_s: float) -> set[ShowId]:
        """Shows whose limits changed `COPY_DELAY_S` ago or earlier."""
        due = {show for show, changed_s in self._changed_s.items() if now_s - changed_s >= COPY_DELAY_S}
        for show in due:
            del self._changed_s[show]
        return due
