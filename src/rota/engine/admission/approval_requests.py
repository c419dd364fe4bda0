"""Approvals that jobs need: requesting them, and deciding whether a grant is sufficient.

The first approval of a job pins the hash of its submission. At admission the hash is recomputed from the stored job; a
job that differs from what people approved is denied. A grant satisfies the *current* policy if that requires nothing
more: the same rule, and no more votes than were cast. Otherwise another approval is requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from rota.engine.admission.decision import AdmissionDecision, AdmissionVerdict
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.approvals import Approval, ApprovalRequest, ApprovalState
from rota.model.ids import JobId, ShowId
from rota.model.jobs.submission import SubmissionDetails, decode_details
from rota.model.reasons import Reason
from rota.policy.approval_hash import job_hash
from rota.policy.approvals import ApprovalStore

APPROVABLE_JOBS = query(__package__, "approval_material")


class ApprovableJob(msgspec.Struct, frozen=True):
    """The part of a stored job that an approval covers."""

    job: JobId
    show: ShowId
    name: str
    hash: bytes
    details: SubmissionDetails
    waits: bool
    """Waits for an approval and is not being terminated."""


async def approvable_jobs(on: Database | Transaction, jobs: Sequence[JobId]) -> dict[JobId, ApprovableJob]:
    rows = await on.rows(APPROVABLE_JOBS, list(jobs))
    return {JobId(job): _approvable_job(list(layers)) for job, layers in groupby(rows, lambda row: row["pk_job"])}


class ApprovalRequests:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.approvals = ApprovalStore(database)

    async def apply_grants(
        self, jobs: Sequence[JobId], decisions: Sequence[AdmissionDecision]
    ) -> list[AdmissionDecision]:
        """The decisions, with REQUIRE_APPROVAL replaced by ALLOW where the approval was granted."""
        held = [
            job for job, one in zip(jobs, decisions, strict=True) if one.verdict is AdmissionVerdict.REQUIRE_APPROVAL
        ]
        approvals = await self.approvals.latest("job", [str(job) for job in held]) if held else {}
        if not approvals:
            return list(decisions)
        stored = await approvable_jobs(self.database, [job for job in held if str(job) in approvals])
        return [
            _decision_after_approval(decision, approvals.get(str(job)), stored.get(job))
            if decision.verdict is AdmissionVerdict.REQUIRE_APPROVAL
            else decision
            for job, decision in zip(jobs, decisions, strict=True)
        ]

    async def request(self, on: Transaction, held: Mapping[JobId, AdmissionDecision]) -> list[Approval]:
        """Request approvals for jobs that were just held."""
        if not held:
            return []
        stored = await approvable_jobs(on, list(held))
        return await self.approvals.request(
            on, [_approval_request(stored[job], decision) for job, decision in held.items()]
        )


def _decision_after_approval(
    decision: AdmissionDecision, approval: Approval | None, stored: ApprovableJob | None
) -> AdmissionDecision:
    if approval is None or stored is None:
        return decision
    if approval.hash != stored.hash:
        why = f"the stored job differs from what approval {approval.id} was requested for"
        return AdmissionDecision(AdmissionVerdict.DENY, Reason.APPROVAL_STALE.value, decision.said, why)
    if approval.state in (ApprovalState.REJECTED, ApprovalState.EXPIRED):
        return AdmissionDecision(
            AdmissionVerdict.DENY, f"approval_{approval.state}", decision.said, f"approval {approval.id}"
        )
    assert decision.said is not None, "only a policy decision requires an approval"
    policy_decision = decision.said.decision
    if not approval.meets(policy_decision.rule, policy_decision.approval):
        return decision
    because = f"{decision.because}; approved by {', '.join(vote.voter for vote in approval.votes if vote.agrees)}"
    return AdmissionDecision(AdmissionVerdict.ALLOW, decision.reason, decision.said, because)


def _approval_request(stored: ApprovableJob, decision: AdmissionDecision) -> ApprovalRequest:
    assert decision.said is not None, "only a policy decision requires an approval"
    policy_decision = decision.said.decision
    return ApprovalRequest(
        kind="job",
        subject=str(stored.job),
        show=stored.show,
        hash=stored.hash,
        title=stored.name,
        reason=policy_decision.reason,
        rule=policy_decision.rule,
        snapshot=policy_decision.snapshot,
        terms=policy_decision.approval,
        principal=stored.details.principal,
        actor=stored.details.actor_id,
    )


def _approvable_job(layers: Sequence[Record]) -> ApprovableJob:
    job = layers[0]
    return ApprovableJob(
        JobId(job["pk_job"]),
        ShowId(job["pk_show"]),
        job["job_name"],
        job_hash(job, layers),
        decode_details(job["request"]),
        job["state"] == "APPROVAL_REQUIRED" and job["ends_as"] is None,
    )
