"""Approvals: pending approvals, their exact subjects, and votes.

Viewers of the show can read them. The approval itself decides who may vote: the principals it names, or every operator
of the show; never the submitter.
"""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter

from rota.api.approvals import ApprovalDetail
from rota.api.pages import Page
from rota.engine.admission.approvals import approval_not_found
from rota.model.access import Actor, Role
from rota.model.approvals import (
    Approval,
    ApprovalKind,
    ApprovalState,
    ApprovalView,
    Voter,
    VoteReply,
    VoteRequest,
    approval_view,
)
from rota.model.ids import JobId, parse_id
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, paginate
from rota.server.http.permissions import Deps, requires

VIEW = requires(Role.VIEWER, "somewhere")
ApprovalPath = Annotated[
    str, PathParameter(description="The id of an approval, or of the job that waits for it; for a step, RUN:STEP.")
]
ApprovalStateQuery = Annotated[
    ApprovalState, QueryParameter(name="state", description="Approvals in this state; default: pending.")
]


class ApprovalRoutes(Controller):
    path = "/approvals"
    tags = ("approvals",)

    @get(opt=VIEW)
    async def find_approvals(
        self,
        request: ApiRequest,
        deps: Deps,
        being: ApprovalStateQuery = ApprovalState.PENDING,
        kind: FromQuery[ApprovalKind | None] = None,
        after: FromQuery[str | None] = None,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[ApprovalView]:
        """List approvals, oldest first."""
        shows = request.user.shows_with_role(Role.VIEWER)
        found = await deps.approver.approvals.list(
            state=being,
            kind=kind,
            shows=None if shows is None else sorted(shows),
            after=parse_id(JobId, after) if after else None,
            most=limit + 1,
        )
        return paginate([approval_view(each) for each in found], limit, lambda each: each.id)

    @get("/{approval:str}", opt=VIEW)
    async def get_approval(self, request: ApiRequest, deps: Deps, approval: ApprovalPath) -> ApprovalDetail:
        """Show exactly what is to be approved, by which rule, by whom, and until when."""
        found = await _visible_approval(request.user, deps, approval)
        jobs = await deps.jobs.get_many([parse_id(JobId, found.subject)]) if found.kind == "job" else []
        step = await deps.workflows.advancer.advancing.approving.step_approval_view(found)
        return ApprovalDetail(approval=approval_view(found), job=jobs[0] if jobs else None, step=step)

    @post("/{approval:str}/approve", opt=VIEW, status_code=200)
    async def approve(
        self, request: ApiRequest, deps: Deps, approval: ApprovalPath, data: JSONBody[VoteRequest]
    ) -> VoteReply:
        """Approve. With enough votes a step continues, and a job if the policy, evaluated again, requires no more."""
        found = await _visible_approval(request.user, deps, approval)
        vote = await deps.approver.approve(found, _voter(request.user, found), data.reason)
        return VoteReply(approval=approval_view(vote.approval), changed=vote.changed)

    @post("/{approval:str}/reject", opt=VIEW, status_code=200)
    async def reject(
        self, request: ApiRequest, deps: Deps, approval: ApprovalPath, data: JSONBody[VoteRequest]
    ) -> VoteReply:
        """Reject. The job or step is denied."""
        found = await _visible_approval(request.user, deps, approval)
        vote = await deps.approver.reject(found, _voter(request.user, found), data.reason)
        return VoteReply(approval=approval_view(vote.approval), changed=vote.changed)


async def _visible_approval(actor: Actor, deps: HttpDependencies, name: str) -> Approval:
    """Raises not found for an approval in a show that the key cannot view."""
    found = await deps.approver.find(name)
    if not actor.has_role(Role.VIEWER, found.show_id):
        raise approval_not_found(name)
    return found


def _voter(actor: Actor, approval: Approval) -> Voter:
    return Voter(actor.principal, actor.audited, actor.has_role(Role.OPERATOR, approval.show_id))
