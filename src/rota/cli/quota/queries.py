"""What the books say: limits from PostgreSQL, with what is used of them now (`rota.accounting.usage`)."""

from __future__ import annotations

from collections.abc import Sequence

from rota.accounting.resources import QuotaItem, Show
from rota.accounting.service import AccountingService
from rota.accounting.usage import ShowUsage
from rota.cli.core import tables as view
from rota.cli.core.tables import CliPage
from rota.model.quota import Level


async def list_shows(books: AccountingService) -> CliPage:
    found = await books.admin.shows()
    return view.shows_page(found, {show.name: await _subscriptions_with_usage(books, show) for show in found})


async def show_info(books: AccountingService, name: str) -> CliPage:
    admin, show = books.admin, await books.admin.show(name)
    counting = await ShowUsage.of(books, show)
    shares = counting.with_usage(Level.SUBSCRIPTION, await admin.subscriptions(name))
    folders = counting.with_usage(Level.FOLDER, await admin.folders(name))
    points = counting.with_usage(Level.POINT, await admin.points(name))
    return view.show_info_page(show, shares, folders, points, is_old=counting.is_stale)


async def list_pools(books: AccountingService) -> CliPage:
    shares = {show.name: await _subscriptions_with_usage(books, show) for show in await books.admin.shows()}
    return view.pools_page(await books.admin.pools(), shares)


async def list_departments(books: AccountingService, show: str | None) -> CliPage:
    admin = books.admin
    if show is None:
        points = {each.name: await admin.points(each.name) for each in await admin.shows()}
        return view.depts_page(await admin.depts(), points)
    counting = await ShowUsage.of(books, await admin.show(show))
    return view.caps_page(
        "point", show, counting.with_usage(Level.POINT, await admin.points(show)), is_old=counting.is_stale
    )


async def list_folders(books: AccountingService, show: str) -> CliPage:
    counting = await ShowUsage.of(books, await books.admin.show(show))
    found = counting.with_usage(Level.FOLDER, await books.admin.folders(show))
    return view.caps_page("folder", show, found, is_old=counting.is_stale)


async def list_subscriptions(books: AccountingService, show: str) -> CliPage:
    counting = await ShowUsage.of(books, await books.admin.show(show))
    found = counting.with_usage(Level.SUBSCRIPTION, await books.admin.subscriptions(show))
    return view.subscriptions_page(show, found, is_old=counting.is_stale)


async def _subscriptions_with_usage(books: AccountingService, show: Show) -> Sequence[QuotaItem]:
    return (await ShowUsage.of(books, show)).with_usage(Level.SUBSCRIPTION, await books.admin.subscriptions(show.name))
