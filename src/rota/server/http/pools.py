"""Pools, topics and workers: where frames may run, and who runs them."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, patch, post, put
from litestar.params import FromQuery, JSONBody, PathParameter

from rota.accounting.items import unknown
from rota.engine import workers
from rota.engine.workers import Known
from rota.model.access import Role
from rota.model.farm import Changed, Drain, Named, PoolChange, PoolTold, TopicSpec, TopicTold, WorkerTold
from rota.placement import Pool
from rota.server.http.books import PoolPath
from rota.server.http.desk import Desk
from rota.server.http.pages import Page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.wire import Ask

TopicPath = Annotated[str, PathParameter(max_length=200, description="A topic, or a pattern such as render.*.")]

VIEW = needs(Role.VIEWER, "somewhere")
OPERATE, ADMIN = needs(Role.OPERATOR, "everywhere"), needs(Role.ADMIN, "everywhere")


class PoolRoutes(Controller):
    path = "/pools"
    tags = ("pools",)

    @get(opt=VIEW)
    async def find_pools(self, desk: AtDesk) -> Page[PoolTold]:
        routes, now_ms = await desk.routing.read(), desk.routing.clock.now_ms()
        return Page([_told(pool, now_ms) for _, pool in sorted(routes.pools.items())])

    @post(opt=ADMIN)
    async def create_pool(self, request: Ask, desk: AtDesk, data: JSONBody[Named]) -> PoolTold:
        await desk.books.change(lambda admin: admin.create_pool(data.name, actor=request.user.audited))
        return await _one(desk, data.name)

    @get("/{pool:str}", opt=VIEW)
    async def get_pool(self, desk: AtDesk, pool: PoolPath) -> PoolTold:
        return await _one(desk, pool)

    @patch("/{pool:str}", opt=ADMIN)
    async def change_pool(self, request: Ask, desk: AtDesk, pool: PoolPath, data: JSONBody[PoolChange]) -> PoolTold:
        """What it provides to jobs that require it, and what it is described as."""
        await _one(desk, pool)
        await desk.routing.set_pool(
            pool, actor=request.user.audited, provides=data.provides, description=data.description
        )
        return await _one(desk, pool)

    @post("/{pool:str}/rename", opt=ADMIN, status_code=200)
    async def rename_pool(self, request: Ask, desk: AtDesk, pool: PoolPath, data: JSONBody[Named]) -> PoolTold:
        await desk.books.change(lambda admin: admin.rename_pool(pool, data.name, actor=request.user.audited))
        return await _one(desk, data.name)

    @post("/{pool:str}/drain", opt=OPERATE, status_code=200)
    async def drain_pool(self, request: Ask, desk: AtDesk, pool: PoolPath, data: JSONBody[Drain]) -> PoolTold:
        """Nothing new for this pool; what runs there ends."""
        await _one(desk, pool)
        await desk.routing.drain(pool, actor=request.user.audited, timeout_s=data.timeout_s)
        return await _one(desk, pool)

    @post("/{pool:str}/activate", opt=OPERATE, status_code=200)
    async def activate_pool(self, request: Ask, desk: AtDesk, pool: PoolPath) -> PoolTold:
        await _one(desk, pool)
        await desk.routing.activate(pool, actor=request.user.audited)
        return await _one(desk, pool)

    @delete("/{pool:str}", opt=ADMIN, status_code=200)
    async def delete_pool(self, request: Ask, desk: AtDesk, pool: PoolPath) -> Changed:
        await desk.books.change(lambda admin: admin.delete_pool(pool, actor=request.user.audited))
        return Changed(name=pool, changed=True)


class TopicRoutes(Controller):
    path = "/topics"
    tags = ("topics",)

    @get(opt=VIEW)
    async def find_topics(self, desk: AtDesk) -> Page[TopicTold]:
        """Without any, every topic goes to the pool local."""
        routes = await desk.routing.read()
        return Page([TopicTold(topic=topic, pools=pools) for topic, pools in sorted(routes.topics.items())])

    @put("/{topic:str}", opt=ADMIN)
    async def map_topic(self, request: Ask, desk: AtDesk, topic: TopicPath, data: JSONBody[TopicSpec]) -> TopicTold:
        """Its frames run on these pools, the first that can take them."""
        await desk.routing.set_topic(topic, data.pools, actor=request.user.audited)
        return TopicTold(topic=topic, pools=data.pools)

    @delete("/{topic:str}", opt=ADMIN, status_code=200)
    async def unmap_topic(self, request: Ask, desk: AtDesk, topic: TopicPath) -> Changed:
        before = await desk.routing.read()
        if topic not in before.topics:
            raise unknown("topic", topic, before.topics)
        changed = await desk.routing.remove_topic(topic, actor=request.user.audited)
        return Changed(name=topic, changed=changed)


class WorkerRoutes(Controller):
    path = "/workers"
    tags = ("workers",)

    @get(opt=VIEW)
    async def find_workers(self, desk: AtDesk, everyone: FromQuery[bool] = False) -> Page[WorkerTold]:
        """Those that are up, or also those that ended lately."""
        return Page([_worker(one) for one in await workers.known(desk.database, everyone=everyone)])


async def _one(desk: Desk, name: str) -> PoolTold:
    routes = await desk.routing.read()
    if name not in routes.pools:
        raise unknown("pool", name, routes.pools)
    return _told(routes.pools[name], desk.routing.clock.now_ms())


def _told(pool: Pool, now_ms: int) -> PoolTold:
    return PoolTold(
        id=pool.id,
        name=pool.name,
        status=pool.spec.status_at(now_ms).value,
        provides=pool.spec.provides,
        description=pool.spec.description,
    )


def _worker(known: Known) -> WorkerTold:
    hello = known.hello
    return WorkerTold(
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
