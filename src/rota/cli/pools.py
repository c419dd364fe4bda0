"""Pools as they are routed to: each command is one change with its audit entry, or one read.

Servers hear of a change at once. Whoever loses the reply may give the same command again: what is set stays set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rota.accounting.items import unknown
from rota.cli import db
from rota.cli.books import actor, print_page
from rota.cli.books_view import NOTHING, Page, Table
from rota.cli.form import Form
from rota.infra.postgres import check_current
from rota.model.settings import Settings
from rota.model.units import parse_duration
from rota.placement import Pool, PoolStatus, Routes
from rota.placement.routes import ANY_TOPIC, DEFAULT_POOL
from rota.placement.routing import Routing


def run(settings: Settings, work: Callable[[Routing], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        async with db.opened(settings) as database:
            await check_current(database)
            return await work(Routing(database))

    print_page(asyncio.run(done()), form=form)


async def topics(routing: Routing) -> Page:
    routes = await routing.read()
    found = {ANY_TOPIC: (DEFAULT_POOL,)} if routes.implied else routes.topics
    now_ms = routing.clock.now_ms()
    data = [
        {"topic": topic, "pools": [_pool_data(routes.pools[name], now_ms) for name in names], "implied": routes.implied}
        for topic, names in sorted(found.items())
    ]
    if not found:
        return Page(
            data, ["No topic is mapped: `rota pool map TOPIC POOL` maps one." if routes.pools else NOTHING["pool"]]
        )
    rows = [
        (topic, ", ".join(_told(routes.pools[name], now_ms) for name in names))
        for topic, names in sorted(found.items())
    ]
    parts: list[str | Table] = [Table(("topic", "runs on"), rows)]
    if routes.implied:
        parts.append(f"Nothing is mapped, so all topics go to {DEFAULT_POOL}; the first mapping ends that.")
    return Page(data, parts)


def _pool_data(pool: Pool, now_ms: int) -> dict[str, object]:
    return {"name": pool.name, "status": pool.spec.status_at(now_ms), "provides": pool.spec.provides}


def _told(pool: Pool, now_ms: int) -> str:
    status = pool.spec.status_at(now_ms)
    extra = [status.value] if status is not PoolStatus.ACTIVE else []
    extra += [f"provides {', '.join(pool.spec.provides)}"] if pool.spec.provides else []
    return f"{pool.name} ({'; '.join(extra)})" if extra else pool.name


async def mapped(routing: Routing, topic: str, pools: Sequence[str]) -> Page:
    before = await routing.read()
    changed = await routing.set_topic(topic, pools, actor=actor())
    told = f"Topic {topic} runs on {', then '.join(pools)}"
    notes = []
    if before.implied and changed and topic != ANY_TOPIC:
        notes.append(
            f"Until now every topic went to {DEFAULT_POOL}; from now on jobs of topics that are not mapped fail, unless"
            f" `rota pool map '*' {DEFAULT_POOL}` keeps them there."
        )
    data = {"topic": topic, "pools": list(pools), "changed": changed, "notes": notes}
    return Page(data, [f"{told} now." if changed else f"Nothing changed: {told[0].lower()}{told[1:]} already.", *notes])


async def unmapped(routing: Routing, topic: str) -> Page:
    before = await routing.read()
    if topic not in before.topics:
        raise unknown("topic", topic, before.topics)
    await routing.remove_topic(topic, actor=actor())
    after = await routing.read()
    left = ", then ".join(pool.name for pool in after.pools_for(topic))
    then = f"its jobs go to {left}" if left else "its jobs have no pool and fail"
    return Page(
        {"topic": topic, "changed": True, "pools": _names(after, topic)},
        [f"Topic {topic} is not mapped any more: {then}."],
    )


def _names(routes: Routes, topic: str) -> list[str]:
    return [pool.name for pool in routes.pools_for(topic)]


async def drained(routing: Routing, name: str, timeout: str) -> Page:
    timeout_s = round(parse_duration(timeout))
    changed = await routing.drain(name, actor=actor(), timeout_s=timeout_s)
    data = {"pool": name, "status": "draining", "changed": changed}
    told = (
        f"Pool {name} gets nothing new; what runs there ends."
        if changed
        else f"Nothing changed: pool {name} drains already."
    )
    return Page(data, [told])


async def activated(routing: Routing, name: str) -> Page:
    changed = await routing.activate(name, actor=actor())
    data = {"pool": name, "status": "active", "changed": changed}
    told = f"Pool {name} takes frames again." if changed else f"Nothing changed: pool {name} is active already."
    return Page(data, [told])
