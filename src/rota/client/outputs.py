"""Outputs that the policy holds, keeps back or has redacted: `app.outputs`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from rota.client.resource import ApiResource, M, api_method, url_path
from rota.model.policy.outputs import OutputReviewRequest, OutputReviewResult, OutputSummary, OutputView


class OutputsResource(ApiResource[M]):
    """Viewers list them, operators decide about them; not about those of jobs that they have submitted themselves."""

    @api_method
    async def list(self, *, state: str = "", job: UUID | None = None, most: int = 50) -> Sequence[OutputSummary]:
        """The newest first: held, quarantined, redacted or released ones, or all of these."""
        return await self._list("/outputs", OutputSummary, most=most, kept=state or None, job=job)

    @api_method
    async def get(self, output: int) -> OutputView:
        """Every check of it, with what was found where."""
        return await self._request("GET", url_path("outputs", str(output)), OutputView)

    @api_method
    async def release(self, output: int, reason: str) -> OutputReviewResult:
        """Let it be read as the frame left it; nothing runs again."""
        body = OutputReviewRequest(reason=reason)
        return await self._request("POST", url_path("outputs", str(output), "release"), OutputReviewResult, body=body)

    @api_method
    async def redact(self, output: int, reason: str, *, whole: bool = False) -> OutputReviewResult:
        """Let it be read without what scanners find in it, or without any of it."""
        body = OutputReviewRequest(reason=reason, whole=whole)
        return await self._request("POST", url_path("outputs", str(output), "redact"), OutputReviewResult, body=body)
