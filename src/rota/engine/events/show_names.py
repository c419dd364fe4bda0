"""Cache of show names and ids for events.

A renamed show appears under its old name for at most `CACHE_TTL_S`. Visibility of an event is decided by the id. While
PostgreSQL is unavailable, and for a deleted show, an event has only the name or id that is known; an event without an
id is visible only to readers of every show.
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
        self._expires_at = 0.0
        self._requested_at = float("-inf")

    async def ensure_loaded(self, shows: Iterable[UUID | str | None]) -> None:
        """Reload when one of these is unknown, or when the cache is older than `CACHE_TTL_S`."""
        now_s = self._clock.monotonic()
        unknown = any(show is not None and not self._is_cached(show) for show in shows)
        # Rate limit for failed loads and for names that do not exist.
        if (unknown or now_s >= self._expires_at) and now_s - self._requested_at >= MIN_RELOAD_INTERVAL_S:
            self._requested_at = now_s
            await self._reload(now_s)

    def resolve(self, show: UUID | str | None) -> tuple[UUID | None, str | None]:
        """Id and name of a show, as far as known."""
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
        self._expires_at = now_s + CACHE_TTL_S
