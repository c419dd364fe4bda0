"""Pools, topics and workers: where frames may run, and the workers that run them."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, patch, post, put
from litestar.params import FromQuery, JSONBody, PathParameter

from rota.accounting.resources import unknown_name_error
from rota.api.pages import Page
from rota.api.resources import (
    ChangeResult,
    DrainSpec,
    NamedResource,
    PoolChange,
    PoolView,
    TopicSpec,
    TopicView,
    WorkerView,
)
from rota.engine.queries import workers
from rota.engine.queries.workers import WorkerRecord
from rota.model.access import Role
from rota.placement import PlacementPolicy, Pool
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.permissions import Deps, requires
from rota.server.http.routes.shows import PoolPath

TopicPath = Annotated[str, PathParameter(max_length=200, description="A topic, or a pattern such as render.*.")]

VIEW = requires(Role.VIEWER, "somewhere")
OPERATE, ADMIN = requires(Role.OPERATOR, "everywhere"), requires(Role.ADMIN, "everywhere")


class PoolRoutes(Controller):
    path = "/pools"
    tags = ("pools",)

    @get(opt=VIEW)
    async def find_pools(self, deps: Deps) -> Page[PoolView]:
        routes, now_ms = await deps.routing.read(), deps.routing.clock.now_ms()
        return Page([_pool_view(pool, now_ms) for _, pool in sorted(routes.pools.items())])

    @post(opt=ADMIN)
    async def create_pool(self, request: ApiRequest, deps: Deps, data: JSONBody[NamedResource]) -> PoolView:
        await deps.books.change(lambda admin: admin.create_pool(data.name, actor=request.user.audited))
        return await _get_pool(deps, data.name)

    @get("/{pool:str}", opt=VIEW)
    async def get_pool(self, deps: Deps, pool: PoolPath) -> PoolView:
        return await _get_pool(deps, pool)

    @patch("/{pool:str}", opt=ADMIN)
    async def change_pool(
        self, request: ApiRequest, deps: Deps, pool: PoolPath, data: JSONBody[PoolChange]
    ) -> PoolView:
        """Change the capabilities that a pool provides, its description, and how frames are placed in it."""
        await _get_pool(deps, pool)
        await deps.routing.set_pool(
            pool,
            actor=request.user.audited,
            provides=data.provides,
            description=data.description,
            placement=None if data.placement is None else PlacementPolicy(data.placement),
        )
        return await _get_pool(deps, pool)

    @post("/{pool:str}/rename", opt=ADMIN, status_code=200)
    async def rename_pool(
        self, request: ApiRequest, deps: Deps, pool: PoolPath, data: JSONBody[NamedResource]
    ) -> PoolView:
        await deps.books.change(lambda admin: admin.rename_pool(pool, data.name, actor=request.user.audited))
        return await _get_pool(deps, data.name)

    @post("/{pool:str}/drain", opt=OPERATE, status_code=200)
    async def drain_pool(self, request: ApiRequest, deps: Deps, pool: PoolPath, data: JSONBody[DrainSpec]) -> PoolView:
        """Assign nothing new to this pool; running frames continue to their end."""
        await _get_pool(deps, pool)
        await deps.routing.drain(pool, actor=request.user.audited, timeout_s=data.timeout_s)
        return await _get_pool(deps, pool)

    @post("/{pool:str}/activate", opt=OPERATE, status_code=200)
    async def activate_pool(self, request: ApiRequest, deps: Deps, pool: PoolPath) -> PoolView:
        await _get_pool(deps, pool)
        await deps.routing.activate(pool, actor=request.user.audited)
        return await _get_pool(deps, pool)

    @delete("/{pool:str}", opt=ADMIN, status_code=200)
    async def delete_pool(self, request: ApiRequest, deps: Deps, pool: PoolPath) -> ChangeResult:
        await deps.books.change(lambda admin: admin.delete_pool(pool, actor=request.user.audited))
        return ChangeResult(name=pool, changed=True)


class TopicRoutes(Controller):
    path = "/topics"
    tags = ("topics",)

    @get(opt=VIEW)
    async def find_topics(self, deps: Deps) -> Page[TopicView]:
        """List topic mappings; without any, every topic maps to the pool local."""
        routes = await deps.routing.read()
        return Page([TopicView(topic=topic, pools=pools) for topic, pools in sorted(routes.topics.items())])

    @put("/{topic:str}", opt=ADMIN)
    async def map_topic(
        self, request: ApiRequest, deps: Deps, topic: TopicPath, data: JSONBody[TopicSpec]
    ) -> TopicView:
        """Map a topic to pools, in order of preference."""
        await deps.routing.set_topic(topic, data.pools, actor=request.user.audited)
        return TopicView(topic=topic, pools=data.pools)

    @delete("/{topic:str}", opt=ADMIN, status_code=200)
    async def unmap_topic(self, request: ApiRequest, deps: Deps, topic: TopicPath) -> ChangeResult:
        before = await deps.routing.read()
        if topic not in before.topics:
            raise unknown_name_error("topic", topic, before.topics)
        changed = await deps.routing.remove_topic(topic, actor=request.user.audited)
        return ChangeResult(name=topic, changed=changed)


class WorkerRoutes(Controller):
    path = "/workers"
    tags = ("workers",)

    @get(opt=VIEW)
    async def find_workers(self, deps: Deps, everyone: FromQuery[bool] = False) -> Page[WorkerView]:
        """List live workers, or also those that ended recently."""
        return Page([_worker_view(one) for one in await workers.worker_records(deps.database, everyone=everyone)])


async def _get_pool(deps: HttpDependencies, name: str) -> PoolView:
    routes = await deps.routing.read()
    if name not in routes.pools:
        raise unknown_name_error("pool", name, routes.pools)
    return _pool_view(routes.pools[name], deps.routing.clock.now_ms())


def _pool_view(pool: Pool, now_ms: int) -> PoolView:
    return PoolView(
        id=pool.id,
        name=pool.name,
        status=pool.spec.status_at(now_ms).value,
        provides=pool.spec.provides,
        description=pool.spec.description,
        placement=pool.spec.placement.value,
    )


def _worker_view(record: WorkerRecord) -> WorkerView:
    hello = record.hello
    return WorkerView(
        id=record.id,
        name=record.name,
        pool=record.pool,
        state=record.state,  # type: ignore[arg-type]
        up_at=record.up_at,
        ended_at=record.ended_at,
        slots=hello.slots,
        cores=hello.cores / 100,
        gpus=hello.gpus,
        memory_mb=hello.memory_mb,
        labels=dict(hello.labels),
        tasks=tuple(hello.tasks),
        frames=record.frames,
        used_cores=record.cores / 100,
        used_gpus=record.gpus,
        jobs=record.jobs,
    )
