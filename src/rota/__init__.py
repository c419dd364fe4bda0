"""Rota: a distributed job scheduler with exact accounting.

    from rota import Rota

    app = Rota()

    @app.task(cores=2)
    async def render(scene: str) -> int: ...

    job = await render.submit("comp")
    frames = await job.result()

Names are imported on first use, so that `import rota` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.client.discovery import database_url
    from rota.model.errors import (
        JobCancelled,
        JobDenied,
        JobFailed,
        JobNotSucceeded,
        JobQuarantined,
        JobTimedOut,
        NotEnded,
        RotaError,
        RunNotSucceeded,
    )
    from rota.model.jobs.submission import LayerSpec, Submission
    from rota.model.jobs.work import Retries
    from rota.sdk.app import Rota
    from rota.sdk.context import Context, context
    from rota.sdk.exceptions import Cancelled, Fatal, Retry
    from rota.sdk.job import Job
    from rota.sdk.sync import SyncJob, SyncTask, SyncWorkflow
    from rota.sdk.task import Call, Task
    from rota.sdk.workflow.builder import Step, Steps
    from rota.sdk.workflow.run import Run, SyncRun
    from rota.sdk.workflow.workflow import Workflow

__all__ = [
    "Call",
    "Cancelled",
    "Context",
    "Fatal",
    "Job",
    "JobCancelled",
    "JobDenied",
    "JobFailed",
    "JobNotSucceeded",
    "JobQuarantined",
    "JobTimedOut",
    "LayerSpec",
    "NotEnded",
    "Retries",
    "Retry",
    "Rota",
    "RotaError",
    "Run",
    "RunNotSucceeded",
    "Step",
    "Steps",
    "Submission",
    "SyncJob",
    "SyncRun",
    "SyncTask",
    "SyncWorkflow",
    "Task",
    "Workflow",
    "context",
    "database_url",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import rota.sdk

    return getattr(rota.sdk, name)
