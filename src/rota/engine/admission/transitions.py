"""What becomes of jobs that a gate has decided about: queued, held, or ended.

Every step asks the job's row for the state it starts from, under its lock, so a decision that comes twice or too late
changes nothing: of two who admit, one queues the frames. All of it happens in the caller's transaction; if we die
before its commit the jobs are PENDING as before, and whoever replays them asks the gate again.
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
from rota.policy.decision_store import store_decisions

ADMIT = query(__package__, "submit_admit")
CHANGE_STATE = query(__package__, "submit_hold")
DEFER = query(__package__, "gate_wait")
LOCK = query(__package__, "gate_lock")


class JobFinishCallback(Protocol):
    """The one way in which jobs end."""

    async def __call__(self, on: Transaction, jobs: Mapping[JobId, AdmissionDecision], state: JobState) -> object:
        """End these jobs, each for its reason; those that have ended before are left as they are."""
        ...


class AppliedDecisions(msgspec.Struct, frozen=True):
    """What became of PENDING jobs by this call; those that had moved on are in neither."""

    admitted: list[JobId]
    held: list[JobId]
    """Until somebody approves them."""


async def apply_decisions(
    on: Transaction,
    decisions: Mapping[JobId, AdmissionDecision],
    finish: JobFinishCallback,
    *,
    until: datetime | None = None,
) -> AppliedDecisions:
    """Do what was decided about jobs that are PENDING; after `until` nothing is queued by it."""
    by_verdict: dict[AdmissionVerdict, dict[JobId, AdmissionDecision]] = defaultdict(dict)
    for job, decision in decisions.items():
        by_verdict[decision.verdict][job] = decision
    if len(by_verdict) > 1:
        # Each verdict locks its own: two who heard different words about the same jobs would wait in a circle.
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
    """PENDING to SCHEDULED, with their frames queued; returns those that this call admitted."""
    if not jobs:
        return []
    said = [each.said for each in jobs.values()] if isinstance(jobs, Mapping) else []
    digests = [each.digest if each is not None else None for each in said]
    failpoints.hit("submit.before_admit")
    rows = await on.rows(ADMIT, list(jobs), digests or None, until)
    failpoints.after_send("submit.admit")
    return [JobId(row["id"]) for row in rows]


async def defer(on: Transaction, jobs: Mapping[JobId, AdmissionDecision]) -> list[JobId]:
    """Jobs that stay PENDING until they are asked about again, or wait for an approval; returns those that did."""
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


async def approve(on: Transaction, jobs: Sequence[JobId], reason: str = "approved") -> list[JobId]:
    """APPROVAL_REQUIRED to PENDING; the gatekeeper is told, once that is committed."""
    held = await change_unqueued_state(on, jobs, JobState.APPROVAL_REQUIRED, JobState.PENDING, reason)
    if held:
        await outbox.add(on, [admission_message(held)])
    return held


async def change_unqueued_state(
    on: Transaction, jobs: Sequence[JobId], state: JobState, then: JobState, reason: str | None
) -> list[JobId]:
    """From one state that is not queued to another, or to the same one for another reason; returns those it was."""
    if then is not state:
        job_states.check_transition(state, then)
    assert not then.terminal, "jobs end through the one finish path"
    assert then is not JobState.SCHEDULED, "jobs are queued by admit"
    if not jobs:
        return []
    rows = await on.rows(CHANGE_STATE, list(jobs), state.value, then.value, reason)
    return [JobId(row["id"]) for row in rows]
