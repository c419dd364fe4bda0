"""Admission decisions: whether a job may be queued.

A gate without I/O (`at_once`) is consulted while the job is written, and allowed jobs are SCHEDULED in the same
transaction. A policy that needs a call is queried before the write where possible (`rota.engine.admission.precheck`).
All other jobs are written as PENDING, a message wakes the admission controller, and `admit` queues the allowed ones.
Admission is idempotent: the job's row decides which of two concurrent calls takes effect.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final, Protocol, assert_never

import msgspec

from rota.infra.nats import BusMessage
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.policy.decision import PolicyDecision, PolicyEffect
from rota.model.reasons import Reason
from rota.policy.decision_store import StoredDecision, encode_decision

ADMISSION_SUBJECT: Final = "sys.job.gate"
"""Notifies the admission controller of jobs to decide: a msgpack list of ids."""
UNDECIDED_REASON: Final = Reason.POLICY_PENDING.value
"""Reason of a job that has not been decided yet."""
DECISION_TTL_S: Final = 30.0
"""How long a policy decision is valid, by the clock of PostgreSQL, measured from before the request was sent."""


def admission_message(jobs: Sequence[JobId]) -> BusMessage:
    """Names jobs to decide. The message id is unique, not deduplicated: a job may be decided more than once."""
    return BusMessage(
        subject=ADMISSION_SUBJECT, data=msgspec.msgpack.encode(jobs), msg_id=f"gate:{secrets.token_hex(12)}"
    )


class AdmissionVerdict(StrEnum):
    ALLOW = "allow"
    DENY = "deny"
    REQUIRE_APPROVAL = "require_approval"
    WAIT = "wait"
    """Not now, such as while the policy is unavailable; `reason` says why, and the decision is retried."""


class AdmissionDecision(msgspec.Struct, frozen=True):
    verdict: AdmissionVerdict
    reason: str = ""
    """A code of `rota.model.reasons`."""
    said: StoredDecision | None = None
    """The policy decision behind it; None: the policy was not queried or did not reply."""
    because: str = ""
    """For people: the rule and its reason."""
    wait_s: float = 0.0
    """WAIT: seconds until the retry; 0: one second, doubling each time."""

    @property
    def state(self) -> JobState:
        """The state in which a job with this decision is written; a denied job ends after that."""
        match self.verdict:
            case AdmissionVerdict.ALLOW:
                return JobState.SCHEDULED
            case AdmissionVerdict.REQUIRE_APPROVAL:
                return JobState.APPROVAL_REQUIRED
            case AdmissionVerdict.DENY | AdmissionVerdict.WAIT:
                return JobState.PENDING


PolicyPreview = Callable[[ValidatedSubmission], Awaitable[AdmissionDecision]]
"""What the policy would decide; changes and counts nothing."""

ALLOWED: Final = AdmissionDecision(AdmissionVerdict.ALLOW)
DEFERRED: Final = AdmissionDecision(AdmissionVerdict.WAIT, UNDECIDED_REASON)
WAITING_ON_JOB: Final = AdmissionDecision(AdmissionVerdict.WAIT, Reason.WAITING_ON_JOB.value)


class PrecheckResult(msgspec.Struct, frozen=True):
    """Decisions in the order of the submissions; they queue nothing after `until`, by the clock of PostgreSQL."""

    decisions: Sequence[AdmissionDecision]
    until: datetime | None = None


class AdmissionGate(Protocol):
    at_once: bool
    """Whether it decides without I/O, so that it can be consulted inside a transaction."""

    def decide(self, batch: Sequence[ValidatedSubmission]) -> Sequence[AdmissionDecision]:
        """A decision for each submission, in order. Not called during a write unless `at_once`."""
        ...


class AllowAll:
    """The gate of an installation without policy."""

    at_once = True

    def decide(self, batch: Sequence[ValidatedSubmission]) -> Sequence[AdmissionDecision]:
        return [ALLOWED] * len(batch)


class DeferAll:
    """The gate before a policy that needs a call: jobs are written as PENDING for the admission controller."""

    at_once = False

    def decide(self, batch: Sequence[ValidatedSubmission]) -> Sequence[AdmissionDecision]:
        return [DEFERRED] * len(batch)


def admission_decision_from(policy_decision: PolicyDecision, throttle_s: float) -> AdmissionDecision:
    """The admission decision for a policy decision. An unknown effect means DENY."""
    try:
        effect = PolicyEffect(policy_decision.says)
    except ValueError:
        effect, policy_decision = (
            PolicyEffect.DENY,
            PolicyDecision(says=PolicyEffect.DENY, reason="The policy returned an unknown decision."),
        )
    match effect:
        case PolicyEffect.ALLOW | PolicyEffect.ALLOW_WITH_CONSTRAINTS:
            return AdmissionDecision(AdmissionVerdict.ALLOW, said=encode_decision(policy_decision))
        case PolicyEffect.REQUIRE_APPROVAL:
            return AdmissionDecision(
                AdmissionVerdict.REQUIRE_APPROVAL,
                Reason.APPROVAL_REQUIRED.value,
                encode_decision(policy_decision),
                policy_decision_text(policy_decision),
            )
        case PolicyEffect.THROTTLE:
            wait_s = policy_decision.delay_s if policy_decision.delay_s > 0 else throttle_s
            return AdmissionDecision(
                AdmissionVerdict.WAIT,
                Reason.POLICY_THROTTLED.value,
                encode_decision(policy_decision),
                policy_decision_text(policy_decision),
                wait_s,
            )
        case PolicyEffect.DENY:
            return AdmissionDecision(
                AdmissionVerdict.DENY,
                Reason.SAFETY_DENIED.value,
                encode_decision(policy_decision),
                policy_decision_text(policy_decision),
            )
        case _:
            assert_never(effect)


def policy_decision_text(policy_decision: PolicyDecision) -> str:
    """The rule and its reason, for people."""
    rule = f"rule {policy_decision.rule}" if policy_decision.rule else "no rule of the policy allows it"
    return f"{rule}: {policy_decision.reason}" if policy_decision.reason else rule
