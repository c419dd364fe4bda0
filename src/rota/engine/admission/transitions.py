"""Applies admission decisions: jobs are queued, held or ended.

Every step checks the job's state under its row lock, so a repeated or late decision changes nothing: of two concurrent
admissions one queues the frames. Everything runs in the caller's transaction; if the process dies before the commit,
the jobs are still PENDING and the replayer has them decided again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from rota.engine.admission.decision import AdmissionDecision, AdmissionVerdict, admission_message
from rota.infra import failpoints, outbox
from rota.infra.postgres import Transaction, query
from rota.model import job_states
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.reasons import Reason
from rota.policy.decision_store import store_decisions

ADMIT = query(__package__, "submit_admit")
CHANGE_STATE = query(__package__, "submit_hold")
DEFER = query(__package__, "gate_wait")
LOCK = query(__package__, "gate_lock")


class JobFinishCallback(Protocol):
    """The only way in which jobs end."""

    async def __call__(self, on: Transaction, jobs: Mapping[JobId, AdmissionDecision], state: JobState) -> object:
        """End these jobs, each for its reason; jobs that have ended before are left unchanged."""
        ...


class AppliedDecisions(msgspec.Struct, frozen=True):
    """PENDING jobs that this call changed; jobs that had changed state before are in neither list."""

    admitted: list[JobId]
    held: list[JobId]
    """Held until they are approved."""


async def apply_decisions(
    on: Transaction,
    decisions: Mapping[JobId, AdmissionDecision],
    finish: JobFinishCallback,
    *,
    until: datetime | None = None,
) -> AppliedDecisions:
    """Apply decisions to jobs that are PENDING; after `until` they queue nothing."""
    by_verdict: dict[AdmissionVerdict, dict[JobId, AdmissionDecision]] = defaultdict(dict)
    for job, decision in decisions.items():
        by_verdict[decision.verdict][job] = decision
    if len(by_verdict) > 1:
        # Each verdict locks its own jobs; two callers with different verdicts on the same jobs could deadlock.
        await on.rows(LOCK, sorted(decisions))
    await store_decisions(on, [decision.said for decision in decisions.values() if decision.said is not None])
    admitted = await admit(on, by_verdict[AdmissionVerdict.ALLOW], until=until)
    held = await defer(on, by_verdict[AdmissionVerdict.REQUIRE_APPROVAL])
    await defer(on, by_verdict[AdmissionVerdict.WAIT])
    if by_verdict[AdmissionVerdict.DENY]:
        await finish(on, by_verdict[AdmissionVerdict.DENY], JobState.DENIED)
    return AppliedDecisions(admitted, held)


async def admit(
    on: Transaction, jobs: Mapping[JobId, AdmissionDecision] | Sequence[JobId], *, until: datetime | None = None
) -> list[JobId]:
    """PENDING to SCHEDULED, with their frames queued; returns the jobs that this call admitted."""
    if not jobs:
        return []
    policy_decisions = [each.said for each in jobs.values()] if isinstance(jobs, Mapping) else []
    digests = [each.digest if each is not None else None for each in policy_decisions]
    failpoints.hit("submit.before_admit")
    rows = await on.rows(ADMIT, list(jobs), digests or None, until)
    failpoints.after_send("submit.admit")
    return [JobId(row["id"]) for row in rows]


async def defer(on: Transaction, jobs: Mapping[JobId, AdmissionDecision]) -> list[JobId]:
    """Keep jobs PENDING until a retry, or hold them for an approval; returns the jobs that changed."""
    if not jobs:
        return []
    decisions = list(jobs.values())
    rows = await on.rows(
        DEFER,
        list(jobs),
        [each.state.value for each in decisions],
        [each.reason for each in decisions],
        [each.said.digest if each.said is not None else None for each in decisions],
        [each.wait_s for each in decisions],
    )
    return [JobId(row["id"]) for row in rows]


async def approve(on: Transaction, jobs: Sequence[JobId], reason: str = Reason.APPROVED.value) -> list[JobId]:
    """APPROVAL_REQUIRED to PENDING; the admission controller is notified after the commit."""
    held = await change_unqueued_state(on, jobs, JobState.APPROVAL_REQUIRED, JobState.PENDING, reason)
    if held:
        await outbox.add(on, [admission_message(held)])
    return held


async def change_unqueued_state(
    on: Transaction, jobs: Sequence[JobId], state: JobState, then: JobState, reason: str | None
) -> list[JobId]:
    """From one unqueued state to another, or to the same one with another reason; returns the jobs that changed."""
    if then is not state:
        job_states.check_transition(state, then)
    assert not then.terminal, "jobs end through the one finish path"
    assert then is not JobState.SCHEDULED, "jobs are queued by admit"
    if not jobs:
        return []
    rows = await on.rows(CHANGE_STATE, list(jobs), state.value, then.value, reason)
    return [JobId(row["id"]) for row in rows]
