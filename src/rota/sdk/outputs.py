"""Outputs that the policy holds, keeps back or has redacted: `app.outputs`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from rota.model.output import OutputChanged, OutputDecision, OutputLine, OutputTold
from rota.sdk.rooms import M, Room, at, call


class Outputs(Room[M]):
    """Viewers list them, operators decide about them; not about those of jobs that they have submitted themselves."""

    @call
    async def list(self, *, state: str = "", job: UUID | None = None, most: int = 50) -> Sequence[OutputLine]:
        """The newest first: held, quarantined, redacted or released ones, or all of these."""
        return await self._list("/outputs", OutputLine, most=most, kept=state or None, job=job)

    @call
    async def get(self, output: int) -> OutputTold:
        """Every check of it, with what was found where."""
        return await self._ask("GET", at("outputs", str(output)), OutputTold)

    @call
    async def release(self, output: int, reason: str) -> OutputChanged:
        """Let it be read as the frame left it; nothing runs again."""
        body = OutputDecision(reason=reason)
        return await self._ask("POST", at("outputs", str(output), "release"), OutputChanged, body=body)

    @call
    async def redact(self, output: int, reason: str, *, whole: bool = False) -> OutputChanged:
        """Let it be read without what scanners find in it, or without any of it."""
        body = OutputDecision(reason=reason, whole=whole)
        return await self._ask("POST", at("outputs", str(output), "redact"), OutputChanged, body=body)
