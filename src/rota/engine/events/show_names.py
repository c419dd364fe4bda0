"""Names and ids of shows for events: looked up together, remembered for a while.

A show that was renamed goes by its old name in events for `REMEMBER_S` at most. Who may see an event is decided by the
id. While PostgreSQL is away, and for a show that is not there any more, an event has the one that is known; without an
id it goes to those alone who may see every show.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

import asyncpg

from rota.infra.clock import Clock
from rota.infra.postgres import Database, query
from rota.model.errors import PostgresUnavailable

ALL_SHOWS = query(__package__, "events_shows")
CACHE_TTL_S: Final = 30.0
MIN_RELOAD_INTERVAL_S: Final = 1.0


class ShowNameCache:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._names: dict[UUID, str] = {}
        self._ids: dict[str, UUID] = {}
        self._old_at = 0.0
        self._asked_at = float("-inf")

    async def ensure_loaded(self, shows: Iterable[UUID | str | None]) -> None:
        """Look up those that are not known, and all of them when that was long ago."""
        now_s = self._clock.monotonic()
        unknown = any(show is not None and not self._is_cached(show) for show in shows)
        # However often nobody answers, or a name is told that nobody has.
        if (unknown or now_s >= self._old_at) and now_s - self._asked_at >= MIN_RELOAD_INTERVAL_S:
            self._asked_at = now_s
            await self._reload(now_s)

    def resolve(self, show: UUID | str | None) -> tuple[UUID | None, str | None]:
        """Its id and its name."""
        if isinstance(show, str):
            return self._ids.get(show), show
        return show, self._names.get(show) if show is not None else None

    def _is_cached(self, show: UUID | str) -> bool:
        return show in (self._ids if isinstance(show, str) else self._names)

    async def _reload(self, now_s: float) -> None:
        try:
            rows = await self._database.rows(ALL_SHOWS)
        except (PostgresUnavailable, asyncpg.PostgresError):
            return
        self._names = {row["pk_show"]: row["str_name"] for row in rows}
        self._ids = {name: show for show, name in self._names.items()}
        self._old_at = now_s + CACHE_TTL_S
