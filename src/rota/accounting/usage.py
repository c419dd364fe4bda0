"""Current usage of a show's limits, from the freshest source.

Redis counts managed shows live. When Redis has not seeded the show or does not answer, the counters in PostgreSQL are
used instead, marked stale: they date from the last recompute.
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
    async def of(cls, accounting: AccountingService, show: Show) -> ShowUsage:
        return cls(show, await _live_counters(accounting, show) if show.managed else None)

    @property
    def is_stale(self) -> bool:
        return self.show.managed and self._live is None

    def with_usage(self, level: Level, items: Sequence[QuotaItem]) -> Sequence[QuotaItem]:
        if self._live is None:
            return items
        return [msgspec.structs.replace(item, usage=self._live.get((level, item.id), Usage())) for item in items]


async def _live_counters(accounting: AccountingService, show: Show) -> Mapping[QuotaKey, Usage] | None:
    try:
        if accounting.live is None or not await accounting.live.is_seeded(show.id, show.fence):
            return None
        return await accounting.live.counters(show.id)
    except RedisUnavailable:
        return None
