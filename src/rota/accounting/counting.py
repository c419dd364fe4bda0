"""What is used of the limits of a show, as fresh as it can be had.

What a managed show uses is asked of Redis, which counts it live. When Redis does not have the show, or does not answer,
PostgreSQL's own counters are told instead, and that they are as old as the last recount.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rota.accounting.books import Books
from rota.accounting.items import Item, Show
from rota.accounting.ledger import Key
from rota.model.errors import RedisUnavailable
from rota.model.quota import Level, Usage


class Counting:
    """The counters of one show."""

    def __init__(self, show: Show, live: Mapping[Key, Usage] | None) -> None:
        self.show = show
        self._live = live

    @classmethod
    async def of(cls, books: Books, show: Show) -> Counting:
        return cls(show, await _live_counters(books, show) if show.managed else None)

    @property
    def is_old(self) -> bool:
        return self.show.managed and self._live is None

    def used(self, level: Level, items: Sequence[Item]) -> Sequence[Item]:
        if self._live is None:
            return items
        return [msgspec.structs.replace(item, usage=self._live.get((level, item.id), Usage())) for item in items]


async def _live_counters(books: Books, show: Show) -> Mapping[Key, Usage] | None:
    try:
        if books.live is None or not await books.live.is_seeded(show.id, show.fence):
            return None
        return await books.live.counters(show.id)
    except RedisUnavailable:
        return None
