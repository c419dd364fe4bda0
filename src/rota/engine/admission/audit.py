"""What the audit trail keeps of decisions: all but plain allowances, which jobs name by their words.

One entry for all jobs of a batch that one word was about, in the transaction that carries it out. What is throttled, or
waits for a kernel that is silent, is asked about again and again: an entry tells when that begins.
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


async def append_decisions(tx: Transaction, judged: AdmissionOutcome) -> None:
    took_effect = {*judged.admitted, *judged.denied, *judged.held}
    told: dict[AdmissionDecision, list[JobId]] = defaultdict(list)
    for job in judged.asked:
        decision = judged.decisions[job.id]
        waits_anew = (
            decision.verdict is AdmissionVerdict.WAIT and decision.said is not None and job.reason != decision.reason
        )
        if waits_anew or (job.id in took_effect and _is_audited(decision)):
            told[decision].append(job.id)
    if told:
        await audit.append(tx, [_audit_entry(decision, jobs) for decision, jobs in told.items()])


def _is_audited(decision: AdmissionDecision) -> bool:
    return decision.verdict is not AdmissionVerdict.ALLOW or bool(decision.because)


def _audit_entry(decision: AdmissionDecision, jobs: Sequence[JobId]) -> AuditEntry:
    word = decision.said.decision if decision.said is not None else None
    target = f"job:{jobs[0]}" if len(jobs) == 1 else f"rule:{word.rule if word is not None else ''}"
    detail = {
        "jobs": [str(job) for job in jobs],
        "rule": word.rule if word is not None else "",
        "snapshot": word.snapshot if word is not None else "",
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
