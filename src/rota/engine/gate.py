"""May it run: the place where policy decides about jobs before they are queued.

A gate that decides at once (`at_once`, no I/O) is asked while the job is written, and what it allows is SCHEDULED in
the same transaction. A policy that has to be asked is asked ahead where that can be done (`rota.engine.gate_ahead`).
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

from rota.infra.nats import Message
from rota.model.ids import JobId
from rota.model.job_plan import Plan
from rota.model.lifecycle import JobState
from rota.model.policy import Says, Word
from rota.model.reasons import Reason
from rota.policy.words import Said, said

GATE: Final = "sys.job.gate"
"""Where the gatekeeper hears of jobs to decide about: a msgpack list of ids."""
UNDECIDED: Final = Reason.POLICY_PENDING.value
"""Reason of a job that no gate has decided about yet."""
WORD_S: Final = 30.0
"""How long a word counts, by the clock of PostgreSQL, from before it was asked for."""


def wake(jobs: Sequence[JobId]) -> Message:
    """Tells the gatekeeper of jobs to decide about. Never a duplicate: a job may come to the gate more than once."""
    return Message(subject=GATE, data=msgspec.msgpack.encode(jobs), msg_id=f"gate:{secrets.token_hex(12)}")


class Verdict(StrEnum):
    ALLOW = "allow"
    DENY = "deny"
    REQUIRE_APPROVAL = "require_approval"
    WAIT = "wait"
    """Not now, such as while the policy cannot be asked; `reason` says why, and the gate is asked again."""


class Decision(msgspec.Struct, frozen=True):
    verdict: Verdict
    reason: str = ""
    """A code of `rota.model.reasons`."""
    said: Said | None = None
    """The word of the policy that it rests on; None: nobody was asked, or nobody answered."""
    because: str = ""
    """For people: the rule, and what it says."""
    wait_s: float = 0.0
    """Of WAIT, until it is asked again; 0: a second, then twice as long each time."""

    @property
    def state(self) -> JobState:
        """What a job becomes that is written with this decision; one that was denied ends after that."""
        match self.verdict:
            case Verdict.ALLOW:
                return JobState.SCHEDULED
            case Verdict.REQUIRE_APPROVAL:
                return JobState.APPROVAL_REQUIRED
            case Verdict.DENY | Verdict.WAIT:
                return JobState.PENDING


ALLOWED: Final = Decision(Verdict.ALLOW)
LATER: Final = Decision(Verdict.WAIT, UNDECIDED)
WAITING: Final = Decision(Verdict.WAIT, Reason.WAITING_ON_JOB.value)


class Decided(msgspec.Struct, frozen=True):
    """Decisions on plans, in their order, that queue nothing after `until` by the clock of PostgreSQL."""

    decisions: Sequence[Decision]
    until: datetime | None = None


class Gate(Protocol):
    at_once: bool
    """Whether it decides without asking anybody, so that it may be asked inside a transaction."""

    def decide(self, batch: Sequence[Plan]) -> Sequence[Decision]:
        """A decision for each, in their order. Never asked while jobs are written unless it decides at once."""
        ...


class AllowAll:
    """The gate of a Rota without policy."""

    at_once = True

    def decide(self, batch: Sequence[Plan]) -> Sequence[Decision]:
        return [ALLOWED] * len(batch)


class AskLater:
    """The gate before a policy that has to be asked: jobs are written as PENDING, and the gatekeeper asks."""

    at_once = False

    def decide(self, batch: Sequence[Plan]) -> Sequence[Decision]:
        return [LATER] * len(batch)


def decision_on(word: Word, throttle_s: float) -> Decision:
    """What a word comes to. What nobody has heard of means DENY."""
    try:
        says = Says(word.says)
    except ValueError:
        says, word = Says.DENY, Word(says=Says.DENY, reason="The policy gave a decision that is none.")
    match says:
        case Says.ALLOW | Says.ALLOW_WITH_CONSTRAINTS:
            return Decision(Verdict.ALLOW, said=said(word))
        case Says.REQUIRE_APPROVAL:
            return Decision(Verdict.REQUIRE_APPROVAL, Reason.APPROVAL_REQUIRED.value, said(word), because(word))
        case Says.THROTTLE:
            wait_s = word.delay_s if word.delay_s > 0 else throttle_s
            return Decision(Verdict.WAIT, Reason.POLICY_THROTTLED.value, said(word), because(word), wait_s)
        case Says.DENY:
            return Decision(Verdict.DENY, Reason.SAFETY_DENIED.value, said(word), because(word))
        case _:
            assert_never(says)


def because(word: Word) -> str:
    """Which rule spoke, and what it says, for people."""
    rule = f"rule {word.rule}" if word.rule else "no rule of the policy allows it"
    return f"{rule}: {word.reason}" if word.reason else rule
