"""`rota workers`: who is up, what they have and what is booked there, as PostgreSQL knows it.

A worker that fell silent a moment ago still counts as up, until the servers' leader says otherwise. What a machine's
processors really do is known to the servers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec

from rota.cli.books_view import Page, Table, cores
from rota.cli.queue_view import span
from rota.infra.postgres import Database, query
from rota.model.messages import Heartbeat, Hello
from rota.model.settings.lifecycle import Routing
from rota.model.work import TASK_CAPABILITY
from rota.placement import Need, Worker

LIST = query(__package__, "workers_list")
NONE: Final = "No worker is up: `rota worker` starts one, and `rota up` one with the server."
TASKS_SHOWN: Final = 5


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
        worker.told(beat, Routing())
        worker.reserve(Need(0, 0, 0), self.frames)
        worker.reserved_cores, worker.reserved_gpus = self.cores, self.gpus
        return worker


async def known(database: Database, *, everyone: bool = False) -> list[Known]:
    rows = await database.rows(LIST, everyone)
    return [Known(**{**dict(row.items()), "hello": msgspec.msgpack.decode(row["hello"], type=Hello)}) for row in rows]


async def listed(database: Database, *, everyone: bool) -> Page:
    return page(await known(database, everyone=everyone))


def page(workers: Sequence[Known]) -> Page:
    data = [_data(worker) for worker in workers]
    if not workers:
        return Page(data, [NONE])
    now = datetime.now(UTC)
    rows = [
        (
            worker.name,
            worker.pool,
            _standing(worker, now),
            f"{worker.frames} of {worker.hello.slots}",
            f"{cores(worker.cores)} of {cores(worker.hello.cores)}",
            f"{worker.gpus} of {worker.hello.gpus}",
            _memory(worker.hello.memory_mb),
            _tasks(worker.hello.tasks),
            ", ".join(f"{key}={value}" for key, value in sorted(worker.hello.labels.items())),
        )
        for worker in workers
    ]
    return Page(
        data, [Table(("worker", "pool", "state", "frames", "cores", "GPUs", "memory", "tasks", "labels"), rows)]
    )


def _standing(worker: Known, now: datetime) -> str:
    if worker.ended_at is None:
        return f"up for {span((now - worker.up_at).total_seconds())}"
    return f"{worker.state} {span((now - worker.ended_at).total_seconds())} ago"


def _memory(megabytes: int) -> str:
    return "not known" if not megabytes else f"{megabytes / 1024:.1f} GiB" if megabytes >= 1024 else f"{megabytes} MiB"


def _tasks(names: Sequence[str]) -> str:
    more = f" and {len(names) - TASKS_SHOWN} more" if len(names) > TASKS_SHOWN else ""
    return ", ".join(names[:TASKS_SHOWN]) + more if names else "commands only"


def _data(worker: Known) -> dict[str, object]:
    hello = worker.hello
    return {
        "id": worker.id,
        "name": worker.name,
        "pool": worker.pool,
        "state": worker.state,
        "up_at": worker.up_at,
        "ended_at": worker.ended_at,
        "slots": hello.slots,
        "cores": hello.cores / 100,
        "gpus": hello.gpus,
        "memory_mb": hello.memory_mb,
        "labels": hello.labels,
        "capabilities": hello.capabilities,
        "tasks": hello.tasks,
        "frames": worker.frames,
        "used_cores": worker.cores / 100,
        "used_gpus": worker.gpus,
        "jobs": worker.jobs,
    }
