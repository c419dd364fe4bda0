"""What the audit trail keeps of decisions: all but plain allowances, which jobs name by their words.

One entry for all jobs of a batch that one word was about, in the transaction that carries it out. What is throttled, or
waits for a kernel that is silent, is asked about again and again: an entry tells when that begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rota.engine.gate import Decision, Verdict
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Transaction
from rota.model.ids import JobId
from rota.model.reasons import Reason

if TYPE_CHECKING:
    from rota.engine.gatekeeper import Judged

ACTOR = "policy"


async def append(tx: Transaction, judged: Judged) -> None:
    took_effect = {*judged.admitted, *judged.denied, *judged.held}
    told: dict[Decision, list[JobId]] = defaultdict(list)
    for job in judged.asked:
        decision = judged.decisions[job.id]
        waits_anew = decision.verdict is Verdict.WAIT and decision.said is not None and job.reason != decision.reason
        if waits_anew or (job.id in took_effect and _is_told(decision)):
            told[decision].append(job.id)
    if told:
        await audit.append(tx, [_entry(decision, jobs) for decision, jobs in told.items()])


def _is_told(decision: Decision) -> bool:
    return decision.verdict is not Verdict.ALLOW or bool(decision.because)


def _entry(decision: Decision, jobs: Sequence[JobId]) -> AuditEntry:
    word = decision.said.word if decision.said is not None else None
    target = f"job:{jobs[0]}" if len(jobs) == 1 else f"rule:{word.rule if word is not None else ''}"
    detail = {
        "jobs": [str(job) for job in jobs],
        "rule": word.rule if word is not None else "",
        "snapshot": word.snapshot if word is not None else "",
        "because": decision.because,
    }
    return AuditEntry(ACTOR, f"policy.{_act(decision)}", target, detail)


def _act(decision: Decision) -> str:
    match decision.verdict:
        case Verdict.ALLOW:
            return "approved" if decision.reason == Reason.APPROVAL_REQUIRED.value else "fail_open"
        case Verdict.DENY:
            return "deny"
        case Verdict.REQUIRE_APPROVAL:
            return "require_approval"
        case Verdict.WAIT:
            return "throttle"
