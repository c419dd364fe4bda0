"""What the books say: limits from PostgreSQL, with what is used of them now.

What a managed show uses is asked of Redis, which counts it live. When Redis does not have the show, or does not answer,
PostgreSQL's own counters are told instead, and that they are as old as the last recount.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rota.accounting.books import Books
from rota.accounting.items import Item, Show
from rota.accounting.ledger import Key
from rota.cli import books_view as view
from rota.cli.books_view import Page
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


async def shows(books: Books) -> Page:
    found = await books.admin.shows()
    return view.shows_page(found, {show.name: await _shares(books, show) for show in found})


async def show_info(books: Books, name: str) -> Page:
    admin, show = books.admin, await books.admin.show(name)
    counting = await Counting.of(books, show)
    shares = counting.used(Level.SUBSCRIPTION, await admin.subscriptions(name))
    folders = counting.used(Level.FOLDER, await admin.folders(name))
    points = counting.used(Level.POINT, await admin.points(name))
    return view.info_page(show, shares, folders, points, is_old=counting.is_old)


async def pools(books: Books) -> Page:
    shares = {show.name: await _shares(books, show) for show in await books.admin.shows()}
    return view.pools_page(await books.admin.pools(), shares)


async def depts(books: Books, show: str | None) -> Page:
    admin = books.admin
    if show is None:
        points = {each.name: await admin.points(each.name) for each in await admin.shows()}
        return view.depts_page(await admin.depts(), points)
    counting = await Counting.of(books, await admin.show(show))
    return view.caps_page("point", show, counting.used(Level.POINT, await admin.points(show)), is_old=counting.is_old)


async def folders(books: Books, show: str) -> Page:
    counting = await Counting.of(books, await books.admin.show(show))
    found = counting.used(Level.FOLDER, await books.admin.folders(show))
    return view.caps_page("folder", show, found, is_old=counting.is_old)


async def shares(books: Books, show: str) -> Page:
    counting = await Counting.of(books, await books.admin.show(show))
    found = counting.used(Level.SUBSCRIPTION, await books.admin.subscriptions(show))
    return view.shares_page(show, found, is_old=counting.is_old)


async def _shares(books: Books, show: Show) -> Sequence[Item]:
    return (await Counting.of(books, show)).used(Level.SUBSCRIPTION, await books.admin.subscriptions(show.name))
