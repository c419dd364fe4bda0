"""Audit entries of decisions: all except plain ALLOW, which the job itself records.

One entry covers all jobs of a batch with the same decision, in the transaction that applies it. A throttled job, or
one that waits for an unavailable policy, is retried many times; only the first deferral is audited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rota.engine.admission.decision import AdmissionDecision, AdmissionVerdict
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Transaction
from rota.model.ids import JobId
from rota.model.reasons import Reason

if TYPE_CHECKING:
    from rota.engine.admission.controller import AdmissionOutcome

ACTOR = "policy"


async def append_decisions(tx: Transaction, outcome: AdmissionOutcome) -> None:
    took_effect = {*outcome.admitted, *outcome.denied, *outcome.held}
    by_decision: dict[AdmissionDecision, list[JobId]] = defaultdict(list)
    for job in outcome.asked:
        decision = outcome.decisions[job.id]
        waits_anew = (
            decision.verdict is AdmissionVerdict.WAIT and decision.said is not None and job.reason != decision.reason
        )
        if waits_anew or (job.id in took_effect and _is_audited(decision)):
            by_decision[decision].append(job.id)
    if by_decision:
        await audit.append(tx, [_audit_entry(decision, jobs) for decision, jobs in by_decision.items()])


def _is_audited(decision: AdmissionDecision) -> bool:
    return decision.verdict is not AdmissionVerdict.ALLOW or bool(decision.because)


def _audit_entry(decision: AdmissionDecision, jobs: Sequence[JobId]) -> AuditEntry:
    policy_decision = decision.said.decision if decision.said is not None else None
    target = (
        f"job:{jobs[0]}" if len(jobs) == 1 else f"rule:{policy_decision.rule if policy_decision is not None else ''}"
    )
    detail = {
        "jobs": [str(job) for job in jobs],
        "rule": policy_decision.rule if policy_decision is not None else "",
        "snapshot": policy_decision.snapshot if policy_decision is not None else "",
        "because": decision.because,
    }
    return AuditEntry(ACTOR, f"policy.{_action(decision)}", target, detail)


def _action(decision: AdmissionDecision) -> str:
    match decision.verdict:
        case AdmissionVerdict.ALLOW:
            return "approved" if decision.reason == Reason.APPROVAL_REQUIRED.value else "fail_open"
        case AdmissionVerdict.DENY:
            return "deny"
        case AdmissionVerdict.REQUIRE_APPROVAL:
            return "require_approval"
        case AdmissionVerdict.WAIT:
            return "throttle"
