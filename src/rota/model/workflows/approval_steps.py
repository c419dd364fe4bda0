"""Approval steps: their terms, what approvers see, and the hash of it. No I/O.

The hash covers stored bytes only: the digest of the definition, the input of the run, and the outputs of the steps that
text and input of the step read. None of these changes while the step waits.
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
    """Who must approve what, and by when; the starter of the run may not approve."""

    text: str
    """The question to the approvers, with expressions."""


class StepApprovalView(msgspec.Struct, frozen=True, kw_only=True):
    """What approvers see of a step."""

    run: UUID
    workflow: str
    version: int
    step: str
    text: str
    input: dict[str, Any]
    """Further data the step shows."""
    run_input: dict[str, Any]
    started_by: str


class ApprovingVote(msgspec.Struct, frozen=True):
    """An approving vote in the output of a step."""

    by: str
    at: datetime
    comment: str


class ApprovalOutput(msgspec.Struct, frozen=True):
    """The output of an approved step."""

    by: list[str]
    at: datetime
    votes: list[ApprovingVote]


def subject_of(run: UUID, step: str) -> str:
    """Subject of a step's approval. A step requests approval once per run; rerunning it is another run."""
    return f"{run}:{step}"


def parse_subject(subject: str) -> tuple[UUID, str] | None:
    """Run and step; None if it is not the subject of a step."""
    run, _, step = subject.partition(":")
    try:
        return UUID(run), step
    except ValueError:
        return None


def approval_hash(
    show: UUID, run: UUID, step: str, digest: bytes, run_input: bytes, values: Mapping[int, bytes]
) -> bytes:
    """`values` are the outputs of other steps, by step index."""
    parts = [HASH_VERSION, str(show), str(run), step, digest, run_input, sorted(values.items())]
    return sha256(_ENCODE(parts)).digest()


def approval_output(approval: Approval) -> ApprovalOutput:
    votes = [ApprovingVote(vote.voter, vote.at, vote.reason) for vote in approval.votes if vote.agrees]
    assert votes, "a granted approval has approving votes"
    return ApprovalOutput([vote.by for vote in votes], votes[-1].at, votes)


def denial_reason(approval: Approval, state: ApprovalState) -> str:
    """Why a step that was not approved is denied."""
    if state is ApprovalState.EXPIRED:
        return f"Not enough people approved it in time: {approval.agreed} of {approval.quorum} did."
    refused = next((vote for vote in approval.votes if not vote.agrees), None)
    if refused is None:
        return "It was not approved."
    return f"Rejected by {refused.voter}{f': {refused.reason}' if refused.reason else ''}."


def check_terms(step: str, spec: ApprovalSpec | None) -> ApprovalSpec:
    """The terms of a step; raises InvalidInput for terms that can never be met."""
    if spec is None or not spec.text.strip():
        raise InvalidInput(f"Step {step} has no question for its approvers: set text in its field approval.")
    if not 1 <= spec.quorum <= QUORUM_MAX:
        raise InvalidInput(f"The quorum of step {step} is {spec.quorum}: use 1 to {QUORUM_MAX}.")
    if not 0 <= spec.expires_s <= EXPIRES_MAX_S:
        raise InvalidInput(f"The expires_s of step {step} is out of range: use seconds from 0 to ten years.")
    if any(not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable() for name in spec.approvers):
        raise InvalidInput(f"An approver of step {step} is not a valid key name: correct it.")
    if spec.approvers and len(set(spec.approvers)) < spec.quorum:
        raise InvalidInput(
            f"Step {step} needs {spec.quorum} approvals but names {len(set(spec.approvers))} approvers: name more."
        )
    return spec


def render_approval(step: CompiledStep, scope: Scope) -> tuple[str, dict[str, Any]]:
    """The question to the approvers, and the data shown with it. Raises `ExpressionError`."""
    assert step.spec.approval is not None, "only steps of type approval are rendered"
    text = to_text(step.value(scope)) if step.value is not None else step.spec.approval.text
    if not text.strip() or len(text) > TEXT_MAX:
        raise ExpressionError(f"The approval text of step {step.id} has {len(text)} characters: use 1 to {TEXT_MAX}.")
    return text.replace("\0", ""), dict(step.call_input(scope))
