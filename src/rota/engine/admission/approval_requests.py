"""Jobs that need an approval, at the gate: what is asked for, and what a grant is worth.

The hash of what was submitted is pinned by the first approval of a job. At the gate it is computed again from what is
stored: a job that is not what people saw is denied. A grant meets the demand of the policy of *now* if that asks for
nothing more: the same rule, and no more people than have agreed. Otherwise another approval is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """What of a stored job an approval is about."""

    job: JobId
    show: ShowId
    name: str
    hash: bytes
    details: SubmissionDetails
    waits: bool
    """For an approval, and nobody ends it."""


async def approvable_jobs(on: Database | Transaction, jobs: Sequence[JobId]) -> dict[JobId, ApprovableJob]:
    rows = await on.rows(APPROVABLE_JOBS, list(jobs))
    return {JobId(job): _approvable_job(list(layers)) for job, layers in groupby(rows, lambda row: row["pk_job"])}


class ApprovalRequests:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.approvals = ApprovalStore(database)
        self.on_requested: Callable[[Sequence[Approval]], None] = _ignore
        """Called with what was asked for, once that is committed."""

    async def apply_grants(
        self, jobs: Sequence[JobId], decisions: Sequence[AdmissionDecision]
    ) -> list[AdmissionDecision]:
        """The decisions, where a demand for approval that people have met has become an allowance."""
        gated = [
            job for job, one in zip(jobs, decisions, strict=True) if one.verdict is AdmissionVerdict.REQUIRE_APPROVAL
        ]
        known = await self.approvals.latest("job", [str(job) for job in gated]) if gated else {}
        if not known:
            return list(decisions)
        stored = await approvable_jobs(self.database, [job for job in gated if str(job) in known])
        return [
            _decision_after_approval(decision, known.get(str(job)), stored.get(job))
            if decision.verdict is AdmissionVerdict.REQUIRE_APPROVAL
            else decision
            for job, decision in zip(jobs, decisions, strict=True)
        ]

    async def request(self, on: Transaction, held: Mapping[JobId, AdmissionDecision]) -> list[Approval]:
        """Ask people about jobs that were just held."""
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
        why = f"what is stored is not what approval {approval.id} was asked for"
        return AdmissionDecision(AdmissionVerdict.DENY, Reason.APPROVAL_STALE.value, decision.said, why)
    if approval.state in (ApprovalState.REJECTED, ApprovalState.EXPIRED):
        return AdmissionDecision(
            AdmissionVerdict.DENY, f"approval_{approval.state}", decision.said, f"approval {approval.id}"
        )
    assert decision.said is not None, "a demand for approval is somebody's word"
    word = decision.said.decision
    if not approval.meets(word.rule, word.approval):
        return decision
    because = f"{decision.because}; approved by {', '.join(vote.voter for vote in approval.votes if vote.agrees)}"
    return AdmissionDecision(AdmissionVerdict.ALLOW, decision.reason, decision.said, because)


def _approval_request(stored: ApprovableJob, decision: AdmissionDecision) -> ApprovalRequest:
    assert decision.said is not None, "a demand for approval is somebody's word"
    word = decision.said.decision
    return ApprovalRequest(
        kind="job",
        subject=str(stored.job),
        show=stored.show,
        hash=stored.hash,
        title=stored.name,
        reason=word.reason,
        rule=word.rule,
        snapshot=word.snapshot,
        terms=word.approval,
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


def _ignore(_approvals: Sequence[Approval]) -> None:
    return None
