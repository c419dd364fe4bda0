"""Reads limits from PostgreSQL with their current usage (`rota.accounting.usage`)."""

from __future__ import annotations

from collections.abc import Sequence

from rota.accounting.resources import QuotaItem, Show
from rota.accounting.service import AccountingService
from rota.accounting.usage import ShowUsage
from rota.cli.core import tables as view
from rota.cli.core.tables import CliPage
from rota.model.quota import Level


async def list_shows(accounting: AccountingService) -> CliPage:
    found = await accounting.admin.shows()
    return view.shows_page(found, {show.name: await _subscriptions_with_usage(accounting, show) for show in found})


async def show_info(accounting: AccountingService, name: str) -> CliPage:
    admin, show = accounting.admin, await accounting.admin.show(name)
    usage = await ShowUsage.of(accounting, show)
    shares = usage.with_usage(Level.SUBSCRIPTION, await admin.subscriptions(name))
    folders = usage.with_usage(Level.FOLDER, await admin.folders(name))
    points = usage.with_usage(Level.POINT, await admin.points(name))
    return view.show_info_page(show, shares, folders, points, is_old=usage.is_stale)


async def list_pools(accounting: AccountingService) -> CliPage:
    shares = {show.name: await _subscriptions_with_usage(accounting, show) for show in await accounting.admin.shows()}
    return view.pools_page(await accounting.admin.pools(), shares)


async def list_departments(accounting: AccountingService, show: str | None) -> CliPage:
    admin = accounting.admin
    if show is None:
        points = {each.name: await admin.points(each.name) for each in await admin.shows()}
        return view.depts_page(await admin.depts(), points)
    usage = await ShowUsage.of(accounting, await admin.show(show))
    return view.caps_page("point", show, usage.with_usage(Level.POINT, await admin.points(show)), is_old=usage.is_stale)


async def list_folders(accounting: AccountingService, show: str) -> CliPage:
    usage = await ShowUsage.of(accounting, await accounting.admin.show(show))
    found = usage.with_usage(Level.FOLDER, await accounting.admin.folders(show))
    return view.caps_page("folder", show, found, is_old=usage.is_stale)


async def list_subscriptions(accounting: AccountingService, show: str) -> CliPage:
    usage = await ShowUsage.of(accounting, await accounting.admin.show(show))
    found = usage.with_usage(Level.SUBSCRIPTION, await accounting.admin.subscriptions(show))
    return view.subscriptions_page(show, found, is_old=usage.is_stale)


async def _subscriptions_with_usage(accounting: AccountingService, show: Show) -> Sequence[QuotaItem]:
    return (await ShowUsage.of(accounting, show)).with_usage(
        Level.SUBSCRIPTION, await accounting.admin.subscriptions(show.name)
    )
