"""Workers as stored in PostgreSQL: their registration, and the procs booked on each.

A silent worker counts as up until the leader declares it lost. The load of a machine, and whether a worker is draining,
is known only to servers (`rota.placement.WorkerRegistry`).
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
    """A worker as it registered, with its procs. Cores in hundredths."""

    id: UUID
    name: str
    pool: str
    state: str
    hello: Register
    heartbeat_s: float
    up_at: datetime
    ended_at: datetime | None
    frames: int
    cores: int
    gpus: int
    memory_mb: int
    jobs: int

    def to_placement_worker(self) -> WorkerInfo:
        """The worker for placement; its load is unknown here."""
        register = self.hello
        worker = WorkerInfo(self.id, self.name, self.pool, 0.0)
        heartbeat = Heartbeat(
            worker=self.id,
            name=self.name,
            pool=self.pool,
            number=0,
            slots=register.slots,
            cores=register.cores,
            gpus=register.gpus,
            memory_mb=register.memory_mb,
            labels=register.labels,
            interval_s=self.heartbeat_s,
            capabilities=(*register.capabilities, *(f"{TASK_CAPABILITY_PREFIX}{name}" for name in register.tasks)),
        )
        worker.apply_heartbeat(heartbeat, Limits())
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
    """A placement registry for processes that receive no heartbeats."""
    registry = WorkerRegistry()
    registry.set_routes(await RouteStore(database).read())
    for worker in await worker_records(database):
        registry.hydrate(worker.to_placement_worker(), 0.0)
    return registry
