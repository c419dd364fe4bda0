"""Agents of the whole installation, of all apps: `app.agents`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rota.api.agents import HISTORY_MAX, AgentRunView, AgentsHealth, AgentView, Backfill, BackfillRange, TriggerResult
from rota.api.resources import ChangeResult
from rota.client.resource import UNPAGED, ApiResource, M, api_method

ALL_PAGES: Final = UNPAGED - 1
"""Reads all pages."""


class AgentsResource(ApiResource[M]):
    @api_method
    async def list(self, *, most: int = ALL_PAGES) -> Sequence[AgentView]:
        """Sorted by name, with current state and due time."""
        return await self._list("/agents", AgentView, most=most)

    @api_method
    async def get(self, name: str) -> AgentView:
        return await self._request("GET", "/agents/show", AgentView, query={"agent": name})

    @api_method
    async def history(self, name: str, *, most: int = HISTORY_MAX) -> Sequence[AgentRunView]:
        """Recent runs, latest first."""
        return await self._list("/agents/history", AgentRunView, agent=name, limit=most)

    @api_method
    async def health(self) -> AgentsHealth:
        """Whether agents run on time, which processes run them, and problems."""
        return await self._request("GET", "/agents/health", AgentsHealth)

    @api_method
    async def pause(self, name: str) -> bool:
        """Starts no further runs; a current run finishes. Returns whether the state changed."""
        return (await self._request("POST", "/agents/pause", ChangeResult, query={"agent": name})).changed

    @api_method
    async def resume(self, name: str) -> bool:
        return (await self._request("POST", "/agents/resume", ChangeResult, query={"agent": name})).changed

    @api_method
    async def trigger(self, name: str) -> TriggerResult:
        """Runs it now, or once more after the current run."""
        return await self._request("POST", "/agents/trigger", TriggerResult, idempotent=False, query={"agent": name})

    @api_method
    async def backfill(self, name: str, since: datetime, until: datetime) -> Backfill:
        """Runs it for the past times of its schedule in [since, until), one by one."""
        window = BackfillRange(since=since, until=until)
        return await self._request(
            "POST", "/agents/backfill", Backfill, idempotent=False, query={"agent": name}, body=window
        )

    @api_method
    async def stop_backfill(self, name: str) -> bool:
        """Returns whether a backfill was active."""
        return (await self._request("POST", "/agents/backfill/stop", ChangeResult, query={"agent": name})).changed

    @api_method
    async def remove(self, name: str) -> None:
        """Deletes it and its history."""
        await self._request("DELETE", "/agents", ChangeResult, idempotent=False, query={"agent": name})
