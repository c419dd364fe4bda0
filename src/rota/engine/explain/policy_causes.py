"""Why the policy, or people, have not let a job run. Pure."""

from __future__ import annotations

from datetime import datetime

from rota.api.explanation import Cause, Refuser
from rota.engine.explain.cause import cause
from rota.engine.queries.jobs import JobView, PolicyDecisionView
from rota.model.approvals import Approval
from rota.model.job_states import JobState
from rota.model.policy.decision import PolicyEffect
from rota.model.reasons import Reason, Tier
from rota.model.units import humanize_duration


def policy_pending_cause(job: JobView, ask_at: datetime | None) -> Cause:
    """The policy has not spoken, is silent, or has it wait."""
    known = {reason.value: reason for reason in Reason if reason.tier is Tier.BLOCKED}
    code = known.get(job.reason or "", Reason.POLICY_PENDING)
    own = job.reason if job.reason not in (None, code.value, "approved") else None
    sentence = f"{code.meaning.rstrip('.')}: {own}." if own else code.meaning
    if job.policy is not None and code is Reason.POLICY_THROTTLED:
        sentence = f"{code.meaning.rstrip('.')} ({rule_text(job.policy)})."
    tried = "at that time, by itself" if ask_at is not None else "within seconds, by itself"
    by = job.policy.rule if job.policy is not None and job.policy.rule else own or code.value
    return cause(code, sentence, refuser=Refuser("policy", by), next_at=ask_at, next_try=tried)


def approval_pending_cause(job: JobView, approval: Approval | None, now: datetime) -> Cause:
    """Who must agree, how many have, and by when."""
    remedy = Reason.APPROVAL_REQUIRED.remedy(job=str(job.id))
    if approval is None:
        return cause(Reason.APPROVAL_REQUIRED, remedy=remedy, next_try="when somebody approves it")
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
    """How many of whom, by when, and how many have."""
    who = ", ".join(approval.approvers[:5]) if approval.approvers else f"the operators of {approval.show}"
    left = ""
    if approval.expires_at is not None:
        left = f" within {humanize_duration(max(0.0, (approval.expires_at - now).total_seconds()))}, else it is denied"
    return f"{approval.quorum} of {who} must approve it{left}; {approval.agreed} did"


def denial_text(job: JobView) -> str:
    """By which rule of which policy, and what it suggests instead; nothing for what no policy denied."""
    if job.state is not JobState.DENIED or job.policy is None or job.policy.says is not PolicyEffect.DENY:
        return ""
    told = f" Denied by {rule_text(job.policy)}."
    for remedy in job.policy.remediations:
        what = remedy.summary or remedy.title or remedy.id
        told += f" It suggests {what.rstrip('.')}: `rota job remediate {job.id} --as {remedy.id}`."
    return told


def rule_text(said: PolicyDecisionView) -> str:
    rule = f"rule {said.rule}" if said.rule else "the default of the policy"
    of = f" of snapshot {said.snapshot[:12]}" if said.snapshot else ""
    return f"{rule}{of}{f': {said.reason}' if said.reason else ''}".rstrip(".")
