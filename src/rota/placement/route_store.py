"""Pools and topics in PostgreSQL, so that all replicas route alike.

- Every change is one transaction with its audit entries, under one lock: no update is lost, and each is based on the
  current state.
- A topic maps only to pools of accounting (`rota.alloc`), since frames are booked there; such a pool cannot be deleted
  while it is mapped.
- `pools.yaml` is loaded when its content differs from the last load. Manual changes stand until then: replicas that
  restart with the same file change nothing.

Replicas learn of a change by NOTIFY and poll every `RELOAD_INTERVAL_S` as well. While PostgreSQL is unavailable they
keep their routes. A crash after a commit loses nothing: the commit itself notifies the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final
from uuid import UUID

import msgspec

from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Notifications, Transaction, query
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput
from rota.model.ids import PoolId
from rota.placement.pools_file import PoolsFile, validate_pools, validate_topic
from rota.placement.registry import WorkerRegistry
from rota.placement.requirements import normalize_capabilities
from rota.placement.topic_routes import (
    DRAIN_TIMEOUT_MAX_S,
    DRAIN_TIMEOUT_S,
    PlacementPolicy,
    Pool,
    PoolSpec,
    PoolStatus,
    Routes,
)

CHANNEL: Final = "rota_routing"
RELOAD_INTERVAL_S: Final = 30.0

LOCK = query(__package__, "routing_lock")
POOLS = query(__package__, "routing_pools")
TOPICS = query(__package__, "routing_topics")
TOPIC_CLEAR = query(__package__, "routing_topic_clear")
TOPIC_MAP = query(__package__, "routing_topic_map")
POOL_SET = query(__package__, "routing_pool_set")
FILE_GET = query(__package__, "routing_file_get")
FILE_SET = query(__package__, "routing_file_set")


class RoutesDraft(msgspec.Struct):
    """The configuration while it is being edited."""

    topics: dict[str, tuple[str, ...]]
    specs: dict[str, PoolSpec]


RoutesEdit = Callable[[RoutesDraft], None]


class RouteStore:
    """Reads and changes pools and topics on behalf of `actor`, who is recorded in the audit log."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self.database = database
        self.clock = clock or SystemClock()

    async def read(self) -> Routes:
        """All routes, from one snapshot."""
        async with self.database.transaction("repeatable read", readonly=True) as tx:
            return await _read_routes(tx)

    async def set_topic(self, topic: str, pools: Sequence[str], *, actor: str) -> bool:
        """Map a topic or glob to these pools, in this order. Returns whether that changed anything."""
        names = validate_pools(validate_topic(topic), tuple(pools))

        def edit(draft: RoutesDraft) -> None:
            draft.topics[topic] = names

        return await self._change(actor, edit)

    async def remove_topic(self, topic: str, *, actor: str) -> bool:
        """Unmap a topic. Its jobs follow the next best glob, or fail."""

        def edit(draft: RoutesDraft) -> None:
            draft.topics.pop(topic, None)

        return await self._change(actor, edit)

    async def set_pool(
        self,
        name: str,
        *,
        actor: str,
        provides: Iterable[str] | None = None,
        description: str | None = None,
        placement: PlacementPolicy | None = None,
    ) -> bool:
        """Change the given properties and keep the rest."""
        changes: dict[str, object] = {}
        if provides is not None:
            changes["provides"] = normalize_capabilities(provides)
        if description is not None:
            changes["description"] = description
        if placement is not None:
            changes["placement"] = placement
        return await self._change_pool(name, actor, changes)

    async def drain(self, name: str, *, actor: str, timeout_s: int = DRAIN_TIMEOUT_S) -> bool:
        """Stop new frames on this pool; running ones finish. A pool that already drains keeps its deadline."""
        if not 1 <= timeout_s <= DRAIN_TIMEOUT_MAX_S:
            raise InvalidInput(
                f"{timeout_s} is not a valid drain timeout: give from 1 to {DRAIN_TIMEOUT_MAX_S} seconds."
            )
        drained = {
            "status": PoolStatus.DRAINING,
            "drain_started_ms": self.clock.now_ms(),
            "drain_timeout_s": timeout_s,
        }
        return await self._change_pool(name, actor, drained, unless=PoolStatus.DRAINING)

    async def activate(self, name: str, *, actor: str) -> bool:
        active = {"status": PoolStatus.ACTIVE, "drain_started_ms": None, "drain_timeout_s": DRAIN_TIMEOUT_S}
        return await self._change_pool(name, actor, active)

    async def load(self, file: PoolsFile, *, actor: str) -> bool:
        """Set topics and the listed pools to the content of the file, unless it was the last one loaded."""
        now_ms = self.clock.now_ms()

        def edit(draft: RoutesDraft) -> None:
            draft.topics = dict(file.topics)
            for name, spec in file.pools.items():
                begins = spec.status is PoolStatus.DRAINING and spec.drain_started_ms is None
                draft.specs[name] = msgspec.structs.replace(spec, drain_started_ms=now_ms) if begins else spec

        async with self.database.transaction() as tx:
            await tx.run(LOCK)
            if await tx.value(FILE_GET) == file.digest():
                return False
            changed = await _apply_edit(tx, actor, edit)
            await tx.run(FILE_SET, file.digest())
            return changed

    async def _change_pool(
        self, name: str, actor: str, changes: Mapping[str, object], unless: PoolStatus | None = None
    ) -> bool:
        def edit(draft: RoutesDraft) -> None:
            before = draft.specs.get(name, PoolSpec(name=name))
            if unless is None or before.status is not unless:
                draft.specs[name] = msgspec.structs.replace(before, **changes)

        return await self._change(actor, edit)

    async def _change(self, actor: str, edit: RoutesEdit) -> bool:
        async with self.database.transaction() as tx:
            await tx.run(LOCK)
            return await _apply_edit(tx, actor, edit)


class RoutesWatcher:
    """Run as `Service("routes", watcher.run)`: the registry follows every stored change within a moment."""

    def __init__(self, routing: RouteStore, registry: WorkerRegistry, every_s: float = RELOAD_INTERVAL_S) -> None:
        self._routing = routing
        self._registry = registry
        self._every_s = every_s

    async def run(self, life: Lifecycle) -> None:
        """Ends as unavailable when PostgreSQL is, and is restarted; routes stay as they were."""
        async with self._routing.database.listen(CHANNEL) as notifications:
            self._registry.set_routes(await self._routing.read())
            life.ready()
            while await _wait_for_change(notifications, life, self._every_s):
                self._registry.set_routes(await self._routing.read())


async def _wait_for_change(notifications: Notifications, life: Lifecycle, every_s: float) -> bool:
    """Wait until routes may have changed; False when draining."""
    waiting = asyncio.create_task(notifications.next(every_s), name="routes.next")
    draining = asyncio.create_task(life.until_draining(), name="routes.draining")
    try:
        await asyncio.wait({waiting, draining}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        draining.cancel()
        await asyncio.wait({waiting, draining})
    return not life.draining


async def _read_routes(tx: Transaction) -> Routes:
    topics = {row["topic"]: tuple(row["pools"]) for row in await tx.rows(TOPICS)}
    pools = {}
    for row in await tx.rows(POOLS):
        spec = PoolSpec(
            name=row["name"],
            provides=normalize_capabilities(row["provides"]),
            status=PoolStatus(row["status"]),
            description=row["description"],
            drain_started_ms=row["drain_started_ms"],
            drain_timeout_s=row["drain_timeout_s"],
            placement=PlacementPolicy(row["placement"]),
        )
        pools[spec.name] = Pool(PoolId(row["id"]), spec)
    return Routes(topics, pools)


async def _apply_edit(tx: Transaction, actor: str, edit: RoutesEdit) -> bool:
    """Write the differences made by `edit`, with one audit entry each; nothing if there are none."""
    before = await _read_routes(tx)
    specs = {name: pool.spec for name, pool in before.pools.items()}
    draft = RoutesDraft(dict(before.topics), dict(specs))
    edit(draft)
    _check_pools_exist(draft, before.pools)
    entries = [
        *[await _write_topic(tx, topic, before, draft) for topic in _changed_names(before.topics, draft.topics)],
        *[await _write_pool(tx, before.pools[name], draft.specs[name]) for name in _changed_names(specs, draft.specs)],
    ]
    failpoints.hit("placement.after_routing_before_audit")
    if entries:
        await audit.append(tx, [AuditEntry(actor, *entry) for entry in entries])
    return bool(entries)


async def _write_topic(
    tx: Transaction, topic: str, before: Routes, draft: RoutesDraft
) -> tuple[str, str, Mapping[str, object]]:
    old, new = before.topics.get(topic), draft.topics.get(topic)
    await tx.run(TOPIC_CLEAR, topic)
    if new is not None:
        ids: list[UUID] = [before.pools[name].id for name in new]
        await tx.run(TOPIC_MAP, topic, ids)
    return "topic.map" if new else "topic.unmap", f"topic:{topic}", {"before": old, "after": new}


async def _write_pool(tx: Transaction, pool: Pool, spec: PoolSpec) -> tuple[str, str, Mapping[str, object]]:
    await tx.run(
        POOL_SET,
        pool.id,
        list(spec.provides),
        spec.status.value,
        spec.description,
        spec.drain_started_ms,
        spec.drain_timeout_s,
        spec.placement.value,
    )
    detail = {"before": msgspec.to_builtins(pool.spec), "after": msgspec.to_builtins(spec)}
    return "pool.configure", f"pool:{pool.name}", detail


def _check_pools_exist(draft: RoutesDraft, pools: Mapping[str, Pool]) -> None:
    for topic, names in draft.topics.items():
        for name in names:
            if name not in pools:
                raise _unknown_pool(name, f" that the topic {topic} is mapped to", pools)
    for name in draft.specs:
        if name not in pools:
            raise _unknown_pool(name, "", pools)


def _unknown_pool(name: str, whose: str, pools: Iterable[str]) -> InvalidInput:
    nearest = get_close_matches(name, list(pools), n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? Otherwise create" if nearest else "create"
    return InvalidInput(
        f"The pool {name[:64]!r}{whose} does not exist: {hint} it with `rota pool create {name[:64]}` first."
    )


def _changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
