"""Approvals: what waits for people to agree, exactly what that is, and what they say.

A viewer of the show sees them. Who may agree is decided by the approval itself: the keys it names, or every operator of
the show; never who submitted it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter

from rota.engine.admission.approvals import approval_not_found
from rota.engine.queries.jobs import JobView
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
from rota.model.workflows.approval_steps import StepApprovalView
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, Page, paginate
from rota.server.http.permissions import Deps, requires

VIEW = requires(Role.VIEWER, "somewhere")
ApprovalPath = Annotated[
    str, PathParameter(description="The id of an approval, or of the job that waits for it; of a step, RUN:STEP.")
]
ApprovalStateQuery = Annotated[
    ApprovalState, QueryParameter(name="state", description="Those that are so; pending ones when left out.")
]


class ApprovalDetail(msgspec.Struct, frozen=True, kw_only=True):
    approval: ApprovalView
    job: JobView | None
    """What was submitted, as it is stored; None when it is not about a job, or that is not kept any more."""
    step: StepApprovalView | None = None
    """The same of a step of a run."""


class ApprovalRoutes(Controller):
    path = "/approvals"
    tags = ("approvals",)

    @get(opt=VIEW)
    async def find_approvals(
        self,
        request: ApiRequest,
        desk: Deps,
        being: ApprovalStateQuery = ApprovalState.PENDING,
        kind: FromQuery[ApprovalKind | None] = None,
        after: FromQuery[str | None] = None,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[ApprovalView]:
        """What waits for people to agree, or did, the oldest first."""
        shows = request.user.shows_with_role(Role.VIEWER)
        found = await desk.approver.approvals.list(
            state=being,
            kind=kind,
            shows=None if shows is None else sorted(shows),
            after=parse_id(JobId, after) if after else None,
            most=limit + 1,
        )
        return paginate([approval_view(each) for each in found], limit, lambda each: each.id)

    @get("/{approval:str}", opt=VIEW)
    async def get_approval(self, request: ApiRequest, desk: Deps, approval: ApprovalPath) -> ApprovalDetail:
        """Exactly what is to be approved, by which rule, who may, and until when."""
        found = await _visible_approval(request.user, desk, approval)
        jobs = await desk.jobs.get_many([parse_id(JobId, found.subject)]) if found.kind == "job" else []
        step = await desk.workflows.advancer.advancing.approving.step_approval_view(found)
        return ApprovalDetail(approval=approval_view(found), job=jobs[0] if jobs else None, step=step)

    @post("/{approval:str}/approve", opt=VIEW, status_code=200)
    async def approve(
        self, request: ApiRequest, desk: Deps, approval: ApprovalPath, data: JSONBody[VoteRequest]
    ) -> VoteReply:
        """Agree. Once enough have, a step goes on; a job does if the policy, asked once more, asks for no more."""
        found = await _visible_approval(request.user, desk, approval)
        said = await desk.approver.approve(found, _voter(request.user, found), data.reason)
        return VoteReply(approval=approval_view(said.approval), changed=said.changed)

    @post("/{approval:str}/reject", opt=VIEW, status_code=200)
    async def reject(
        self, request: ApiRequest, desk: Deps, approval: ApprovalPath, data: JSONBody[VoteRequest]
    ) -> VoteReply:
        """Refuse. What waits for it is denied."""
        found = await _visible_approval(request.user, desk, approval)
        said = await desk.approver.reject(found, _voter(request.user, found), data.reason)
        return VoteReply(approval=approval_view(said.approval), changed=said.changed)


async def _visible_approval(actor: Actor, desk: HttpDependencies, named: str) -> Approval:
    """One of a show that the key may not look into is not there."""
    found = await desk.approver.find(named)
    if not actor.has_role(Role.VIEWER, found.show_id):
        raise approval_not_found(named)
    return found


def _voter(actor: Actor, approval: Approval) -> Voter:
    return Voter(actor.name, actor.audited, actor.has_role(Role.OPERATOR, approval.show_id))
