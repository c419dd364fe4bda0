"""`rota workers`: who is up, what they have and what is booked there, as PostgreSQL knows it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from rota.accounting.items import unknown
from rota.cli.books_view import Page, Table, cores
from rota.cli.naming import PREFIX_LEAST
from rota.engine.workers import Known, known
from rota.infra.postgres import Database
from rota.model.units import span

NONE: Final = "No worker is up: `rota worker` starts one, and `rota up` one with the server."
TASKS_SHOWN: Final = 5


async def listed(database: Database, names: Sequence[str], *, everyone: bool) -> Page:
    found = await known(database, everyone=everyone)
    return page([worker for name in names for worker in _called(found, name)] if names else found)


def _called(workers: Sequence[Known], text: str) -> list[Known]:
    """Several may have had a name one after the other."""
    by_name = [worker for worker in workers if worker.name == text]
    begun = [worker for worker in workers if len(text) >= PREFIX_LEAST and str(worker.id).startswith(text.lower())]
    if not (by_name or begun):
        raise unknown("worker", text, [worker.name for worker in workers])
    return by_name or begun


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
            worker.id,
        )
        for worker in workers
    ]
    columns = ("worker", "pool", "state", "frames", "cores", "GPUs", "memory", "tasks", "labels", "id")
    return Page(data, [Table(columns, rows, wide=("labels", "id"))])


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
