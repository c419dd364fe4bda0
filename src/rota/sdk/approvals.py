"""What waits for people to agree: `app.approvals`. Each is named by its own id, that of its job, or RUN:STEP."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from rota.model.approval import ApprovalState, ApprovalView, Decided, Reasoned
from rota.model.workflow_approval import StepAsked
from rota.sdk.rooms import M, Room, at, call


class _Shown(msgspec.Struct, frozen=True):
    approval: ApprovalView
    step: StepAsked | None = None


class Approvals(Room[M]):
    @call
    async def list(
        self, *, state: ApprovalState | str = ApprovalState.PENDING, most: int = 50
    ) -> Sequence[ApprovalView]:
        """The oldest first."""
        return await self._list("/approvals", ApprovalView, most=most, state=str(state))

    @call
    async def get(self, which: UUID | str) -> ApprovalView:
        return (await self._ask("GET", at("approvals", str(which)), _Shown)).approval

    @call
    async def step(self, which: UUID | str) -> StepAsked | None:
        """Exactly what people agree to, of a step of a run; None when it is not about one."""
        return (await self._ask("GET", at("approvals", str(which)), _Shown)).step

    @call
    async def approve(self, which: UUID | str, reason: str = "") -> Decided:
        """Agree; `changed` is False when that was said before."""
        path = at("approvals", str(which), "approve")
        return await self._ask("POST", path, Decided, body=Reasoned(reason=reason))

    @call
    async def reject(self, which: UUID | str, reason: str = "") -> Decided:
        """Refuse: what waits for it is denied."""
        path = at("approvals", str(which), "reject")
        return await self._ask("POST", path, Decided, body=Reasoned(reason=reason))
