"""How a worker is to run: what it offers, what it can run, and its limits. No I/O."""

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
    """How a process of ours finds the same tasks: `module:app` or a file."""
    folder: Path
    """Where the app was found, and where sync tasks run."""
    work_dir: Path
    """Below it each command has a directory of its own."""
    keep_dirs: bool = False
    processes: int = 1
    """For sync tasks, at most."""
    limits: ProcessLimits = ProcessLimits()
    """Of each process of a command, whatever its layer asks for."""
    output_max: int = 10 * 1024 * 1024
    """Bytes kept of each stream that a frame writes to."""
    drain_s: float = 60.0
    store: WorkerBlobStore | None = None
