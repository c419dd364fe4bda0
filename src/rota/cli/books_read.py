"""What the books say: limits from PostgreSQL, with what is used of them now (`rota.accounting.counting`)."""

from __future__ import annotations

from collections.abc import Sequence

from rota.accounting.books import Books
from rota.accounting.counting import Counting
from rota.accounting.items import Item, Show
from rota.cli import books_view as view
from rota.cli.books_view import Page
from rota.model.quota import Level


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
