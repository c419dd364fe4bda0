"""`rota show`, `pool`, `dept`, `folder`, `sub`, `job` and `layer`: reads and changes of quota.

Each command opens the accounting service at the configured URL or in the local stack, makes one call and prints a page.
A change commits with its audit entry before anything is printed. After a crash or a lost reply the same command can be
repeated: setting a limit is idempotent, and creating an existing name is refused.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from decimal import Decimal

from rota import runtime
from rota.accounting.admin import QuotaAdmin
from rota.accounting.resources import CapsUpdate, CoresInput, QuotaChange
from rota.accounting.service import AccountingService
from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import find_job_unambiguous, find_layer, parse_full_id
from rota.cli.core.tables import UNLIMITED_TEXT, CliPage, Table
from rota.cli.local.up import local_url
from rota.cli.quota.view import change_page
from rota.engine.queries.jobs import JobQueries
from rota.infra.postgres import Database, check_current
from rota.model.errors import InvalidInput, InvalidSetting
from rota.model.ids import JobId, LayerId
from rota.model.settings import Settings
from rota.model.units import parse_cores

_PERCENT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,4})?) ?%", re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,12}", re.ASCII)


@asynccontextmanager
async def open_accounting(settings: Settings) -> AsyncIterator[AccountingService]:
    """Redis must be configured, because every change is published to it; it need not be up."""
    url = settings.postgres.url or local_url(settings, "postgres")
    if not url:
        raise InvalidSetting("PostgreSQL is not configured: set postgres.url, or start a local one with `rota up`.")
    database = await Database.open(runtime.postgres_target(settings, url))
    try:
        await check_current(database)
        async with runtime.open_accounting(settings, database, local_url(settings, "redis")) as accounting:
            yield accounting
    finally:
        await database.close()


def read(settings: Settings, page: Callable[[AccountingService], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def load() -> CliPage:
        async with open_accounting(settings) as accounting:
            return await page(accounting)

    print_page(asyncio.run(load()), form=form)


def change(
    settings: Settings, work: Callable[[QuotaAdmin, str], Awaitable[QuotaChange]], *, form: OutputFormat
) -> None:
    """Run `work` as the current user."""

    async def done() -> QuotaChange:
        async with open_accounting(settings) as accounting:
            return await accounting.change(lambda admin: work(admin, current_actor()))

    print_page(change_page(asyncio.run(done())), form=form)


def current_actor() -> str:
    """The actor of audit entries: the user id of this process, regardless of the environment."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:uid-{os.getuid()}"


def print_page(page: CliPage, *, form: OutputFormat) -> None:
    if form.is_data:
        output.print_data(page.data, form)
        return
    for part in page.parts:
        if isinstance(part, Table):
            table = part if form is OutputFormat.WIDE else part.without_wide_columns()
            output.print_table(table.columns, table.rows, short=form is not OutputFormat.WIDE)
        else:
            output.print_text(part)


async def create_subscription(
    admin: QuotaAdmin, actor: str, show: str, pool: str, size: str, burst: str, gpu_burst: str | None
) -> QuotaChange:
    cores, gpus = parse_burst(burst, size), parse_gpu_count(gpu_burst or UNLIMITED_TEXT)
    return await admin.create_subscription(show, pool, actor=actor, size=size, burst=cores, gpu_burst=gpus)


async def change_subscription(
    admin: QuotaAdmin, actor: str, show: str, pool: str, size: str | None, burst: str | None, gpu_burst: str | None
) -> QuotaChange:
    """A burst in percent refers to the new size if there is one, otherwise to the current size."""
    base_size: CoresInput | None = size
    if size is None and burst is not None and _PERCENT.fullmatch(burst):
        sizes = {share.name: share.limits["int_size"] for share in await admin.subscriptions(show)}
        base_size = Decimal(sizes.get(pool, 0)).scaleb(-2)
    cores = None if burst is None else parse_burst(burst, base_size)
    gpus = None if gpu_burst is None else parse_gpu_count(gpu_burst)
    return await admin.change_subscription(show, pool, actor=actor, size=size, burst=cores, gpu_burst=gpus)


async def change_job(
    admin: QuotaAdmin, actor: str, show: str, job: str, max_cores: str | None, max_gpus: str | None
) -> QuotaChange:
    caps = parse_caps(max_cores=max_cores, max_gpus=max_gpus)
    job_id = JobId(parse_full_id(job) or await find_job_unambiguous(JobQueries(admin.database), job))
    return await admin.change_job(show, job_id, actor=actor, max_cores=caps.max_cores, max_gpus=caps.max_gpus)


async def change_layer(
    admin: QuotaAdmin, actor: str, show: str, layer: str, max_cores: str | None, max_gpus: str | None
) -> QuotaChange:
    caps = parse_caps(max_cores=max_cores, max_gpus=max_gpus)
    layer_id = LayerId(parse_full_id(layer) or await find_layer(admin.database, layer))
    return await admin.change_layer(show, layer_id, actor=actor, max_cores=caps.max_cores, max_gpus=caps.max_gpus)


def parse_burst(burst: str, size: CoresInput | None) -> CoresInput:
    """The burst as `QuotaAdmin` expects it: `150%` is relative to `size`, anything else is cores."""
    percent = _PERCENT.fullmatch(burst)
    if percent is None or size is None:
        return burst
    share = Decimal(parse_cores(size)) * Decimal(percent[1]).scaleb(-4)
    return f"{share.normalize():f}"


def parse_caps(
    *,
    min_cores: str | None = None,
    max_cores: str | None = None,
    min_gpus: str | None = None,
    max_gpus: str | None = None,
) -> CapsUpdate:
    """The caps from the options; `unlimited` is accepted as it is printed."""
    return CapsUpdate(
        min_cores=min_cores,
        max_cores="-1" if max_cores == UNLIMITED_TEXT else max_cores,
        min_gpus=None if min_gpus is None else parse_gpu_count(min_gpus),
        max_gpus=None if max_gpus is None else parse_gpu_count(max_gpus),
    )


def parse_gpu_count(text: str) -> int:
    if text == UNLIMITED_TEXT:
        return -1
    if not _INTEGER.fullmatch(text):
        raise InvalidInput(f"{text[:40]!r} is not a valid number of GPUs: use a whole number, such as 4.")
    return int(text)


def require_any_option(*options: str | None) -> None:
    if all(option is None for option in options):
        raise InvalidInput("There is nothing to change: give at least one limit, see --help.")
