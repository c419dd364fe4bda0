"""May it run: the place where policy decides about jobs before they are queued.

A gate that decides at once (`at_once`, no I/O) is asked while the job is written, and what it allows is SCHEDULED in
the same transaction. A policy that has to be asked is asked ahead where that can be done (`rota.engine.admission.precheck`).
Everything else is written as PENDING, a message wakes the gatekeeper, and `admit` queues what was allowed. Who admits
twice, or two at once, admits once: the row of the job decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
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
"""Where the gatekeeper hears of jobs to decide about: a msgpack list of ids."""
UNDECIDED_REASON: Final = Reason.POLICY_PENDING.value
"""Reason of a job that no gate has decided about yet."""
DECISION_TTL_S: Final = 30.0
"""How long a word counts, by the clock of PostgreSQL, from before it was asked for."""


def admission_message(jobs: Sequence[JobId]) -> BusMessage:
    """Tells the gatekeeper of jobs to decide about. Never a duplicate: a job may come to the gate more than once."""
    return BusMessage(
        subject=ADMISSION_SUBJECT, data=msgspec.msgpack.encode(jobs), msg_id=f"gate:{secrets.token_hex(12)}"
    )


class AdmissionVerdict(StrEnum):
    ALLOW = "allow"
    DENY = "deny"
    REQUIRE_APPROVAL = "require_approval"
    WAIT = "wait"
    """Not now, such as while the policy cannot be asked; `reason` says why, and the gate is asked again."""


class AdmissionDecision(msgspec.Struct, frozen=True):
    verdict: AdmissionVerdict
    reason: str = ""
    """A code of `rota.model.reasons`."""
    said: StoredDecision | None = None
    """The word of the policy that it rests on; None: nobody was asked, or nobody answered."""
    because: str = ""
    """For people: the rule, and what it says."""
    wait_s: float = 0.0
    """Of WAIT, until it is asked again; 0: a second, then twice as long each time."""

    @property
    def state(self) -> JobState:
        """What a job becomes that is written with this decision; one that was denied ends after that."""
        match self.verdict:
            case AdmissionVerdict.ALLOW:
                return JobState.SCHEDULED
            case AdmissionVerdict.REQUIRE_APPROVAL:
                return JobState.APPROVAL_REQUIRED
            case AdmissionVerdict.DENY | AdmissionVerdict.WAIT:
                return JobState.PENDING


ALLOWED: Final = AdmissionDecision(AdmissionVerdict.ALLOW)
DEFERRED: Final = AdmissionDecision(AdmissionVerdict.WAIT, UNDECIDED_REASON)
WAITING_ON_JOB: Final = AdmissionDecision(AdmissionVerdict.WAIT, Reason.WAITING_ON_JOB.value)


class PrecheckResult(msgspec.Struct, frozen=True):
    """Decisions on plans, in their order, that queue nothing after `until` by the clock of PostgreSQL."""

    decisions: Sequence[AdmissionDecision]
    until: datetime | None = None


class AdmissionGate(Protocol):
    at_once: bool
    """Whether it decides without asking anybody, so that it may be asked inside a transaction."""

    def decide(self, batch: Sequence[ValidatedSubmission]) -> Sequence[AdmissionDecision]:
        """A decision for each, in their order. Never asked while jobs are written unless it decides at once."""
        ...


class AllowAll:
    """The gate of a Rota without policy."""

    at_once = True

    def decide(self, batch: Sequence[ValidatedSubmission]) -> Sequence[AdmissionDecision]:
        return [ALLOWED] * len(batch)


class DeferAll:
    """The gate before a policy that has to be asked: jobs are written as PENDING, and the gatekeeper asks."""

    at_once = False

    def decide(self, batch: Sequence[ValidatedSubmission]) -> Sequence[AdmissionDecision]:
        return [DEFERRED] * len(batch)


def admission_decision_from(word: PolicyDecision, throttle_s: float) -> AdmissionDecision:
    """What a word comes to. What nobody has heard of means DENY."""
    try:
        says = PolicyEffect(word.says)
    except ValueError:
        says, word = (
            PolicyEffect.DENY,
            PolicyDecision(says=PolicyEffect.DENY, reason="The policy gave a decision that is none."),
        )
    match says:
        case PolicyEffect.ALLOW | PolicyEffect.ALLOW_WITH_CONSTRAINTS:
            return AdmissionDecision(AdmissionVerdict.ALLOW, said=encode_decision(word))
        case PolicyEffect.REQUIRE_APPROVAL:
            return AdmissionDecision(
                AdmissionVerdict.REQUIRE_APPROVAL,
                Reason.APPROVAL_REQUIRED.value,
                encode_decision(word),
                policy_decision_text(word),
            )
        case PolicyEffect.THROTTLE:
            wait_s = word.delay_s if word.delay_s > 0 else throttle_s
            return AdmissionDecision(
                AdmissionVerdict.WAIT,
                Reason.POLICY_THROTTLED.value,
                encode_decision(word),
                policy_decision_text(word),
                wait_s,
            )
        case PolicyEffect.DENY:
            return AdmissionDecision(
                AdmissionVerdict.DENY, Reason.SAFETY_DENIED.value, encode_decision(word), policy_decision_text(word)
            )
        case _:
            assert_never(says)


def policy_decision_text(word: PolicyDecision) -> str:
    """Which rule spoke, and what it says, for people."""
    rule = f"rule {word.rule}" if word.rule else "no rule of the policy allows it"
    return f"{rule}: {word.reason}" if word.reason else rule
