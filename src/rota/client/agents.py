"""Agents of the whole installation, whichever app declares them: `app.agents`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rota.api.agents import HISTORY_MAX, AgentRunView, AgentsHealth, AgentView, Backfill, BackfillRange, TriggerResult
from rota.api.resources import ChangeResult
from rota.client.resource import UNPAGED, ApiResource, M, api_method

ALL_PAGES: Final = UNPAGED - 1
"""Page by page, until there are no more."""


class AgentsResource(ApiResource[M]):
    @api_method
    async def list(self, *, most: int = ALL_PAGES) -> Sequence[AgentView]:
        """By name, each with what it does now and when it is due."""
        return await self._list("/agents", AgentView, most=most)

    @api_method
    async def get(self, name: str) -> AgentView:
        return await self._request("GET", "/agents/show", AgentView, query={"agent": name})

    @api_method
    async def history(self, name: str, *, most: int = HISTORY_MAX) -> Sequence[AgentRunView]:
        """Its last runs, the latest first."""
        return await self._list("/agents/history", AgentRunView, agent=name, limit=most)

    @api_method
    async def health(self) -> AgentsHealth:
        """Whether agents run on time, who runs them, and what is wrong."""
        return await self._request("GET", "/agents/health", AgentsHealth)

    @api_method
    async def pause(self, name: str) -> bool:
        """Whether that changed anything. No further run begins; one that is under way ends by itself."""
        return (await self._request("POST", "/agents/pause", ChangeResult, query={"agent": name})).changed

    @api_method
    async def resume(self, name: str) -> bool:
        return (await self._request("POST", "/agents/resume", ChangeResult, query={"agent": name})).changed

    @api_method
    async def trigger(self, name: str) -> TriggerResult:
        """Run it now, or once more after the run that is under way."""
        return await self._request("POST", "/agents/trigger", TriggerResult, again=False, query={"agent": name})

    @api_method
    async def backfill(self, name: str, since: datetime, until: datetime) -> Backfill:
        """Run it for past moments of its schedule, from one until before another, one by one."""
        past = BackfillRange(since=since, until=until)
        return await self._request("POST", "/agents/backfill", Backfill, again=False, query={"agent": name}, body=past)

    @api_method
    async def stop_backfill(self, name: str) -> bool:
        """Whether there was one."""
        return (await self._request("POST", "/agents/backfill/stop", ChangeResult, query={"agent": name})).changed

    @api_method
    async def remove(self, name: str) -> None:
        """Forget it and its history."""
        await self._request("DELETE", "/agents", ChangeResult, again=False, query={"agent": name})
