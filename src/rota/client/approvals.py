"""Approval requests: `app.approvals`. Each is named by its own id, its job id, or RUN:STEP."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from rota.api.approvals import ApprovalDetail
from rota.client.resource import ApiResource, M, api_method, url_path
from rota.model.approvals import ApprovalState, ApprovalView, VoteReply, VoteRequest
from rota.model.workflows.approval_steps import StepApprovalView


class ApprovalsResource(ApiResource[M]):
    @api_method
    async def list(
        self, *, state: ApprovalState | str = ApprovalState.PENDING, most: int = 50
    ) -> Sequence[ApprovalView]:
        """Oldest first."""
        return await self._list("/approvals", ApprovalView, most=most, state=str(state))

    @api_method
    async def get(self, which: UUID | str) -> ApprovalView:
        return (await self._request("GET", url_path("approvals", str(which)), ApprovalDetail)).approval

    @api_method
    async def step(self, which: UUID | str) -> StepApprovalView | None:
        """The workflow step the approval is about; None: it is about a job."""
        return (await self._request("GET", url_path("approvals", str(which)), ApprovalDetail)).step

    @api_method
    async def approve(self, which: UUID | str, reason: str = "") -> VoteReply:
        """Approves; `changed` is False for a repeated vote."""
        path = url_path("approvals", str(which), "approve")
        return await self._request("POST", path, VoteReply, body=VoteRequest(reason=reason))

    @api_method
    async def reject(self, which: UUID | str, reason: str = "") -> VoteReply:
        """Rejects: the job or step is denied."""
        path = url_path("approvals", str(which), "reject")
        return await self._request("POST", path, VoteReply, body=VoteRequest(reason=reason))
