"""May it run: the place where policy decides about jobs before they are queued.

A gate that decides at once (`at_once`, no I/O) is asked while the job is written, and what it allows is SCHEDULED in
the same transaction. Any other gate is asked later: the job is written as PENDING, a message wakes the gatekeeper, and
`admit` queues what was allowed. Who admits twice, or two at once, admits once: the row of the job decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from rota.infra.nats import Message
from rota.model.ids import JobId
from rota.model.job_plan import Plan
from rota.model.lifecycle import JobState
from rota.model.reasons import Reason

GATE: Final = "sys.job.gate"
"""Where the gatekeeper hears of jobs to decide about: a msgpack list of ids."""
UNDECIDED: Final = Reason.POLICY_PENDING.value
"""Reason of a job that no gate has decided about yet."""


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
