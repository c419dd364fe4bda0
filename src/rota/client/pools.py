"""Pools, topics, workers and queues: `app.pools`, `app.topics`, `app.workers`, `app.queues`."""

from __future__ import annotations

from collections.abc import Sequence

from rota.api.resources import (
    ChangeResult,
    DrainSpec,
    NamedResource,
    PlacementName,
    PoolChange,
    PoolView,
    QueueView,
    TopicSpec,
    TopicView,
    WorkerView,
)
from rota.client.resource import ApiResource, M, api_method, url_path


class PoolsResource(ApiResource[M]):
    @api_method
    async def list(self) -> Sequence[PoolView]:
        return await self._list("/pools", PoolView)

    @api_method
    async def get(self, name: str) -> PoolView:
        return await self._request("GET", url_path("pools", name), PoolView)

    @api_method
    async def create(self, name: str) -> PoolView:
        return await self._request("POST", "/pools", PoolView, idempotent=False, body=NamedResource(name=name))

    @api_method
    async def change(
        self,
        name: str,
        *,
        provides: Sequence[str] | None = None,
        description: str | None = None,
        placement: PlacementName | None = None,
    ) -> PoolView:
        """Sets the capabilities the pool provides, its description, and how frames are placed in it."""
        change = PoolChange(
            provides=None if provides is None else tuple(provides), description=description, placement=placement
        )
        return await self._request("PATCH", url_path("pools", name), PoolView, body=change)

    @api_method
    async def rename(self, name: str, new: str) -> PoolView:
        return await self._request(
            "POST", url_path("pools", name, "rename"), PoolView, idempotent=False, body=NamedResource(name=new)
        )

    @api_method
    async def drain(self, name: str, *, timeout_s: int = 300) -> PoolView:
        """Starts no new frames in this pool; running ones finish."""
        return await self._request(
            "POST", url_path("pools", name, "drain"), PoolView, body=DrainSpec(timeout_s=timeout_s)
        )

    @api_method
    async def activate(self, name: str) -> PoolView:
        return await self._request("POST", url_path("pools", name, "activate"), PoolView)

    @api_method
    async def delete(self, name: str) -> None:
        await self._request("DELETE", url_path("pools", name), ChangeResult, idempotent=False)


class TopicsResource(ApiResource[M]):
    @api_method
    async def list(self) -> Sequence[TopicView]:
        """If there are none, every topic maps to the pool `local`."""
        return await self._list("/topics", TopicView)

    @api_method
    async def map(self, topic: str, *pools: str) -> TopicView:
        """Frames of the topic run in the first of these pools that fits; a topic may be a pattern such as render.*."""
        return await self._request("PUT", url_path("topics", topic), TopicView, body=TopicSpec(pools=pools))

    @api_method
    async def unmap(self, topic: str) -> None:
        await self._request("DELETE", url_path("topics", topic), ChangeResult, idempotent=False)


class WorkersResource(ApiResource[M]):
    @api_method
    async def list(self, *, everyone: bool = False) -> Sequence[WorkerView]:
        """Workers that are up; with `everyone` also those that ended recently."""
        return await self._list("/workers", WorkerView, everyone=everyone)


class QueuesResource(ApiResource[M]):
    @api_method
    async def list(self) -> Sequence[QueueView]:
        """With exact counts."""
        return await self._list("/queues", QueueView)

    @api_method
    async def pause(self, name: str) -> bool:
        """Starts no further frames of the queue; running ones continue. Returns whether the state changed."""
        return (await self._request("POST", "/queues/pause", ChangeResult, query={"queue": name})).changed

    @api_method
    async def resume(self, name: str) -> bool:
        return (await self._request("POST", "/queues/resume", ChangeResult, query={"queue": name})).changed
