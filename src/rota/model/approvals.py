"""Approvals of jobs and workflow steps: requests, votes, and who may vote. No I/O."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal
from uuid import UUID

import msgspec

from rota.model.errors import ApprovalResolved, Forbidden, SelfApprovalDenied
from rota.model.identity.principals import Principal, is_unverified
from rota.model.ids import ShowId
from rota.model.policy.decision import ApprovalTerms

ApprovalKind = Literal["job", "step"]


class ApprovalState(StrEnum):
    PENDING = "pending"
    GRANTED = "granted"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CLOSED = "closed"
    """Its subject ended first."""
    STALE = "stale"
    """The stored subject differs from the one it was requested for."""


class Vote(msgspec.Struct, frozen=True):
    voter: str
    """The name of a principal."""
    agrees: bool
    reason: str
    at: datetime
    may_be_named: bool = True
    """Whether `approvers` of a policy can name the voter (`Principal.is_global`)."""


class Voter(msgspec.Struct, frozen=True):
    """A principal who votes."""

    principal: Principal
    audited: str
    """Name in the audit log."""
    is_operator: bool
    """In the show of the approval."""


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A requested approval. `subject` is the id of a job, or `<run>:<step>`."""

    kind: ApprovalKind
    subject: str
    show: ShowId
    hash: bytes
    title: str = ""
    reason: str = ""
    rule: str = ""
    snapshot: str = ""
    terms: ApprovalTerms = ApprovalTerms()
    principal: str = ""
    actor: str = ""
    id: UUID | None = None
    """Set if the requester has already chosen the id."""


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    kind: ApprovalKind
    subject: str
    show: str
    show_id: ShowId
    state: ApprovalState
    hash: bytes
    title: str
    reason: str
    """The rule's explanation."""
    rule: str
    snapshot: str
    quorum: int
    approvers: tuple[str, ...]
    """Principals that may vote; empty: every operator of the show."""
    principal: str
    """The submitter."""
    actor: str
    requested_at: datetime
    expires_at: datetime | None = None
    decided_at: datetime | None = None
    votes: tuple[Vote, ...] = ()
    is_overdue: bool = False
    """Past `expires_at` by the clock of PostgreSQL, but not yet marked as expired."""

    @property
    def agreed(self) -> int:
        return sum(vote.agrees for vote in self.votes)

    def vote_of(self, voter: Voter) -> Vote | None:
        return next((vote for vote in self.votes if vote.voter in voter.principal.names), None)

    def meets(self, rule: str, terms: ApprovalTerms) -> bool:
        """Whether the granted approval satisfies the rule and terms that apply now."""
        agreed = [vote for vote in self.votes if vote.agrees]
        counted = sum(not terms.approvers or (vote.may_be_named and vote.voter in terms.approvers) for vote in agreed)
        return self.state is ApprovalState.GRANTED and self.rule == rule and counted >= terms.quorum


class ApprovalView(msgspec.Struct, frozen=True, kw_only=True):
    """An approval in the API."""

    id: UUID
    kind: ApprovalKind
    subject: str
    """The id of a job, or `<run>:<step>`."""
    show: str
    state: ApprovalState
    title: str
    rule: str
    reason: str
    """The rule's explanation."""
    snapshot: str
    """Of the policy that requires it."""
    hash: str
    """Hash of the submission; the approval covers exactly this content."""
    quorum: int
    agreed: int
    approvers: tuple[str, ...]
    """Principals that may vote; empty: every operator of the show."""
    principal: str
    """The submitter, who may not vote."""
    actor: str
    requested_at: datetime
    expires_at: datetime | None
    decided_at: datetime | None
    votes: tuple[Vote, ...]


def approval_view(approval: Approval) -> ApprovalView:
    fields = {name: getattr(approval, name) for name in ApprovalView.__struct_fields__ if name != "hash"}
    return ApprovalView(hash=approval.hash.hex(), **fields)


class VoteReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a vote."""

    approval: ApprovalView
    changed: bool
    """False: the same vote was already recorded."""


class VoteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    reason: str = ""
    """A comment for later readers."""


def check_voter(approval: Approval, voter: Voter, *, agrees: bool) -> None:
    """Raises SelfApprovalDenied or Forbidden unless `voter` may vote."""
    name, submitters = voter.principal.name, _submitters(approval)
    if is_unverified(name):
        raise Forbidden(
            f"{name} is not a principal: vote with a key, through the API or `rota approvals`.",
            approval=str(approval.id),
        )
    if not submitters.isdisjoint(voter.principal.names):
        raise SelfApprovalDenied(
            f"{name} submitted this and cannot approve it: ask another approver.",
            approval=str(approval.id),
        )
    if agrees and is_unverified(approval.principal):
        raise SelfApprovalDenied(
            f"{approval.principal} submitted this without a key, so that {name} may be the submitter: reject it, and"
            " submit it or retry it with a key.",
            approval=str(approval.id),
            submitter="unverified",
        )
    if approval.approvers and not (voter.principal.is_global and name in approval.approvers):
        raise Forbidden(
            f"{name} may not approve this: ask one of {', '.join(approval.approvers[:5])}.",
            approval=str(approval.id),
        )
    if not approval.approvers and not voter.is_operator:
        raise Forbidden(
            f"{name} is not an operator of the show {approval.show}: approving requires that role.",
            approval=str(approval.id),
        )


def check_pending(approval: Approval) -> None:
    if approval.state is not ApprovalState.PENDING:
        raise ApprovalResolved(
            f"This approval has been {approval.state} since {approval.decided_at:%Y-%m-%d %H:%M:%S}: votes are closed.",
            approval=str(approval.id),
            state=approval.state.value,
        )
    if approval.is_overdue:
        raise ApprovalResolved(
            f"This approval expired at {approval.expires_at:%Y-%m-%d %H:%M:%S}: votes are closed.",
            approval=str(approval.id),
            state=ApprovalState.EXPIRED.value,
        )


def _submitters(approval: Approval) -> set[str]:
    return {name for name in (approval.principal, approval.actor) if name}
