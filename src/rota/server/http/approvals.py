"""Approvals: what waits for people to agree, exactly what that is, and what they say.

A viewer of the show sees them. Who may agree is decided by the approval itself: the keys it names, or every operator of
the show; never who submitted it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter

from rota.engine.approving import unknown
from rota.engine.jobs import Job
from rota.model.access import Actor, Role
from rota.model.approval import Approval, ApprovalState, ApprovalView, Decided, Kind, Reasoned, Voter, view
from rota.model.ids import JobId, parse_id
from rota.model.workflow_approval import StepAsked
from rota.server.http.desk import Desk
from rota.server.http.pages import LIMIT, Limit, Page, page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.wire import Ask

VIEW = needs(Role.VIEWER, "somewhere")
Which = Annotated[
    str, PathParameter(description="The id of an approval, or of the job that waits for it; of a step, RUN:STEP.")
]
State = Annotated[
    ApprovalState, QueryParameter(name="state", description="Those that are so; pending ones when left out.")
]


class ApprovalShown(msgspec.Struct, frozen=True, kw_only=True):
    approval: ApprovalView
    job: Job | None
    """What was submitted, as it is stored; None when it is not about a job, or that is not kept any more."""
    step: StepAsked | None = None
    """The same of a step of a run."""


class ApprovalRoutes(Controller):
    path = "/approvals"
    tags = ("approvals",)

    @get(opt=VIEW)
    async def find_approvals(
        self,
        request: Ask,
        desk: AtDesk,
        being: State = ApprovalState.PENDING,
        kind: FromQuery[Kind | None] = None,
        after: FromQuery[str | None] = None,
        limit: Limit = LIMIT,
    ) -> Page[ApprovalView]:
        """What waits for people to agree, or did, the oldest first."""
        shows = request.user.limited_to(Role.VIEWER)
        found = await desk.approver.approvals.list(
            state=being,
            kind=kind,
            shows=None if shows is None else sorted(shows),
            after=parse_id(JobId, after) if after else None,
            most=limit + 1,
        )
        return page([view(each) for each in found], limit, lambda each: each.id)

    @get("/{approval:str}", opt=VIEW)
    async def get_approval(self, request: Ask, desk: AtDesk, approval: Which) -> ApprovalShown:
        """Exactly what is to be approved, by which rule, who may, and until when."""
        found = await _seen(request.user, desk, approval)
        jobs = await desk.jobs.many([parse_id(JobId, found.subject)]) if found.kind == "job" else []
        step = await desk.workflows.advancer.advancing.approving.asked(found)
        return ApprovalShown(approval=view(found), job=jobs[0] if jobs else None, step=step)

    @post("/{approval:str}/approve", opt=VIEW, status_code=200)
    async def approve(self, request: Ask, desk: AtDesk, approval: Which, data: JSONBody[Reasoned]) -> Decided:
        """Agree. Once enough have, a step goes on; a job does if the policy, asked once more, asks for no more."""
        found = await _seen(request.user, desk, approval)
        said = await desk.approver.approve(found, _voter(request.user, found), data.reason)
        return Decided(approval=view(said.approval), changed=said.changed)

    @post("/{approval:str}/reject", opt=VIEW, status_code=200)
    async def reject(self, request: Ask, desk: AtDesk, approval: Which, data: JSONBody[Reasoned]) -> Decided:
        """Refuse. What waits for it is denied."""
        found = await _seen(request.user, desk, approval)
        said = await desk.approver.reject(found, _voter(request.user, found), data.reason)
        return Decided(approval=view(said.approval), changed=said.changed)


async def _seen(actor: Actor, desk: Desk, named: str) -> Approval:
    """One of a show that the key may not look into is not there."""
    found = await desk.approver.find(named)
    if not actor.may(Role.VIEWER, found.show_id):
        raise unknown(named)
    return found


def _voter(actor: Actor, approval: Approval) -> Voter:
    return Voter(actor.name, actor.audited, actor.may(Role.OPERATOR, approval.show_id))
