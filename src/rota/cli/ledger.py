"""`rota ledger`: whether the books agree, and how they fill.

`audit` compares Redis, the five tables and procs key by key, without stopping anybody; its exit status is 1 when
something does not agree. `--repair` brings all of them to what PostgreSQL says, and audits again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rota.accounting import audit as auditing
from rota.accounting.audit import Audited, Line, Problem
from rota.accounting.books import Books
from rota.accounting.items import Item, Show
from rota.accounting.live import state, wire
from rota.cli import books as opening
from rota.cli import output
from rota.cli.books_view import Page, Table, bar, cores, in_force, show_data
from rota.cli.form import Form
from rota.model.errors import RedisUnavailable
from rota.model.quota import Level, Usage
from rota.model.settings import Settings

WORDS = {
    Problem.LOW: "Redis counts too little",
    Problem.HIGH: "Redis counts too much",
    Problem.UNREADABLE: "cannot be read in Redis",
    Problem.LIMITS: "limits differ in Redis",
    Problem.TABLE: "the table is wrong",
}


async def audit(settings: Settings, name: str | None, *, repair: bool, form: Form, whole: bool) -> int:
    async with opening.opened(settings) as books:
        shows = [await books.admin.show(name)] if name else await books.admin.shows()
        if repair:
            await _repair(books, shows)
            shows = [await books.admin.show(show.name) for show in shows]
        found = [await auditing.audit(books, show) for show in shows]
        strangers = await _strangers(books) if name is None else []
        page = _audit_page(found, strangers, whole=whole)
    opening.print_page(page, form=form)
    return 0 if all(each.ok for each in found) and not strangers else 1


async def _repair(books: Books, shows: Sequence[Show]) -> None:
    for show in shows:
        await auditing.repair(books, show)
    if books.live:
        await state.unlink(books.live.client, await _strangers(books))


async def _strangers(books: Books) -> list[str]:
    return await auditing.strangers(books.live, list(await books.managed())) if books.live else []


def _audit_page(found: Sequence[Audited], strangers: Sequence[str], *, whole: bool) -> Page:
    parts: list[str | Table] = []
    for each in found:
        parts.append(_verdict(each))
        lines = each.lines if whole else [line for line in each.lines if line.problem]
        if lines:
            columns = ("level", "name", "procs", "table", "Redis", "")
            parts.append(Table(columns, [_line(line) for line in lines]))
    if strangers:
        parts.append(f"Keys in Redis that no show knows: {', '.join(strangers[:5])}{', …' if strangers[5:] else ''}")
    if strangers or not all(each.ok for each in found):
        parts.append("`rota ledger audit --repair` brings everything to what PostgreSQL says.")
    data = {"ok": all(each.ok for each in found) and not strangers, "shows": found, "strangers": strangers}
    return Page(data, parts or ["There is no show yet: `rota show create NAME` makes one."])


def _verdict(found: Audited) -> str:
    wrong = sum(line.problem is not None for line in found.lines)
    keeper = "Redis and PostgreSQL" if found.show.managed else "PostgreSQL"
    if found.seeded is False:
        return f"{found.show.name}: Redis has not been seeded under fence {found.show.fence}; nothing can be booked."
    if wrong:
        return f"{found.show.name}: {wrong} of {len(found.lines)} keys do not agree."
    return f"{found.show.name}: {len(found.lines)} keys agree in {keeper}."


def _line(line: Line) -> tuple[str, ...]:
    told = WORDS[line.problem] if line.problem else ""
    return (line.level.value, line.name, _usage(line.procs), _usage(line.table), _usage(line.redis), told)


def _usage(usage: Usage | None) -> str:
    if usage is None:
        return "-"
    return f"{cores(usage.cores)} cores" + (f", {usage.gpus} GPUs" if usage.gpus else "")


async def watch(settings: Settings, *, every_s: float, once: bool, form: Form) -> None:
    """Until Ctrl-C, or once."""
    async with opening.opened(settings) as books:
        if once or form.is_data:
            opening.print_page(await _standing_page(books), form=form)
            return
        await _live(books, every_s)


async def _live(books: Books, every_s: float) -> None:
    from rich.live import Live

    with Live(console=output.console(), auto_refresh=False) as view:
        while True:
            [part] = (await _standing_page(books)).parts
            view.update(output.table(part.columns, part.rows) if isinstance(part, Table) else part, refresh=True)
            await asyncio.sleep(every_s)


async def _standing_page(books: Books) -> Page:
    rows: list[tuple[str, ...]] = []
    data = []
    for show in await books.admin.shows():
        shares = await books.admin.subscriptions(show.name)
        told, where = await _usages(books, show)
        for share in shares:
            usage = told.get(wire.name(Level.SUBSCRIPTION, share.id), share.usage)
            rows.append(_share_row(show, share, usage, where))
            data.append({"show": show_data(show), "pool": share.name, "used": usage, "kept": where})
    columns = ("show", "pool", "used", "size", "burst", "of burst", "GPUs", "told by")
    return Page(data, [Table(columns, rows) if rows else "No show has a subscription yet: see `rota sub --help`."])


async def _usages(books: Books, show: Show) -> tuple[dict[str, Usage], str]:
    """What is used now by short name, and who says so."""
    if not show.managed or books.live is None:
        return {}, "PostgreSQL"
    keys = books.live.keys.of_show(str(show.id))
    try:
        if not await books.live.is_seeded(show.id, show.fence):
            return {}, "PostgreSQL (Redis is not seeded)"
        found = await state.counted(books.live.client, keys, await state.names_in_use(books.live.client, keys))
    except RedisUnavailable:
        return {}, "PostgreSQL (Redis is away)"
    return {name: each.usage for name, each in found.items() if each.usage}, "Redis"


def _share_row(show: Show, share: Item, usage: Usage, where: str) -> tuple[str, ...]:
    burst = in_force("subscription", "int_burst", share.limits)
    size = share.limits["int_size"]
    return (
        show.name,
        share.name,
        cores(usage.cores),
        cores(size),
        cores(burst or 0),
        bar(usage.cores, burst, size),
        str(usage.gpus),
        where,
    )
