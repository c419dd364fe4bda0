"""Agents of the whole installation, whichever app declares them: `app.agents`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rota.model.agent_views import HISTORY_MAX, AgentsHealth, AgentView, Backfill, Past, RunView, Triggered
from rota.model.farm import Changed
from rota.sdk.rooms import MOST, M, Room, call

ALL: Final = MOST - 1
"""Page by page, until there are no more."""


class Agents(Room[M]):
    @call
    async def list(self, *, most: int = ALL) -> Sequence[AgentView]:
        """By name, each with what it does now and when it is due."""
        return await self._list("/agents", AgentView, most=most)

    @call
    async def get(self, name: str) -> AgentView:
        return await self._ask("GET", "/agents/show", AgentView, query={"agent": name})

    @call
    async def history(self, name: str, *, most: int = HISTORY_MAX) -> Sequence[RunView]:
        """Its last runs, the latest first."""
        return await self._list("/agents/history", RunView, agent=name, limit=most)

    @call
    async def health(self) -> AgentsHealth:
        """Whether agents run on time, who runs them, and what is wrong."""
        return await self._ask("GET", "/agents/health", AgentsHealth)

    @call
    async def pause(self, name: str) -> bool:
        """Whether that changed anything. No further run begins; one that is under way ends by itself."""
        return (await self._ask("POST", "/agents/pause", Changed, query={"agent": name})).changed

    @call
    async def resume(self, name: str) -> bool:
        return (await self._ask("POST", "/agents/resume", Changed, query={"agent": name})).changed

    @call
    async def trigger(self, name: str) -> Triggered:
        """Run it now, or once more after the run that is under way."""
        return await self._ask("POST", "/agents/trigger", Triggered, again=False, query={"agent": name})

    @call
    async def backfill(self, name: str, since: datetime, until: datetime) -> Backfill:
        """Run it for past moments of its schedule, from one until before another, one by one."""
        past = Past(since=since, until=until)
        return await self._ask("POST", "/agents/backfill", Backfill, again=False, query={"agent": name}, body=past)

    @call
    async def stop_backfill(self, name: str) -> bool:
        """Whether there was one."""
        return (await self._ask("POST", "/agents/backfill/stop", Changed, query={"agent": name})).changed

    @call
    async def remove(self, name: str) -> None:
        """Forget it and its history."""
        await self._ask("DELETE", "/agents", Changed, again=False, query={"agent": name})
