"""A step that waits for people: what it says, what they are shown, and what the hash of that is made of. No I/O.

The hash is made of what is stored, as it is stored: the digest of the definition, the input of the run, and what the
steps have returned that the text and the input of the step name. None of these is written again while the step waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import msgspec

from rota.model.approvals import Approval, ApprovalState
from rota.model.errors import InvalidInput
from rota.model.policy.decision import ApprovalTerms
from rota.model.workflows.expressions import TEXT_MAX, ExpressionError, Scope, to_text

if TYPE_CHECKING:
    from rota.model.workflows.compiler import CompiledStep

HASH_VERSION: Final = "rota.step.1"
QUORUM_MAX: Final = 100
EXPIRES_MAX_S: Final = 10 * 366 * 86_400.0
NAME_CHARS_MAX: Final = 200
_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode


class ApprovalSpec(ApprovalTerms, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who must agree to what, and by when; who has started the run may not."""

    text: str
    """With expressions: what people are asked."""


class StepApprovalView(msgspec.Struct, frozen=True, kw_only=True):
    """What people agree to: a step of a run."""

    run: UUID
    workflow: str
    version: int
    step: str
    text: str
    input: dict[str, Any]
    """What the step shows besides."""
    run_input: dict[str, Any]
    started_by: str


class ApprovingVote(msgspec.Struct, frozen=True):
    """One who agreed, in the output of a step."""

    by: str
    at: datetime
    comment: str


class ApprovalOutput(msgspec.Struct, frozen=True):
    """The output of a step that people agreed to."""

    by: list[str]
    at: datetime
    votes: list[ApprovingVote]


def subject_of(run: UUID, step: str) -> str:
    """What the approval of a step is called. A step asks once in a run, and running it again is another run."""
    return f"{run}:{step}"


def parse_subject(subject: str) -> tuple[UUID, str] | None:
    """The run and the step; None for what is no subject of a step."""
    run, _, step = subject.partition(":")
    try:
        return UUID(run), step
    except ValueError:
        return None


def approval_hash(show: UUID, run: UUID, step: str, digest: bytes, given: bytes, values: Mapping[int, bytes]) -> bytes:
    """`values` are what other steps returned, by their places."""
    told = [HASH_VERSION, str(show), str(run), step, digest, given, sorted(values.items())]
    return sha256(_ENCODE(told)).digest()


def approval_output(approval: Approval) -> ApprovalOutput:
    votes = [ApprovingVote(vote.voter, vote.at, vote.reason) for vote in approval.votes if vote.agrees]
    assert votes, "nothing is granted by nobody"
    return ApprovalOutput([vote.by for vote in votes], votes[-1].at, votes)


def denial_reason(approval: Approval, state: ApprovalState) -> str:
    """Why a step is denied that people did not agree to."""
    if state is ApprovalState.EXPIRED:
        return f"Not enough people approved it in time: {approval.agreed} of {approval.quorum} did."
    refused = next((vote for vote in approval.votes if not vote.agrees), None)
    if refused is None:
        return "It was not approved."
    return f"Rejected by {refused.voter}{f': {refused.reason}' if refused.reason else ''}."


def check_terms(step: str, spec: ApprovalSpec | None) -> ApprovalSpec:
    """The terms of a step, or InvalidInput for what nobody could ever agree to."""
    if spec is None or not spec.text.strip():
        raise InvalidInput(f"Step {step} must say what people are to agree to: give it a text in approval.")
    if not 1 <= spec.quorum <= QUORUM_MAX:
        raise InvalidInput(f"The quorum of step {step} is {spec.quorum}: give 1 to {QUORUM_MAX}.")
    if not 0 <= spec.expires_s <= EXPIRES_MAX_S:
        raise InvalidInput(f"The expires_s of step {step} is no time: give seconds from 0, ten years at most.")
    if any(not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable() for name in spec.approvers):
        raise InvalidInput(f"An approver of step {step} has no name that a key could have: correct it.")
    if spec.approvers and len(set(spec.approvers)) < spec.quorum:
        raise InvalidInput(
            f"Step {step} needs {spec.quorum} who agree and names {len(set(spec.approvers))} who may: name more."
        )
    return spec


def render_approval(step: CompiledStep, scope: Scope) -> tuple[str, dict[str, Any]]:
    """What people are asked about a step, and what they are shown with it. Raises `Failed`."""
    assert step.spec.approval is not None, "only steps of type approval ask people"
    text = to_text(step.value(scope)) if step.value is not None else step.spec.approval.text
    if not text.strip() or len(text) > TEXT_MAX:
        raise ExpressionError(f"What step {step.id} asks people has {len(text)} characters: use 1 to {TEXT_MAX}.")
    return text.replace("\0", ""), dict(step.call_input(scope))
