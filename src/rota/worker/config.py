"""Configuration of a worker: advertised resources, tasks and limits. No I/O."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rota.model.jobs.work import ProcessLimits
from rota.sdk.task import Task
from rota.worker.data.blob_store import WorkerBlobStore
from rota.worker.registration_info import RegistrationInfo


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    offer: RegistrationInfo
    tasks: dict[str, Task[..., Any]]
    app: str = ""
    """Where child processes load the same tasks from: `module:app` or a file."""
    folder: Path
    """Directory the app was loaded from; working directory of sync tasks."""
    work_dir: Path
    """Parent of the per-frame directories."""
    keep_dirs: bool = False
    processes: int = 1
    """Maximum number of processes for sync tasks."""
    limits: ProcessLimits = ProcessLimits()
    """Upper bound for each process of a command; a layer can only lower it."""
    output_max: int = 10 * 1024 * 1024
    """Bytes kept per output stream of a frame."""
    drain_s: float = 60.0
    store: WorkerBlobStore | None = None
