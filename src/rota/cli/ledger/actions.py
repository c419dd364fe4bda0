"""`rota ledger`: checks quota accounting and shows usage.

`audit` compares Redis, the five accounting tables and the procs key by key, without blocking bookings; its exit status
is 1 on a mismatch. `--repair` sets all of them to PostgreSQL's values and audits again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rota.accounting import audit as auditing
from rota.accounting.audit import LedgerAudit, LedgerAuditLine, LedgerProblem
from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.accounting.resources import QuotaItem, Show
from rota.accounting.service import AccountingService
from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import CliPage, Table, cap_of_field, cores_text, show_data, usage_bar
from rota.cli.quota import actions as quota_actions
from rota.model.errors import RedisUnavailable
from rota.model.quota import Level, Usage
from rota.model.settings import Settings

PROBLEM_TEXTS = {
    LedgerProblem.LOW: "Redis counts too little",
    LedgerProblem.HIGH: "Redis counts too much",
    LedgerProblem.UNREADABLE: "unreadable in Redis",
    LedgerProblem.LIMITS: "limits differ in Redis",
    LedgerProblem.TABLE: "the table is wrong",
}


async def audit(settings: Settings, name: str | None, *, repair: bool, form: OutputFormat, whole: bool) -> int:
    async with quota_actions.open_accounting(settings) as accounting:
        shows = [await accounting.admin.show(name)] if name else await accounting.admin.shows()
        if repair:
            await _repair(accounting, shows)
            shows = [await accounting.admin.show(show.name) for show in shows]
        found = [await auditing.audit(accounting, show) for show in shows]
        unknown_keys = await _unknown_keys(accounting) if name is None else []
        page = _audit_page(found, unknown_keys, whole=whole)
    quota_actions.print_page(page, form=form)
    return 0 if all(each.ok for each in found) and not unknown_keys else 1


async def _repair(accounting: AccountingService, shows: Sequence[Show]) -> None:
    for show in shows:
        await auditing.repair(accounting, show)
    if accounting.live:
        await live_reader.unlink(accounting.live.client, await _unknown_keys(accounting))


async def _unknown_keys(accounting: AccountingService) -> list[str]:
    return (
        await auditing.orphan_keys(accounting.live, list(await accounting.managed_shows())) if accounting.live else []
    )


def _audit_page(found: Sequence[LedgerAudit], unknown_keys: Sequence[str], *, whole: bool) -> CliPage:
    parts: list[str | Table] = []
    for each in found:
        parts.append(_summary(each))
        lines = each.lines if whole else [line for line in each.lines if line.problem]
        if lines:
            columns = ("level", "name", "procs", "table", "Redis", "")
            parts.append(Table(columns, [_line_row(line) for line in lines]))
    if unknown_keys:
        parts.append(
            f"Redis keys that belong to no show: {', '.join(unknown_keys[:5])}{', …' if unknown_keys[5:] else ''}"
        )
    if unknown_keys or not all(each.ok for each in found):
        parts.append("`rota ledger audit --repair` sets everything to PostgreSQL's values.")
    data = {"ok": all(each.ok for each in found) and not unknown_keys, "shows": found, "strangers": unknown_keys}
    return CliPage(data, parts or ["There is no show yet: `rota show create NAME` creates one."])


def _summary(found: LedgerAudit) -> str:
    wrong = sum(line.problem is not None for line in found.lines)
    stores = "Redis and PostgreSQL" if found.show.managed else "PostgreSQL"
    if found.seeded is False:
        return f"{found.show.name}: Redis is not seeded under fence {found.show.fence}, so nothing can be booked."
    if wrong:
        return f"{found.show.name}: {wrong} of {len(found.lines)} keys do not agree."
    return f"{found.show.name}: {len(found.lines)} keys agree in {stores}."


def _line_row(line: LedgerAuditLine) -> tuple[str, ...]:
    problem = PROBLEM_TEXTS[line.problem] if line.problem else ""
    return (
        line.level.value,
        line.name,
        _usage_text(line.procs),
        _usage_text(line.table),
        _usage_text(line.redis),
        problem,
    )


def _usage_text(usage: Usage | None) -> str:
    if usage is None:
        return "-"
    return f"{cores_text(usage.cores)} cores" + (f", {usage.gpus} GPUs" if usage.gpus else "")


async def watch(settings: Settings, *, every_s: float, once: bool, form: OutputFormat) -> None:
    """Print usage until Ctrl-C, or once."""
    async with quota_actions.open_accounting(settings) as accounting:
        if once or form.is_data:
            quota_actions.print_page(await _usage_page(accounting), form=form)
            return
        await _watch_live(accounting, every_s)


async def _watch_live(accounting: AccountingService, every_s: float) -> None:
    from rich.live import Live

    with Live(console=output.console(), auto_refresh=False) as view:
        while True:
            [part] = (await _usage_page(accounting)).parts
            view.update(output.make_table(part.columns, part.rows) if isinstance(part, Table) else part, refresh=True)
            await asyncio.sleep(every_s)


async def _usage_page(accounting: AccountingService) -> CliPage:
    rows: list[tuple[str, ...]] = []
    data = []
    for show in await accounting.admin.shows():
        shares = await accounting.admin.subscriptions(show.name)
        usages, source = await _current_usage(accounting, show)
        for share in shares:
            usage = usages.get(script_args.counter_name(Level.SUBSCRIPTION, share.id), share.usage)
            rows.append(_subscription_row(show, share, usage, source))
            data.append({"show": show_data(show), "pool": share.name, "used": usage, "kept": source})
    columns = ("show", "pool", "used", "size", "burst", "of burst", "GPUs", "told by")
    return CliPage(data, [Table(columns, rows) if rows else "No show has a subscription yet: see `rota sub --help`."])


async def _current_usage(accounting: AccountingService, show: Show) -> tuple[dict[str, Usage], str]:
    """Current usage by counter name, and the store it was read from."""
    if not show.managed or accounting.live is None:
        return {}, "PostgreSQL"
    keys = accounting.live.keys.show_keys(str(show.id))
    try:
        if not await accounting.live.is_seeded(show.id, show.fence):
            return {}, "PostgreSQL (Redis is not seeded)"
        found = await live_reader.read_counters(
            accounting.live.client, keys, await live_reader.names_in_use(accounting.live.client, keys)
        )
    except RedisUnavailable:
        return {}, "PostgreSQL (Redis does not answer)"
    return {name: each.usage for name, each in found.items() if each.usage}, "Redis"


def _subscription_row(show: Show, share: QuotaItem, usage: Usage, source: str) -> tuple[str, ...]:
    burst = cap_of_field("subscription", "int_burst", share.limits)
    size = share.limits["int_size"]
    return (
        show.name,
        share.name,
        cores_text(usage.cores),
        cores_text(size),
        cores_text(burst or 0),
        usage_bar(usage.cores, burst, size),
        str(usage.gpus),
        source,
    )
