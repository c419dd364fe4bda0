"""`rota workers`: workers with their resources and bookings, as stored in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from rota.accounting.resources import unknown_name_error
from rota.cli.core.resolve_ids import PREFIX_CHARS_MIN
from rota.cli.core.tables import CliPage, Table, cores_text
from rota.engine.queries.workers import WorkerRecord, worker_records
from rota.infra.postgres import Database
from rota.model.units import humanize_duration

NO_WORKERS: Final = "No worker is up: `rota worker` starts one, and `rota up` starts one with the server."
TASKS_SHOWN_MAX: Final = 5


async def list_workers(database: Database, names: Sequence[str], *, everyone: bool) -> CliPage:
    found = await worker_records(database, everyone=everyone)
    return workers_page([worker for name in names for worker in _match_workers(found, name)] if names else found)


def _match_workers(workers: Sequence[WorkerRecord], text: str) -> list[WorkerRecord]:
    """By name or id prefix. Several workers may have had the same name, one after the other."""
    by_name = [worker for worker in workers if worker.name == text]
    by_prefix = [
        worker for worker in workers if len(text) >= PREFIX_CHARS_MIN and str(worker.id).startswith(text.lower())
    ]
    if not (by_name or by_prefix):
        raise unknown_name_error("worker", text, [worker.name for worker in workers])
    return by_name or by_prefix


def workers_page(workers: Sequence[WorkerRecord]) -> CliPage:
    data = [_data(worker) for worker in workers]
    if not workers:
        return CliPage(data, [NO_WORKERS])
    now = datetime.now(UTC)
    rows = [
        (
            worker.name,
            worker.pool,
            _state_text(worker, now),
            f"{worker.frames} of {worker.hello.slots}",
            f"{cores_text(worker.cores)} of {cores_text(worker.hello.cores)}",
            f"{worker.gpus} of {worker.hello.gpus}",
            _memory_text(worker.hello.memory_mb),
            _tasks_text(worker.hello.tasks),
            ", ".join(f"{key}={value}" for key, value in sorted(worker.hello.labels.items())),
            worker.id,
        )
        for worker in workers
    ]
    columns = ("worker", "pool", "state", "frames", "cores", "GPUs", "memory", "tasks", "labels", "id")
    return CliPage(data, [Table(columns, rows, wide=("labels", "id"))])


def _state_text(worker: WorkerRecord, now: datetime) -> str:
    if worker.ended_at is None:
        return f"up for {humanize_duration((now - worker.up_at).total_seconds())}"
    return f"{worker.state} {humanize_duration((now - worker.ended_at).total_seconds())} ago"


def _memory_text(megabytes: int) -> str:
    return "unknown" if not megabytes else f"{megabytes / 1024:.1f} GiB" if megabytes >= 1024 else f"{megabytes} MiB"


def _tasks_text(names: Sequence[str]) -> str:
    more = f" and {len(names) - TASKS_SHOWN_MAX} more" if len(names) > TASKS_SHOWN_MAX else ""
    return ", ".join(names[:TASKS_SHOWN_MAX]) + more if names else "commands only"


def _data(worker: WorkerRecord) -> dict[str, object]:
    registration = worker.hello
    return {
        "id": worker.id,
        "name": worker.name,
        "pool": worker.pool,
        "state": worker.state,
        "up_at": worker.up_at,
        "ended_at": worker.ended_at,
        "slots": registration.slots,
        "cores": registration.cores / 100,
        "gpus": registration.gpus,
        "memory_mb": registration.memory_mb,
        "labels": registration.labels,
        "capabilities": registration.capabilities,
        "tasks": registration.tasks,
        "frames": worker.frames,
        "used_cores": worker.cores / 100,
        "used_gpus": worker.gpus,
        "jobs": worker.jobs,
    }
