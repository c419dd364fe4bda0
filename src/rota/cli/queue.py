"""`rota queue`: each command opens PostgreSQL, asks or changes one thing, and prints a page.

Neither Redis nor NATS need be there. What an operator changes is committed with its audit entry before anything is
printed; whoever dies, or loses the reply, before that may give the same command again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import asyncpg

from rota.accounting.items import unknown
from rota.cli import db
from rota.cli import queue_view as view
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page
from rota.cli.form import Form
from rota.engine import queues
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.postgres import check_current
from rota.model.errors import Refused
from rota.model.settings import Settings
from rota.queue import CounterMode, Queue, QueueInfo, report
from rota.queue.measures import oldest_s


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Queue]:
    async with db.opened(settings) as database:
        await check_current(database)
        yield Queue(database)


def run(settings: Settings, work: Callable[[Queue], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        async with opened(settings) as queue:
            return await work(queue)

    print_page(asyncio.run(done()), form=form)


async def counts(queue: Queue, names: Sequence[str], *, fast: bool) -> Page:
    """Without counters there is nothing to be fast with: then the rows are counted."""
    await known(queue, names)
    trusted = (await report.state(queue.database)).counters_trusted
    found = await (queue.counts_fast if fast and trusted else queue.counts_exact)(list(names) or None)
    order = dict.fromkeys(names) if names else sorted(found)
    return view.counts_page({name: found[name] for name in order}, trusted=trusted)


async def listed(queue: Queue) -> Page:
    return view.queues_page(await queue.queues(), await queue.counts_exact(), await oldest_s(queue))


async def set_paused(queue: Queue, name: str, *, paused: bool) -> Page:
    await known(queue, [name])
    changed = await queues.set_paused(queue, name, actor(), paused=paused)
    return view.paused_page(name, (await queue.counts_exact([name]))[name], paused=paused, changed=changed)


async def rebuild(queue: Queue, mode: CounterMode) -> Page:
    before, began = await report.state(queue.database), time.monotonic()
    try:
        async with queue.database.transaction() as tx:
            await queue.rebuild_counts(mode, on=tx)
            detail = {"mode": mode, "was": before.counter_mode, "trusted_before": before.counters_trusted}
            await audit.append(tx, [AuditEntry(actor(), "queue.rebuild_counts", "queues", detail)])
    except asyncpg.LockNotAvailableError:
        held = await report.sessions(queue.database, older_than_s=0.0)
        raise Refused(view.in_the_way(held)) from None
    return view.rebuilt_page(await queue.counts_exact(), before, mode, took_s=time.monotonic() - began)


async def storage(queue: Queue, wanted: CounterMode) -> Page:
    database = queue.database
    return view.storage_page(
        await report.state(database),
        await report.slots(database),
        await report.tables(database),
        await report.sessions(database),
        wanted,
    )


async def known(queue: Queue, names: Iterable[str]) -> list[QueueInfo]:
    """What is known of these queues; refused, with the nearest name, when there is none of that name."""
    queues = {info.queue: info for info in await queue.queues()}
    for name in names:
        if name not in queues:
            raise unknown("queue", name, queues)
    return [queues[name] for name in names]
