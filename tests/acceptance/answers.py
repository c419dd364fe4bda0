"""Types of the JSON output of each command, so that missing, new or changed fields are detected.

Where the engine has a struct for the output, that struct is the type; the others are defined here.
"""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec

from rota.accounting.audit import LedgerAudit
from rota.api.explanation import JobExplanation
from rota.api.jobs import JobHistoryEntry
from rota.cli.doctor.view import DoctorCheck
from rota.cli.local.up import LocalStatus
from rota.infra.postgres.migrate import MigrationStatus
from rota.model.access import Role
from rota.model.job_states import FrameState, JobState
from rota.model.policy.outputs import OutputCheck, OutputReviewResult, OutputSummary
from rota.model.workflows.run_state import HistoryEvent, RunState, StepState
from rota.queue.counts import QueueCounts as Counts
from rota.queue.storage_report import LongTransaction, TableSize

Number = int | float


def answer(name, base=(), /, **fields):
    """A struct with exactly these fields and those of the structs in `base`."""
    inherited = [_field(field) for of in base for field in msgspec.structs.fields(of)]
    return msgspec.defstruct(name, [*inherited, *fields.items()], forbid_unknown_fields=True, kw_only=True)


def _field(field):
    return (field.name, field.type) if field.required else (field.name, field.type, field.default)


def with_optional(name, base, /, **fields):
    """Like `base`, with additional optional fields."""
    optional = [(field, type_ | None, None) for field, type_ in fields.items()]
    return msgspec.defstruct(name, optional, bases=(base,), forbid_unknown_fields=True, kw_only=True)


Named = answer("Named", id=UUID, name=str)
Show = with_optional("Show", answer("ShowAlone", [Named], managed=bool, fence=int), max_jobs=int)
ShowLine = answer("ShowLine", [Show], size=Number, burst=Number, used_cores=Number)
Share = answer("Share", [Named], size=Number, burst=Number, gpu_burst=int, used_cores=Number, used_gpus=int)
Caps = answer(
    "Caps",
    [Named],
    min_cores=Number,
    max_cores=Number,
    min_gpus=int,
    max_gpus=int,
    used_cores=Number,
    used_gpus=int,
)
Pool = answer("Pool", [Named], size=Number, burst=Number, used_cores=Number, shows=list[str])
Dept = answer("Dept", [Named], shows=list[str])
Change = answer(
    "Change",
    kind=str,
    action=str,
    changed=bool,
    show=str | None,
    before=dict[str, Any] | None,
    after=dict[str, Any] | None,
    notes=list[str],
)
PoolOfTopic = answer("PoolOfTopic", name=str, status=str, provides=list[str], placement=str)
Topic = answer("Topic", topic=str, pools=list[PoolOfTopic], implied=bool)
Usage = answer("Usage", cores=int, gpus=int)
Standing = answer("Standing", show=Show, pool=str, used=Usage, kept=str)
Worker = answer(
    "Worker",
    [Named],
    pool=str,
    state=str,
    up_at=datetime,
    ended_at=datetime | None,
    slots=int,
    cores=float,
    gpus=int,
    memory_mb=int,
    labels=dict[str, str],
    capabilities=list[str],
    tasks=list[str],
    frames=int,
    used_cores=float,
    used_gpus=int,
    jobs=int,
)
JobLine = answer(
    "JobLine",
    [Named],
    show=str,
    topic=str,
    priority=int,
    state=JobState,
    reason=str | None,
    labels=dict[str, str],
    submitted_at=datetime,
    finished_at=datetime | None,
    frames=int,
    succeeded=int,
    ended=int,
)
Layer = answer(
    "Layer",
    [Named],
    queue=str,
    task=str | None,
    argv=list[str] | None,
    frames=int,
    frame_spec=str,
    cores=float,
    gpus=int,
    memory_mb=int,
    counts=dict[FrameState, int],
    took_ms=int,
)
JobAlone = answer(
    "JobAlone",
    [Named],
    show=str,
    folder=str,
    dept=str,
    topic=str,
    priority=int,
    state=JobState,
    reason=str | None,
    labels=dict[str, str],
    details=dict[str, Any],
    workflow_id=str | None,
    submitted_at=datetime,
    deadline_at=datetime | None,
    wait_until=datetime | None,
    run_at=datetime | None,
    finished_at=datetime | None,
    history=list[JobHistoryEntry],
    layers=list[Layer],
    policy=dict[str, Any] | None,
)
Job = answer("Job", [JobAlone], artifacts=int, artifact_bytes=int)
Ended = answer("Ended", [JobAlone], results=list[dict[str, Any]])
Submitted = answer("Submitted", job=UUID, state=JobState | None, already=bool)
Gate = answer("Gate", verdict=str, reason=str | None, because=str | None)
DryRun = answer(
    "DryRun", already=UUID | None, gate=Gate, state=JobState, frames=int, starts=int, explained=JobExplanation
)
Retried = answer("Retried", job=UUID, retry_of=UUID, frames=int)
Cancelled = answer("Cancelled", job=UUID, state=JobState, changed=bool)
LogPiece = answer("LogPiece", attempt=int, stream=str, at=int, text=str, dropped=int, lost=int)
Result = answer(
    "Result",
    layer=str,
    frame=int,
    attempt=int,
    state=FrameState,
    code=str | None,
    error=str | None,
    took_ms=int,
    worker=UUID | None,
    finished_at=datetime,
    value=Any,
)
Artifact = answer("Artifact", layer=str, frame=int, attempt=int, name=str, bytes=int, sha256=str)
QueueCounts = answer("QueueCounts", [Counts], queue=str, terminal=int)
QueueLine = answer(
    "QueueLine",
    queue=str,
    shards=int,
    paused=bool,
    dlq_on_fail=bool,
    waiting=int,
    running=int,
    oldest_s=float | None,
)
Paused = answer("Paused", queue=str, paused=bool, changed=bool, waiting=int, running=int)
Rebuilt = answer("Rebuilt", queues=int, counter_mode=str, was=str, took_s=float)
Slot = answer(
    "Slot",
    number=int,
    generation=int | None,
    is_open=bool,
    bytes=int,
    waiting=int,
    running=int,
    holds=bool,
    state=str,
)
Storage = answer(
    "Storage",
    counter_mode=str,
    counters_trusted=bool,
    pending_deltas=int,
    generation=int,
    open_s=float,
    keeper=str | None,
    as_of=datetime,
    slots=list[Slot],
    tables=list[TableSize],
    sessions=list[LongTransaction],
)
Act = with_optional(
    "Act",
    answer("ActAlone", action=str, of=str, matched=int, chosen=int, done=int, dry_run=bool),
    jobs=list[dict[str, Any]],
)
Grant = answer("Grant", role=Role, show=dict[str, Any] | None)
Key = answer(
    "Key",
    id=str,
    name=str,
    principal=str,
    grants=list[Grant],
    state=str,
    created_at=datetime,
    expires_at=datetime | None,
    last_used_at=datetime | None,
    revoked_at=datetime | None,
)
NewKey = answer("NewKey", [Key], key=str, notes=list[str])
RevokedKey = answer("RevokedKey", [Key], changed=bool)
Principal = answer(
    "Principal",
    name=str,
    kind=Literal["person", "service"],
    is_global=bool,
    keys=int,
    created_at=datetime,
    disabled_at=datetime | None,
)
DisabledPrincipal = answer("DisabledPrincipal", [Principal], changed=bool)
Setting = answer("Setting", path=str, value=Any, unit=str | None, source=str, where=str | None)
Migrated = answer("Migrated", dry_run=bool, migrations=list[str])
AuditVerified = answer("AuditVerified", ok=bool, checked=int, head=str, problem=dict[str, Any] | None)
LedgerAudited = answer("LedgerAudited", ok=bool, shows=list[LedgerAudit], strangers=list[str])
Mapped = answer("Mapped", topic=str, pools=list[str], changed=bool, notes=list[str])
Unmapped = answer("Unmapped", topic=str, pools=list[str], changed=bool)
PoolPlacement = answer("PoolPlacement", pool=str, placement=Literal["fit", "spread", "pack"], changed=bool)
PoolStatus = answer("PoolStatus", pool=str, status=Literal["active", "draining"], changed=bool)
Doctor = answer("Doctor", ok=bool, checks=list[DoctorCheck])
Top = answer(
    "Top",
    at=datetime,
    waiting=int,
    running=int,
    ended=int,
    live_jobs=int,
    shows=list[dict[str, Any]],
    pools=list[dict[str, Any]],
    workers=list[dict[str, Any]],
    jobs=list[dict[str, Any]],
)
ShowInfo = answer("ShowInfo", [Show], use_is_live=bool, subscriptions=list[Share], folders=list[Caps], depts=list[Caps])
Agent = answer(
    "Agent",
    name=str,
    state=Literal["PAUSED", "QUARANTINED", "RUNNING", "WAITING", "DONE"],
    schedule=str,
    group=str,
    due=datetime | None,
    run=int | None,
    replica=str | None,
    since=datetime | None,
    deadline=datetime | None,
    streak=int,
    failure=str | None,
    error=str | None,
    runs=int,
    last_outcome=str | None,
    last_took_ms=int | None,
    last_started=datetime | None,
    backfill=datetime | None,
    backfill_until=datetime | None,
    spec=dict[str, Any],
)
AgentRun = answer(
    "AgentRun",
    run=int,
    replica=str,
    outcome=Literal["SUCCEEDED", "FAILED", "TIMEOUT", "CANCELLED", "LOST", "SKIPPED"],
    failure=str | None,
    error=str | None,
    took_ms=int,
    backfill=bool,
    slot=datetime | None,
    due=datetime,
    started=datetime,
)
AgentChange = answer("AgentChange", agent=str, changed=bool)
AgentTrigger = answer("AgentTrigger", agent=str, queued=bool)
AgentGone = answer("AgentGone", agent=str)
AgentsHealth = answer("AgentsHealth", health=str, reasons=list[str], agents=dict[str, int], members=list[str])
Approval = answer(
    "Approval",
    id=UUID,
    kind=Literal["job", "step"],
    subject=str,
    show=str,
    state=str,
    title=str,
    rule=str,
    reason=str,
    snapshot=str,
    hash=str,
    quorum=int,
    agreed=int,
    approvers=list[str],
    principal=str,
    actor=str,
    requested_at=datetime,
    expires_at=datetime | None,
    decided_at=datetime | None,
    votes=list[dict[str, Any]],
)
ApprovalShown = answer("ApprovalShown", approval=Approval, job=dict[str, Any] | None, step=dict[str, Any] | None)
ApprovalSaid = answer("ApprovalSaid", approval=Approval, changed=bool)
Remediated = answer("Remediated", job=UUID, remediation_of=UUID, frames=int)
Backfill = answer("Backfill", agent=str, runs=int, first=datetime, last=datetime)

__all__ = ["DoctorCheck", "JobExplanation", "LocalStatus", "MigrationStatus"]

KeptOutput = answer("KeptOutput", (OutputSummary,))
KeptOutputShown = with_optional(
    "KeptOutputShown", answer("Shown", (OutputSummary,), checks=list[OutputCheck], artifacts=list[str]), value=Any
)
KeptOutputChange = answer("KeptOutputChange", (OutputReviewResult,))
PolicyReloaded = answer("PolicyReloaded", snapshot=str, changed=bool | None)

_STEP = answer("_StepPlan", id=str, type=str, after=list[str])
WorkflowPlan = answer("WorkflowPlan", workflow=str, steps=list[_STEP])
_STEP_GATE = answer("_StepGate", (Gate,), complete=bool)
_DRY_STEP = answer("_DryStep", (_STEP,), gate=_STEP_GATE | None)
WorkflowDryRun = answer("WorkflowDryRun", workflow=str, steps=list[_DRY_STEP], input=dict[str, Any])
WorkflowDeclared = answer("WorkflowDeclared", workflow=str, version=int, changed=bool)
WorkflowLine = answer("WorkflowLine", show=str, name=str, version=int, steps=int, runs=int, description=str)
RunStarted = answer("RunStarted", run=UUID, version=int, already=bool)
RunLine = answer(
    "RunLine",
    id=UUID,
    show=str,
    workflow=str,
    version=int,
    state=RunState,
    error=str | None,
    started_at=datetime,
    ended_at=datetime | None,
)
_RUN_STEP = answer(
    "_RunStep",
    id=str,
    type=str,
    state=StepState,
    attempt=int,
    job=UUID | None,
    reason=str,
    due_at=datetime | None,
    output=Any,
)
_ENTRY = answer("_Entry", job=UUID, step=str, state=str, attempt=int, undo=UUID | None, error=str | None)
_SAGA = answer("_Saga", state=str, reason=str | None, entries=list[_ENTRY])
RunShown = answer(
    "RunShown",
    (RunLine,),
    input=dict[str, Any],
    output=Any,
    parent=UUID | None,
    show_id=UUID,
    steps=list[_RUN_STEP],
    saga=_SAGA | None,
)
RunMoment = answer("RunMoment", (HistoryEvent,), at=datetime)
RunRolledBack = answer("RunRolledBack", run=UUID, entries=int)
RunChanged = answer("RunChanged", run=UUID, changed=bool)
