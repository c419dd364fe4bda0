"""Causes for jobs that the policy or an approval has not admitted. Pure."""

from __future__ import annotations

from datetime import datetime

from rota.api.explanation import Cause, Refuser
from rota.api.jobs import JobView, PolicyDecisionView
from rota.engine.explain.cause import cause
from rota.model.approvals import Approval
from rota.model.job_states import JobState
from rota.model.policy.decision import PolicyEffect
from rota.model.reasons import Reason, Tier
from rota.model.units import humanize_duration


def policy_pending_cause(job: JobView, ask_at: datetime | None) -> Cause:
    """The policy has not decided, is unavailable, or throttles the job."""
    known = {reason.value: reason for reason in Reason if reason.tier is Tier.BLOCKED}
    code = known.get(job.reason or "", Reason.POLICY_PENDING)
    detail = job.reason if job.reason not in (None, code.value, Reason.APPROVED.value) else None
    sentence = f"{code.meaning.rstrip('.')}: {detail}." if detail else code.meaning
    if job.policy is not None and code is Reason.POLICY_THROTTLED:
        sentence = f"{code.meaning.rstrip('.')} ({rule_text(job.policy)})."
    next_try = "at that time, automatically" if ask_at is not None else "within seconds, automatically"
    refuser = job.policy.rule if job.policy is not None and job.policy.rule else detail or code.value
    return cause(code, sentence, refuser=Refuser("policy", refuser), next_at=ask_at, next_try=next_try)


def approval_pending_cause(job: JobView, approval: Approval | None, now: datetime) -> Cause:
    """Who must approve, how many have, and the deadline."""
    remedy = Reason.APPROVAL_REQUIRED.remedy(job=str(job.id))
    if approval is None:
        return cause(Reason.APPROVAL_REQUIRED, remedy=remedy, next_try="when it is approved")
    why = f" (rule {approval.rule}{f': {approval.reason}' if approval.reason else ''})" if approval.rule else ""
    sentence = f"{approval_progress_text(approval, now)}{why}."
    return cause(
        Reason.APPROVAL_REQUIRED,
        sentence,
        remedy=remedy,
        refuser=Refuser("policy", approval.rule or Reason.APPROVAL_REQUIRED.value),
        next_at=approval.expires_at,
        next_try="when enough people have approved it",
    )


def approval_progress_text(approval: Approval, now: datetime) -> str:
    """The quorum, the approvers, the deadline and the approvals so far."""
    who = ", ".join(approval.approvers[:5]) if approval.approvers else f"the operators of {approval.show}"
    deadline = ""
    if approval.expires_at is not None:
        left_s = max(0.0, (approval.expires_at - now).total_seconds())
        deadline = f" within {humanize_duration(left_s)}, else it is denied"
    return f"{approval.quorum} of {who} must approve it{deadline}; approvals so far: {approval.agreed}"


def denial_text(job: JobView) -> str:
    """The rule that denied the job, and its remediations; empty when no policy denied it."""
    if job.state is not JobState.DENIED or job.policy is None or job.policy.says is not PolicyEffect.DENY:
        return ""
    text = f" Denied by {rule_text(job.policy)}."
    for remedy in job.policy.remediations:
        what = remedy.summary or remedy.title or remedy.id
        text += f" It suggests {what.rstrip('.')}: `rota job remediate {job.id} --as {remedy.id}`."
    return text


def rule_text(decision: PolicyDecisionView) -> str:
    rule = f"rule {decision.rule}" if decision.rule else "the default of the policy"
    of = f" of snapshot {decision.snapshot[:12]}" if decision.snapshot else ""
    return f"{rule}{of}{f': {decision.reason}' if decision.reason else ''}".rstrip(".")
