"""Workers as PostgreSQL knows them: what each said of itself when it came in, and what is booked on it.

A worker that fell silent a moment ago still counts as up, until the leader says otherwise. What a machine's processors
really do, and whether a worker is ending, is known to servers alone (`rota.placement.Registry`).
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from rota.infra.postgres import Database, query
from rota.model.messages import Heartbeat, Hello
from rota.model.settings.lifecycle import Routing as Limits
from rota.model.work import TASK_CAPABILITY
from rota.placement import Need, Registry, Worker
from rota.placement.routing import Routing

LIST = query(__package__, "workers_list")


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it introduced itself, with what is booked on it. Cores in hundredths."""

    id: UUID
    name: str
    pool: str
    state: str
    hello: Hello
    up_at: datetime
    ended_at: datetime | None
    frames: int
    cores: int
    gpus: int
    memory_mb: int
    jobs: int

    def placed(self) -> Worker:
        """As placement looks at it; its load is not known here."""
        hello = self.hello
        worker = Worker(self.id, self.name, self.pool, 0.0)
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
            capabilities=(*hello.capabilities, *(f"{TASK_CAPABILITY}{name}" for name in hello.tasks)),
        )
        worker.told(beat, Limits())
        worker.reserve(Need(0, 0, 0), self.frames)
        worker.reserved_cores, worker.reserved_gpus = self.cores, self.gpus
        worker.reserved_memory_mb = self.memory_mb
        return worker


async def known(database: Database, *, everyone: bool = False) -> list[Known]:
    rows = await database.rows(LIST, everyone)
    return [Known(**{**dict(row.items()), "hello": msgspec.msgpack.decode(row["hello"], type=Hello)}) for row in rows]


async def registry_of(database: Database) -> Registry:
    """Where frames could go, for a process that hears no worker."""
    registry = Registry()
    registry.route(await Routing(database).read())
    for worker in await known(database):
        registry.hydrate(worker.placed(), 0.0)
    return registry
