"""The SDK, imported as `from rota import ...`: declare tasks, agents and workflows, submit jobs, wait for results.

Importing an app starts nothing: connections are opened by the first call that needs one. Everything is async; `.sync`
runs the same calls on a background loop. Values are validated against the task's annotations (`payload`).

| module | subject |
|---|---|
| `app`, `load_app` | `Rota`, the set of tasks of an application; loading it from `module:app` |
| `task`, `task_options`, `payload` | tasks, submission options, encoding of arguments and results |
| `job`, `progress_bar` | a submitted job |
| `agent` | declaration of agents |
| `workflow/` | declaration of workflows, and their runs |
| `context`, `exceptions` | for the body of a task: its frame, and how it ends |
| `sync`, `background_loop` | the blocking facade |
| `own_transaction` | submission in the caller's own transaction |
"""

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
