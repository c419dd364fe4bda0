"""Where frames run and wait: `app.pools`, `app.topics`, `app.workers`, `app.queues`."""

from __future__ import annotations

from collections.abc import Sequence

from rota.model.farm import (
    Changed,
    Drain,
    Named,
    PoolChange,
    PoolTold,
    QueueTold,
    TopicSpec,
    TopicTold,
    WorkerTold,
)
from rota.sdk.rooms import M, Room, at, call


class Pools(Room[M]):
    @call
    async def list(self) -> Sequence[PoolTold]:
        return await self._list("/pools", PoolTold)

    @call
    async def get(self, name: str) -> PoolTold:
        return await self._ask("GET", at("pools", name), PoolTold)

    @call
    async def create(self, name: str) -> PoolTold:
        return await self._ask("POST", "/pools", PoolTold, again=False, body=Named(name=name))

    @call
    async def change(
        self, name: str, *, provides: Sequence[str] | None = None, description: str | None = None
    ) -> PoolTold:
        """What it provides to jobs that require it, and what it is described as."""
        change = PoolChange(provides=None if provides is None else tuple(provides), description=description)
        return await self._ask("PATCH", at("pools", name), PoolTold, body=change)

    @call
    async def rename(self, name: str, new: str) -> PoolTold:
        return await self._ask("POST", at("pools", name, "rename"), PoolTold, again=False, body=Named(name=new))

    @call
    async def drain(self, name: str, *, timeout_s: int = 300) -> PoolTold:
        """Nothing new for this pool; what runs there ends."""
        return await self._ask("POST", at("pools", name, "drain"), PoolTold, body=Drain(timeout_s=timeout_s))

    @call
    async def activate(self, name: str) -> PoolTold:
        return await self._ask("POST", at("pools", name, "activate"), PoolTold)

    @call
    async def delete(self, name: str) -> None:
        await self._ask("DELETE", at("pools", name), Changed, again=False)


class Topics(Room[M]):
    @call
    async def list(self) -> Sequence[TopicTold]:
        """Without any, every topic goes to the pool local."""
        return await self._list("/topics", TopicTold)

    @call
    async def map(self, topic: str, *pools: str) -> TopicTold:
        """Its frames run on these pools, the first that can take them; a topic may be a pattern such as render.*."""
        return await self._ask("PUT", at("topics", topic), TopicTold, body=TopicSpec(pools=pools))

    @call
    async def unmap(self, topic: str) -> None:
        await self._ask("DELETE", at("topics", topic), Changed, again=False)


class Workers(Room[M]):
    @call
    async def list(self, *, everyone: bool = False) -> Sequence[WorkerTold]:
        """Those that are up, or also those that ended lately."""
        return await self._list("/workers", WorkerTold, everyone=everyone)


class Queues(Room[M]):
    @call
    async def list(self) -> Sequence[QueueTold]:
        """With exact counts."""
        return await self._list("/queues", QueueTold)

    @call
    async def pause(self, name: str) -> bool:
        """Whether that changed anything. Nothing more of it starts; what runs goes on."""
        return (await self._ask("POST", "/queues/pause", Changed, query={"queue": name})).changed

    @call
    async def resume(self, name: str) -> bool:
        return (await self._ask("POST", "/queues/resume", Changed, query={"queue": name})).changed
