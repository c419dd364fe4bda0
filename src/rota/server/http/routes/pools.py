"""Pools, topics and workers: where frames may run, and who runs them."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, patch, post, put
from litestar.params import FromQuery, JSONBody, PathParameter

from rota.accounting.resources import unknown_name_error
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
from rota.placement import Pool
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import Page
from rota.server.http.permissions import Deps, requires
from rota.server.http.routes.shows import PoolPath

TopicPath = Annotated[str, PathParameter(max_length=200, description="A topic, or a pattern such as render.*.")]

VIEW = requires(Role.VIEWER, "somewhere")
OPERATE, ADMIN = requires(Role.OPERATOR, "everywhere"), requires(Role.ADMIN, "everywhere")


class PoolRoutes(Controller):
    path = "/pools"
    tags = ("pools",)

    @get(opt=VIEW)
    async def find_pools(self, desk: Deps) -> Page[PoolView]:
        routes, now_ms = await desk.routing.read(), desk.routing.clock.now_ms()
        return Page([_pool_view(pool, now_ms) for _, pool in sorted(routes.pools.items())])

    @post(opt=ADMIN)
    async def create_pool(self, request: ApiRequest, desk: Deps, data: JSONBody[NamedResource]) -> PoolView:
        await desk.books.change(lambda admin: admin.create_pool(data.name, actor=request.user.audited))
        return await _get_pool(desk, data.name)

    @get("/{pool:str}", opt=VIEW)
    async def get_pool(self, desk: Deps, pool: PoolPath) -> PoolView:
        return await _get_pool(desk, pool)

    @patch("/{pool:str}", opt=ADMIN)
    async def change_pool(
        self, request: ApiRequest, desk: Deps, pool: PoolPath, data: JSONBody[PoolChange]
    ) -> PoolView:
        """What it provides to jobs that require it, and what it is described as."""
        await _get_pool(desk, pool)
        await desk.routing.set_pool(
            pool, actor=request.user.audited, provides=data.provides, description=data.description
        )
        return await _get_pool(desk, pool)

    @post("/{pool:str}/rename", opt=ADMIN, status_code=200)
    async def rename_pool(
        self, request: ApiRequest, desk: Deps, pool: PoolPath, data: JSONBody[NamedResource]
    ) -> PoolView:
        await desk.books.change(lambda admin: admin.rename_pool(pool, data.name, actor=request.user.audited))
        return await _get_pool(desk, data.name)

    @post("/{pool:str}/drain", opt=OPERATE, status_code=200)
    async def drain_pool(self, request: ApiRequest, desk: Deps, pool: PoolPath, data: JSONBody[DrainSpec]) -> PoolView:
        """Nothing new for this pool; what runs there ends."""
        await _get_pool(desk, pool)
        await desk.routing.drain(pool, actor=request.user.audited, timeout_s=data.timeout_s)
        return await _get_pool(desk, pool)

    @post("/{pool:str}/activate", opt=OPERATE, status_code=200)
    async def activate_pool(self, request: ApiRequest, desk: Deps, pool: PoolPath) -> PoolView:
        await _get_pool(desk, pool)
        await desk.routing.activate(pool, actor=request.user.audited)
        return await _get_pool(desk, pool)

    @delete("/{pool:str}", opt=ADMIN, status_code=200)
    async def delete_pool(self, request: ApiRequest, desk: Deps, pool: PoolPath) -> ChangeResult:
        await desk.books.change(lambda admin: admin.delete_pool(pool, actor=request.user.audited))
        return ChangeResult(name=pool, changed=True)


class TopicRoutes(Controller):
    path = "/topics"
    tags = ("topics",)

    @get(opt=VIEW)
    async def find_topics(self, desk: Deps) -> Page[TopicView]:
        """Without any, every topic goes to the pool local."""
        routes = await desk.routing.read()
        return Page([TopicView(topic=topic, pools=pools) for topic, pools in sorted(routes.topics.items())])

    @put("/{topic:str}", opt=ADMIN)
    async def map_topic(
        self, request: ApiRequest, desk: Deps, topic: TopicPath, data: JSONBody[TopicSpec]
    ) -> TopicView:
        """Its frames run on these pools, the first that can take them."""
        await desk.routing.set_topic(topic, data.pools, actor=request.user.audited)
        return TopicView(topic=topic, pools=data.pools)

    @delete("/{topic:str}", opt=ADMIN, status_code=200)
    async def unmap_topic(self, request: ApiRequest, desk: Deps, topic: TopicPath) -> ChangeResult:
        before = await desk.routing.read()
        if topic not in before.topics:
            raise unknown_name_error("topic", topic, before.topics)
        changed = await desk.routing.remove_topic(topic, actor=request.user.audited)
        return ChangeResult(name=topic, changed=changed)


class WorkerRoutes(Controller):
    path = "/workers"
    tags = ("workers",)

    @get(opt=VIEW)
    async def find_workers(self, desk: Deps, everyone: FromQuery[bool] = False) -> Page[WorkerView]:
        """Those that are up, or also those that ended lately."""
        return Page([_worker_view(one) for one in await workers.worker_records(desk.database, everyone=everyone)])


async def _get_pool(desk: HttpDependencies, name: str) -> PoolView:
    routes = await desk.routing.read()
    if name not in routes.pools:
        raise unknown_name_error("pool", name, routes.pools)
    return _pool_view(routes.pools[name], desk.routing.clock.now_ms())


def _pool_view(pool: Pool, now_ms: int) -> PoolView:
    return PoolView(
        id=pool.id,
        name=pool.name,
        status=pool.spec.status_at(now_ms).value,
        provides=pool.spec.provides,
        description=pool.spec.description,
    )


def _worker_view(known: WorkerRecord) -> WorkerView:
    hello = known.hello
    return WorkerView(
        id=known.id,
        name=known.name,
        pool=known.pool,
        state=known.state,  # type: ignore[arg-type]
        up_at=known.up_at,
        ended_at=known.ended_at,
        slots=hello.slots,
        cores=hello.cores / 100,
        gpus=hello.gpus,
        memory_mb=hello.memory_mb,
        labels=dict(hello.labels),
        tasks=tuple(hello.tasks),
        frames=known.frames,
        used_cores=known.cores / 100,
        used_gpus=known.gpus,
        jobs=known.jobs,
    )
