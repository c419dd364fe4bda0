"""What is used of the limits of a show, as fresh as it can be had.

What a managed show uses is asked of Redis, which counts it live. When Redis does not have the show, or does not answer,
PostgreSQL's own counters are told instead, and that they are as old as the last recount.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rota.accounting.ledger import QuotaKey
from rota.accounting.resources import QuotaItem, Show
from rota.accounting.service import AccountingService
from rota.model.errors import RedisUnavailable
from rota.model.quota import Level, Usage


class ShowUsage:
    """The counters of one show."""

    def __init__(self, show: Show, live: Mapping[QuotaKey, Usage] | None) -> None:
        self.show = show
        self._live = live

    @classmethod
    async def of(cls, books: AccountingService, show: Show) -> ShowUsage:
        return cls(show, await _live_counters(books, show) if show.managed else None)

    @property
    def is_stale(self) -> bool:
        return self.show.managed and self._live is None

    def with_usage(self, level: Level, items: Sequence[QuotaItem]) -> Sequence[QuotaItem]:
        if self._live is None:
            return items
        return [msgspec.structs.replace(item, usage=self._live.get((level, item.id), Usage())) for item in items]


async def _live_counters(books: AccountingService, show: Show) -> Mapping[QuotaKey, Usage] | None:
    try:
        if books.live is None or not await books.live.is_seeded(show.id, show.fence):
            return None
        return await books.live.counters(show.id)
    except RedisUnavailable:
        return None
