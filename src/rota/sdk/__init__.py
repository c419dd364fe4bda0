"""What user code imports, by way of `from rota import ...`: tasks are declared, submitted and waited for here."""

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
from rota.model.job import LayerSpec, Submission
from rota.model.work import Retries
from rota.sdk.app import Rota
from rota.sdk.context import Context, context
from rota.sdk.endings import Cancelled, Fatal, Retry
from rota.sdk.finding import database_url
from rota.sdk.job import Job
from rota.sdk.runs import Run, SyncRun
from rota.sdk.steps import Step, Steps
from rota.sdk.sync import SyncJob, SyncTask, SyncWorkflow
from rota.sdk.task import Call, Task
from rota.sdk.workflow import Workflow

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
