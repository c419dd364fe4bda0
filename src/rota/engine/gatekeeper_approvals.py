"""Jobs that need an approval, at the gate: what is asked for, and what a grant is worth.

The hash of what was submitted is pinned by the first approval of a job. At the gate it is computed again from what is
stored: a job that is not what people saw is denied. A grant meets the demand of the policy of *now* if that asks for
nothing more: the same rule, and no more people than have agreed. Otherwise another approval is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import msgspec

from rota.engine.gate import Decision, Verdict
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.approval import Approval, ApprovalState, Asking
from rota.model.ids import JobId, ShowId
from rota.model.job import Details, decode_details
from rota.model.reasons import Reason
from rota.policy.approval_hash import job_hash
from rota.policy.approvals import Approvals

MATERIAL = query(__package__, "approval_material")


class Material(msgspec.Struct, frozen=True):
    """What of a stored job an approval is about."""

    job: JobId
    show: ShowId
    name: str
    hash: bytes
    details: Details
    waits: bool
    """For an approval, and nobody ends it."""


async def materials(on: Database | Transaction, jobs: Sequence[JobId]) -> dict[JobId, Material]:
    rows = await on.rows(MATERIAL, list(jobs))
    return {JobId(job): _material(list(layers)) for job, layers in groupby(rows, lambda row: row["pk_job"])}


class Gated:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.approvals = Approvals(database)
        self.on_requested: Callable[[Sequence[Approval]], None] = _ignore
        """Called with what was asked for, once that is committed."""

    async def with_grants(self, jobs: Sequence[JobId], decisions: Sequence[Decision]) -> list[Decision]:
        """The decisions, where a demand for approval that people have met has become an allowance."""
        gated = [job for job, one in zip(jobs, decisions, strict=True) if one.verdict is Verdict.REQUIRE_APPROVAL]
        known = await self.approvals.latest("job", [str(job) for job in gated]) if gated else {}
        if not known:
            return list(decisions)
        stored = await materials(self.database, [job for job in gated if str(job) in known])
        return [
            _met(decision, known.get(str(job)), stored.get(job))
            if decision.verdict is Verdict.REQUIRE_APPROVAL
            else decision
            for job, decision in zip(jobs, decisions, strict=True)
        ]

    async def request(self, on: Transaction, held: Mapping[JobId, Decision]) -> list[Approval]:
        """Ask people about jobs that were just held."""
        if not held:
            return []
        stored = await materials(on, list(held))
        return await self.approvals.request(on, [_asking(stored[job], decision) for job, decision in held.items()])


def _met(decision: Decision, approval: Approval | None, stored: Material | None) -> Decision:
    if approval is None or stored is None:
        return decision
    if approval.hash != stored.hash:
        why = f"what is stored is not what approval {approval.id} was asked for"
        return Decision(Verdict.DENY, Reason.APPROVAL_STALE.value, decision.said, why)
    if approval.state in (ApprovalState.REJECTED, ApprovalState.EXPIRED):
        return Decision(Verdict.DENY, f"approval_{approval.state}", decision.said, f"approval {approval.id}")
    assert decision.said is not None, "a demand for approval is somebody's word"
    word = decision.said.word
    if not approval.meets(word.rule, word.approval):
        return decision
    because = f"{decision.because}; approved by {', '.join(vote.voter for vote in approval.votes if vote.agrees)}"
    return Decision(Verdict.ALLOW, decision.reason, decision.said, because)


def _asking(stored: Material, decision: Decision) -> Asking:
    assert decision.said is not None, "a demand for approval is somebody's word"
    word = decision.said.word
    return Asking(
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


def _material(layers: Sequence[Record]) -> Material:
    job = layers[0]
    return Material(
        JobId(job["pk_job"]),
        ShowId(job["pk_show"]),
        job["job_name"],
        job_hash(job, layers),
        decode_details(job["request"]),
        job["state"] == "APPROVAL_REQUIRED" and job["ends_as"] is None,
    )


def _ignore(_approvals: Sequence[Approval]) -> None:
    return None
