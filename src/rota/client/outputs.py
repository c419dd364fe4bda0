"""Outputs held, quarantined or redacted by the policy: `app.outputs`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from rota.client.resource import ApiResource, M, api_method, url_path
from rota.model.policy.outputs import OutputReviewRequest, OutputReviewResult, OutputSummary, OutputView


class OutputsResource(ApiResource[M]):
    """Viewers list outputs; operators review them, except those of jobs they submitted themselves."""

    @api_method
    async def list(self, *, state: str = "", job: UUID | None = None, most: int = 50) -> Sequence[OutputSummary]:
        """Newest first; `state` is held, quarantined, redacted or released (default: all)."""
        return await self._list("/outputs", OutputSummary, most=most, kept=state or None, job=job)

    @api_method
    async def get(self, output: int) -> OutputView:
        """Every check of the output, with its findings."""
        return await self._request("GET", url_path("outputs", str(output)), OutputView)

    @api_method
    async def release(self, output: int, reason: str) -> OutputReviewResult:
        """Makes the original output readable; nothing is run again."""
        body = OutputReviewRequest(reason=reason)
        return await self._request("POST", url_path("outputs", str(output), "release"), OutputReviewResult, body=body)

    @api_method
    async def redact(self, output: int, reason: str, *, whole: bool = False) -> OutputReviewResult:
        """Makes it readable without the scanners' findings, or (`whole`) without any content."""
        body = OutputReviewRequest(reason=reason, whole=whole)
        return await self._request("POST", url_path("outputs", str(output), "redact"), OutputReviewResult, body=body)
