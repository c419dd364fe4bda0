"""Compensation: the submission that undoes a job, derived from the job and its `Compensation`. No I/O."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.model.errors import InvalidInput
from rota.model.jobs.submission import (
    CRITICAL,
    Compensation,
    LayerSpec,
    RetrySpec,
    Submission,
    SubmissionDetails,
    decode_submission,
    encode_submission,
)
from rota.model.jobs.validation import (
    RESERVED_LABEL_PREFIXES,
    RESERVED_LABELS,
    ValidatedSubmission,
    validate_submission,
)
from rota.model.jobs.work import WorkView
from rota.model.workflows.compiler import CompiledStep
from rota.model.workflows.run_state import RecordCompensation

RETRIES_MIN: Final = 3
"""Minimum number of retries of a compensation, unless its job has more."""
SAGA_LABEL: Final = "saga_compensation"
SAGA_WORKFLOW_LABEL: Final = "saga_workflow_id"
COMPENSATION_LABEL: Final = "is_compensation"
SAGA_LABELS: Final = frozenset({SAGA_LABEL, SAGA_WORKFLOW_LABEL, COMPENSATION_LABEL})


class CompensatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a succeeded job that its compensation needs."""

    job: UUID
    show: str
    folder: str
    dept: str
    name: str
    labels: dict[str, str]
    details: SubmissionDetails
    work: WorkView
    input: Any


def step_compensation(step: CompiledStep, undo: RecordCompensation) -> Compensation:
    """The compensation of a step, with its input in this run."""
    compensation = step.spec.compensate
    assert compensation is not None, "only what can be undone is recorded"
    if compensation.context is None:
        return compensation
    context = undo.context if step.undo is not None else compensation.context
    runs_task = bool(compensation.task) or not (compensation.argv or step.spec.argv)
    return msgspec.structs.replace(compensation, context={"args": [], "kwargs": context} if runs_task else context)


def compensation_submission(origin: CompensatedJob, by: Compensation, saga: str) -> Submission:
    """The validated submission that undoes a job; raises InvalidInput if it could never be accepted."""
    details = origin.details
    runs_own = by.task or by.argv
    user_labels = {name: value for name, value in origin.labels.items() if not is_reserved_label(name)}
    labels = {**user_labels, **by.labels, SAGA_LABEL: "true", COMPENSATION_LABEL: "true"}
    if len(saga) <= 1000:
        labels[SAGA_WORKFLOW_LABEL] = saga
    submission = Submission(
        show=origin.show,
        folder=origin.folder,
        dept=origin.dept,
        name=f"undo {origin.name}"[:200],
        topic=by.topic,
        priority=CRITICAL,
        labels=labels,
        env={**details.env, **by.env, SAGA_LABEL: "true", SAGA_WORKFLOW_LABEL: saga},
        budget=by.budget or msgspec.structs.replace(details.budget, deadline_ms=0) if details.budget else _budget(by),
        requires=by.requires or details.requires,
        capability=by.capability or details.capability,
        risk_tags=by.risk_tags or details.risk_tags,
        actor_id=by.actor_id or details.actor_id,
        actor_type=by.actor_type or details.actor_type,
        tenant=by.tenant or details.tenant,
        principal=details.principal or by.principal,
        adapter_id=by.adapter_id or details.adapter_id,
        pack_id=by.pack_id or details.pack_id,
        memory_id=by.memory_id or details.memory_id,
        context_hints=by.context_hints or details.context_hints,
        workflow_id=saga,
        step_index=details.step_index,
        parent_job_id=origin.job,
        idempotency_key=by.idempotency_key or compensation_key(saga, origin, by),
        layers=(_layer(origin, by, own=bool(runs_own)),),
    )
    validate_compensation(submission)
    return submission


def validate_compensation(submission: Submission) -> ValidatedSubmission:
    """The stored form of a compensation; raises InvalidInput."""
    return validate_submission(submission, may_be_critical=True, own=SAGA_LABELS)


def compensation_key(saga: str, origin: CompensatedJob, by: Compensation) -> str:
    """Idempotency key: one compensation of a job is one job, however often it is requested."""
    index = str(origin.details.step_index) if origin.details.step_index else ""
    parts = "|".join((saga, str(origin.job), by.topic, by.capability or origin.details.capability, index))
    return f"saga:{sha256(parts.encode()).hexdigest()[:32]}"


def decode_compensation(data: bytes) -> Submission:
    """A recorded compensation; raises InvalidInput if it is damaged."""
    submission = decode_submission(data)
    validate_compensation(submission)
    return submission


def encode_compensation(submission: Submission) -> bytes:
    return encode_submission(submission)


def with_retry_key(submission: Submission, attempt: int) -> Submission:
    """The same submission under another key, for a manual retry."""
    key = submission.idempotency_key.rpartition("#")[0] or submission.idempotency_key
    return msgspec.structs.replace(submission, idempotency_key=f"{key[:190]}#{attempt}")


def is_reserved_label(label: str) -> bool:
    """Whether Rota set this label for the compensated job, so that its compensation must not inherit it."""
    return label.lower() in RESERVED_LABELS or label.lower().startswith(RESERVED_LABEL_PREFIXES)


def _budget(by: Compensation) -> Any:
    from rota.model.jobs.submission import Budget

    return by.budget or Budget()


def _layer(origin: CompensatedJob, by: Compensation, *, own: bool) -> LayerSpec:
    work = origin.work
    if not own and not (work.task or work.argv):
        raise InvalidInput("Neither the compensation nor its job has anything to run: give it a task or an argv.")
    retries = work.retries
    return LayerSpec(
        name="undo",
        task=by.task if own else work.task,
        argv=by.argv if own else work.argv,
        input=by.context if by.context is not None else origin.input,
        cores=work.cores / 100,
        gpus=work.gpus,
        memory=f"{work.memory_mb}MiB" if work.memory_mb else "",
        timeout_s=work.timeout_s,
        kill_after_s=work.kill_after_s,
        retries=RetrySpec(
            most=max(RETRIES_MIN, retries.most), first_s=retries.first_s, longest_s=retries.longest_s, lost=retries.lost
        ),
    )
