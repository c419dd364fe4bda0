"""Workers as PostgreSQL knows them: what each said of itself when it came in, and what is booked on it.

A worker that fell silent a moment ago still counts as up, until the leader says otherwise. What a machine's processors
really do, and whether a worker is ending, is known to servers alone (`rota.placement.Registry`).
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from rota.infra.postgres import Database, query
from rota.model.jobs.work import TASK_CAPABILITY_PREFIX
from rota.model.protocol import Heartbeat, Register
from rota.model.settings.lifecycle import RoutingSettings as Limits
from rota.placement import Resources, WorkerInfo, WorkerRegistry
from rota.placement.route_store import RouteStore

LIST_WORKERS = query(__package__, "workers_list")


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it introduced itself, with what is booked on it. Cores in hundredths."""

    id: UUID
    name: str
    pool: str
    state: str
    hello: Register
    up_at: datetime
    ended_at: datetime | None
    frames: int
    cores: int
    gpus: int
    memory_mb: int
    jobs: int

    def to_placement_worker(self) -> WorkerInfo:
        """As placement looks at it; its load is not known here."""
        hello = self.hello
        worker = WorkerInfo(self.id, self.name, self.pool, 0.0)
        beat = Heartbeat(
            worker=self.id,
            name=self.name,
            pool=self.pool,
            number=0,
            slots=hello.slots,
            cores=hello.cores,
            gpus=hello.gpus,
            memory_mb=hello.memory_mb,
            labels=hello.labels,
            capabilities=(*hello.capabilities, *(f"{TASK_CAPABILITY_PREFIX}{name}" for name in hello.tasks)),
        )
        worker.apply_heartbeat(beat, Limits())
        worker.reserve(Resources(0, 0, 0), self.frames)
        worker.reserved_cores, worker.reserved_gpus = self.cores, self.gpus
        worker.reserved_memory_mb = self.memory_mb
        return worker


async def worker_records(database: Database, *, everyone: bool = False) -> list[WorkerRecord]:
    rows = await database.rows(LIST_WORKERS, everyone)
    return [
        WorkerRecord(**{**dict(row.items()), "hello": msgspec.msgpack.decode(row["hello"], type=Register)})
        for row in rows
    ]


async def load_registry(database: Database) -> WorkerRegistry:
    """Where frames could go, for a process that hears no worker."""
    registry = WorkerRegistry()
    registry.set_routes(await RouteStore(database).read())
    for worker in await worker_records(database):
        registry.hydrate(worker.to_placement_worker(), 0.0)
    return registry
