"""What undoes a job: a submission made of the job itself and of what its compensation says differently. No I/O."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.model.errors import InvalidInput
from rota.model.job import CRITICAL, Compensation, Details, LayerSpec, RetrySpec, Submission, decode, encode
from rota.model.job_plan import OWN_LABELS, OWN_PREFIXES, Plan, plan
from rota.model.work import Work
from rota.model.workflow_check import FlowStep
from rota.model.workflow_run import Undo

TRIES: Final = 3
"""How often a compensation is tried again at least, when its job does not say otherwise."""
SAGA: Final = "saga_compensation"
SAGA_OF: Final = "saga_workflow_id"
IS_COMPENSATION: Final = "is_compensation"
OWN: Final = frozenset({SAGA, SAGA_OF, IS_COMPENSATION})


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has succeeded, as far as undoing it needs to know."""

    job: UUID
    show: str
    folder: str
    dept: str
    name: str
    labels: dict[str, str]
    details: Details
    work: Work
    input: Any


def undone_by(step: FlowStep, undo: Undo) -> Compensation:
    """What undoes a step, with what it is to be called with in this run."""
    by = step.spec.compensate
    assert by is not None, "only what can be undone is recorded"
    if by.context is None:
        return by
    context = undo.context if step.undo is not None else by.context
    runs_task = bool(by.task) or not (by.argv or step.spec.argv)
    return msgspec.structs.replace(by, context={"args": [], "kwargs": context} if runs_task else context)


def undoing(origin: Origin, by: Compensation, saga: str) -> Submission:
    """The submission that undoes a job, checked; InvalidInput if it could never be accepted."""
    details = origin.details
    own = by.task or by.argv
    kept = {name: value for name, value in origin.labels.items() if not is_own(name)}
    labels = {**kept, **by.labels, SAGA: "true", IS_COMPENSATION: "true"}
    if len(saga) <= 1000:
        labels[SAGA_OF] = saga
    submission = Submission(
        show=origin.show,
        folder=origin.folder,
        dept=origin.dept,
        name=f"undo {origin.name}"[:200],
        topic=by.topic,
        priority=CRITICAL,
        labels=labels,
        env={**details.env, **by.env, SAGA: "true", SAGA_OF: saga},
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
        idempotency_key=by.idempotency_key or key_of(saga, origin, by),
        layers=(_layer(origin, by, own=bool(own)),),
    )
    planned(submission)
    return submission


def planned(submission: Submission) -> Plan:
    """What to write for a compensation; InvalidInput for what is none."""
    return plan(submission, may_be_critical=True, own=OWN)


def key_of(saga: str, origin: Origin, by: Compensation) -> str:
    """One compensation of a job is one job, however often it is asked for."""
    index = str(origin.details.step_index) if origin.details.step_index else ""
    words = "|".join((saga, str(origin.job), by.topic, by.capability or origin.details.capability, index))
    return f"saga:{sha256(words.encode()).hexdigest()[:32]}"


def read(data: bytes) -> Submission:
    """A recorded compensation, or InvalidInput when it is damaged."""
    submission = decode(data)
    planned(submission)
    return submission


def write(submission: Submission) -> bytes:
    return encode(submission)


def again(submission: Submission, attempt: int) -> Submission:
    """The same under another key, for a person who has it run once more."""
    key = submission.idempotency_key.rpartition("#")[0] or submission.idempotency_key
    return msgspec.structs.replace(submission, idempotency_key=f"{key[:190]}#{attempt}")


def is_own(label: str) -> bool:
    """Whether it was set by Rota, of the job that is undone and not of its compensation."""
    return label.lower() in OWN_LABELS or label.lower().startswith(OWN_PREFIXES)


def _budget(by: Compensation) -> Any:
    from rota.model.job import Budget

    return by.budget or Budget()


def _layer(origin: Origin, by: Compensation, *, own: bool) -> LayerSpec:
    work = origin.work
    if not own and not (work.task or work.argv):
        raise InvalidInput("The compensation says nothing to run, and neither does its job.")
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
            most=max(TRIES, retries.most), first_s=retries.first_s, longest_s=retries.longest_s, lost=retries.lost
        ),
    )
