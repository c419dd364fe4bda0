"""Routing of topics to pools: each command is one read, or one change with its audit entry.

Servers are notified of a change. After a lost reply the same command can be repeated: changes are idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rota.accounting.resources import unknown_name_error
from rota.api.resources import PlacementName
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import EMPTY_MESSAGES, CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.quota.actions import current_actor, print_page
from rota.infra.postgres import check_current
from rota.model.settings import Settings
from rota.model.units import parse_duration
from rota.placement import PlacementPolicy, Pool, PoolStatus, Routes
from rota.placement.route_store import RouteStore
from rota.placement.topic_routes import ANY_TOPIC, DEFAULT_POOL


def run(settings: Settings, work: Callable[[RouteStore], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            return await work(RouteStore(database))

    print_page(asyncio.run(done()), form=form)


async def list_topics(routing: RouteStore) -> CliPage:
    routes = await routing.read()
    found = {ANY_TOPIC: (DEFAULT_POOL,)} if routes.uses_default_pool else routes.topics
    now_ms = routing.clock.now_ms()
    data = [
        {
            "topic": topic,
            "pools": [_pool_data(routes.pools[name], now_ms) for name in names],
            "implied": routes.uses_default_pool,
        }
        for topic, names in sorted(found.items())
    ]
    if not found:
        return CliPage(
            data,
            ["No topic is mapped: `rota pool map TOPIC POOL` maps one." if routes.pools else EMPTY_MESSAGES["pool"]],
        )
    rows = [
        (topic, ", ".join(_pool_text(routes.pools[name], now_ms) for name in names))
        for topic, names in sorted(found.items())
    ]
    parts: list[str | Table] = [Table(("topic", "runs on"), rows)]
    if routes.uses_default_pool:
        parts.append(f"No topic is mapped, so all topics go to {DEFAULT_POOL} until the first mapping.")
    return CliPage(data, parts)


def _pool_data(pool: Pool, now_ms: int) -> dict[str, object]:
    return {
        "name": pool.name,
        "status": pool.spec.status_at(now_ms),
        "provides": pool.spec.provides,
        "placement": pool.spec.placement,
    }


def _pool_text(pool: Pool, now_ms: int) -> str:
    status = pool.spec.status_at(now_ms)
    extra = [status.value] if status is not PoolStatus.ACTIVE else []
    extra += [f"provides {', '.join(pool.spec.provides)}"] if pool.spec.provides else []
    extra += [pool.spec.placement.value] if pool.spec.placement is not PlacementPolicy.FIT else []
    return f"{pool.name} ({'; '.join(extra)})" if extra else pool.name


async def map_topic(routing: RouteStore, topic: str, pools: Sequence[str]) -> CliPage:
    before = await routing.read()
    changed = await routing.set_topic(topic, pools, actor=current_actor())
    text = f"Topic {topic} runs on {', then '.join(pools)}"
    notes = []
    if before.uses_default_pool and changed and topic != ANY_TOPIC:
        notes.append(
            f"Until now every topic went to {DEFAULT_POOL}; from now on jobs of unmapped topics fail, unless"
            f" `rota pool map '*' {DEFAULT_POOL}` keeps them there."
        )
    data = {"topic": topic, "pools": list(pools), "changed": changed, "notes": notes}
    return CliPage(
        data, [f"{text} now." if changed else f"Nothing changed: {text[0].lower()}{text[1:]} already.", *notes]
    )


async def unmap_topic(routing: RouteStore, topic: str) -> CliPage:
    before = await routing.read()
    if topic not in before.topics:
        raise unknown_name_error("topic", topic, before.topics)
    await routing.remove_topic(topic, actor=current_actor())
    after = await routing.read()
    remaining = ", then ".join(pool.name for pool in after.pools_for(topic))
    effect = f"its jobs go to {remaining}" if remaining else "its jobs have no pool and fail"
    return CliPage(
        {"topic": topic, "changed": True, "pools": _pool_names(after, topic)},
        [f"Topic {topic} is no longer mapped: {effect}."],
    )


def _pool_names(routes: Routes, topic: str) -> list[str]:
    return [pool.name for pool in routes.pools_for(topic)]


async def drain_pool(routing: RouteStore, name: str, timeout: str) -> CliPage:
    timeout_s = round(parse_duration(timeout))
    changed = await routing.drain(name, actor=current_actor(), timeout_s=timeout_s)
    data = {"pool": name, "status": "draining", "changed": changed}
    text = (
        f"Pool {name} is draining: it gets no new frames, running frames finish."
        if changed
        else f"Nothing changed: pool {name} is already draining."
    )
    return CliPage(data, [text])


async def set_placement(routing: RouteStore, name: str, placement: PlacementName) -> CliPage:
    changed = await routing.set_pool(name, actor=current_actor(), placement=PlacementPolicy(placement))
    data = {"pool": name, "placement": placement, "changed": changed}
    text = f"Pool {name} places frames by {placement}"
    return CliPage(data, [f"{text} now." if changed else f"Nothing changed: pool {name} does so already."])


async def activate_pool(routing: RouteStore, name: str) -> CliPage:
    changed = await routing.activate(name, actor=current_actor())
    data = {"pool": name, "status": "active", "changed": changed}
    text = f"Pool {name} accepts frames again." if changed else f"Nothing changed: pool {name} is already active."
    return CliPage(data, [text])
