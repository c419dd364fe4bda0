"""What waits for people to agree, who may, and what their votes come to. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Literal
from uuid import UUID

import msgspec

from rota.model.errors import ApprovalResolved, Forbidden, SelfApprovalDenied
from rota.model.ids import ShowId
from rota.model.policy.decision import ApprovalTerms

ApprovalKind = Literal["job", "step"]


class ApprovalState(StrEnum):
    PENDING = "pending"
    GRANTED = "granted"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CLOSED = "closed"
    """What it was about ended before."""
    STALE = "stale"
    """What is stored is not what was asked about."""


class Vote(msgspec.Struct, frozen=True):
    voter: str
    agrees: bool
    reason: str
    at: datetime


class Voter(msgspec.Struct, frozen=True):
    """Who says it: the name of a key, or of a user of the command line."""

    name: str
    audited: str
    """As the audit trail names them."""
    is_operator: bool
    """Of the show."""


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An approval that is asked for. `subject` is the id of a job, or what a workflow calls its step."""

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
    """Where whoever asks has named it already."""


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
    """What the rule says."""
    rule: str
    snapshot: str
    quorum: int
    approvers: tuple[str, ...]
    """Names of keys that may agree; empty: every operator of the show."""
    principal: str
    """Who submitted it."""
    actor: str
    requested_at: datetime
    expires_at: datetime | None = None
    decided_at: datetime | None = None
    votes: tuple[Vote, ...] = ()
    is_overdue: bool = False
    """Its time has passed by the clock of PostgreSQL, and nobody has said so yet."""

    @property
    def agreed(self) -> int:
        return sum(vote.agrees for vote in self.votes)

    def vote_of(self, voter: Voter) -> Vote | None:
        return next((vote for vote in self.votes if vote.voter == voter.name), None)

    def meets(self, rule: str, terms: ApprovalTerms) -> bool:
        """Whether what people agreed to is all that is asked for now."""
        agreed = [vote.voter for vote in self.votes if vote.agrees]
        counted = sum(not terms.approvers or voter in terms.approvers for voter in agreed)
        return self.state is ApprovalState.GRANTED and self.rule == rule and counted >= terms.quorum


class ApprovalView(msgspec.Struct, frozen=True, kw_only=True):
    """As faces show it."""

    id: UUID
    kind: ApprovalKind
    subject: str
    """The id of a job, or what a workflow calls its step."""
    show: str
    state: ApprovalState
    title: str
    rule: str
    reason: str
    """What the rule says."""
    snapshot: str
    """Of the policy that asked for it."""
    hash: str
    """Of what was submitted: what is approved, and nothing else."""
    quorum: int
    agreed: int
    approvers: tuple[str, ...]
    """Names of keys that may agree; empty: every operator of the show."""
    principal: str
    """Who submitted it, who therefore may not agree."""
    actor: str
    requested_at: datetime
    expires_at: datetime | None
    decided_at: datetime | None
    votes: tuple[Vote, ...]


def approval_view(approval: Approval) -> ApprovalView:
    told = {name: getattr(approval, name) for name in ApprovalView.__struct_fields__ if name != "hash"}
    return ApprovalView(hash=approval.hash.hex(), **told)


class VoteReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a vote."""

    approval: ApprovalView
    changed: bool
    """False: it had been said before."""


class VoteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    reason: str = ""
    """For those who read about it later."""


def check_voter(approval: Approval, voter: Voter) -> None:
    """Raises unless `voter` may agree or refuse."""
    if voter.name in _submitters(approval):
        raise SelfApprovalDenied(
            f"{voter.name} submitted this, and whoever submits does not approve: have somebody else look at it.",
            approval=str(approval.id),
        )
    if approval.approvers and voter.name not in approval.approvers:
        raise Forbidden(
            f"{voter.name} is none of those who may approve this: {', '.join(approval.approvers[:5])}.",
            approval=str(approval.id),
        )
    if not approval.approvers and not voter.is_operator:
        raise Forbidden(
            f"{voter.name} is no operator of the show {approval.show}: approving needs that role.",
            approval=str(approval.id),
        )


def check_pending(approval: Approval) -> None:
    if approval.state is not ApprovalState.PENDING:
        raise ApprovalResolved(
            f"This approval is {approval.state} since {approval.decided_at:%Y-%m-%d %H:%M:%S}: nothing is left to say.",
            approval=str(approval.id),
            state=approval.state.value,
        )
    if approval.is_overdue:
        raise ApprovalResolved(
            f"This approval has expired at {approval.expires_at:%Y-%m-%d %H:%M:%S}: nothing is left to say.",
            approval=str(approval.id),
            state=ApprovalState.EXPIRED.value,
        )


def _submitters(approval: Approval) -> Iterable[str]:
    return {name for name in (approval.principal, approval.actor) if name}
