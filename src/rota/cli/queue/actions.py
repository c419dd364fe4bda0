"""`rota queue`: each command makes one read or one change in PostgreSQL. Neither Redis nor NATS is needed.

A change commits with its audit entry before anything is printed; after a crash or a lost reply the same command can be
repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from rota.accounting.resources import unknown_name_error
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import CliPage
from rota.cli.db import commands as db_commands
from rota.cli.queue import view as queue_view
from rota.cli.quota.actions import current_actor, print_page
from rota.engine.queries import queues
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.postgres import check_current
from rota.model.errors import PostgresBusy, Refused
from rota.model.settings import Settings
from rota.queue import CounterMode, Queue, QueueInfo, storage_report
from rota.queue.metrics import oldest_ages_s


@asynccontextmanager
async def open_queue(settings: Settings) -> AsyncIterator[Queue]:
    async with db_commands.open_database(settings) as database:
        await check_current(database)
        yield Queue(database)


def run(settings: Settings, work: Callable[[Queue], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with open_queue(settings) as queue:
            return await work(queue)

    print_page(asyncio.run(done()), form=form)


async def show_counts(queue: Queue, names: Sequence[str], *, fast: bool) -> CliPage:
    """`fast` needs trusted counters; without them the rows are counted."""
    await resolve_queues(queue, names)
    trusted = (await storage_report.storage_state(queue.database)).counters_trusted
    found = await (queue.counts_fast if fast and trusted else queue.counts_exact)(list(names) or None)
    order = dict.fromkeys(names) if names else sorted(found)
    return queue_view.counts_page({name: found[name] for name in order}, trusted=trusted)


async def list_queues(queue: Queue) -> CliPage:
    return queue_view.queues_page(await queue.queues(), await queue.counts_exact(), await oldest_ages_s(queue))


async def set_paused(queue: Queue, name: str, *, paused: bool) -> CliPage:
    await resolve_queues(queue, [name])
    changed = await queues.set_paused(queue, name, current_actor(), paused=paused)
    return queue_view.paused_page(name, (await queue.counts_exact([name]))[name], paused=paused, changed=changed)


async def rebuild_counts(queue: Queue, mode: CounterMode) -> CliPage:
    before, began = await storage_report.storage_state(queue.database), time.monotonic()
    try:
        async with queue.database.transaction() as tx:
            await queue.rebuild_counts(mode, on=tx)
            detail = {"mode": mode, "was": before.counter_mode, "trusted_before": before.counters_trusted}
            await audit.append(tx, [AuditEntry(current_actor(), "queue.rebuild_counts", "queues", detail)])
    except PostgresBusy:
        transactions = await storage_report.long_transactions(queue.database, older_than_s=0.0)
        raise Refused(queue_view.blocked_message(transactions)) from None
    return queue_view.rebuilt_page(await queue.counts_exact(), before, mode, took_s=time.monotonic() - began)


async def show_storage(queue: Queue, counter_mode: CounterMode) -> CliPage:
    database = queue.database
    return queue_view.storage_page(
        await storage_report.storage_state(database),
        await storage_report.slots(database),
        await storage_report.table_sizes(database),
        await storage_report.long_transactions(database),
        counter_mode,
    )


async def resolve_queues(queue: Queue, names: Iterable[str]) -> list[QueueInfo]:
    """The queues with these names; raises, with the closest name, for an unknown one."""
    queues = {info.queue: info for info in await queue.queues()}
    for name in names:
        if name not in queues:
            raise unknown_name_error("queue", name, queues)
    return [queues[name] for name in names]
