"""Recurring agents: when they run, where, what came of it, and what can be done with them.

Agents belong to no show, so a key needs its role in every show. Names may hold slashes and are no part of a path.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from litestar import Controller, delete, get, post
from litestar.params import JSONBody, QueryParameter

from rota.agents import overview
from rota.agents.admin import Admin
from rota.model.access import Role
from rota.model.agent import NAME_MAX
from rota.model.agent_views import HISTORY_MAX, AgentsHealth, AgentView, Backfill, Past, RunView, Triggered
from rota.model.farm import Changed
from rota.server.http.desk import Desk
from rota.server.http.pages import LIMIT, Limit, Page, page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.wire import Ask

VIEW, OPERATE = needs(Role.VIEWER, "everywhere"), needs(Role.OPERATOR, "everywhere")
ADMIN = needs(Role.ADMIN, "everywhere")
Name = Annotated[str, QueryParameter(max_length=NAME_MAX, description="The name of an agent.")]
After = Annotated[str, QueryParameter(max_length=NAME_MAX, description="`next` of the page before.")]
Runs = Annotated[int, QueryParameter(ge=1, le=HISTORY_MAX, description="Runs at most.")]


class AgentRoutes(Controller):
    path = "/agents"
    tags = ("agents",)

    @get(opt=VIEW)
    async def find_agents(self, request: Ask, desk: AtDesk, after: After = "", limit: Limit = LIMIT) -> Page[AgentView]:
        """By name, each with what it does now and when it is due."""
        found = await _admin(request, desk).list(after=after, most=limit + 1)
        return page(found, limit, lambda agent: agent.name)

    @get("/show", opt=VIEW)
    async def get_agent(self, request: Ask, desk: AtDesk, agent: Name) -> AgentView:
        return await _admin(request, desk).show(agent)

    @get("/history", opt=VIEW)
    async def read_agent_history(
        self, request: Ask, desk: AtDesk, agent: Name, limit: Runs = HISTORY_MAX
    ) -> Page[RunView]:
        """Its last runs, the latest first, with duration and error."""
        return Page(list(await _admin(request, desk).history(agent, limit)))

    @get("/health", opt=VIEW)
    async def get_agents_health(self, request: Ask, desk: AtDesk) -> AgentsHealth:
        """Whether agents run on time, who runs them, and what is wrong."""
        return await overview.health(_admin(request, desk), datetime.now(UTC))

    @post("/pause", opt=OPERATE, status_code=200)
    async def pause_agent(self, request: Ask, desk: AtDesk, agent: Name) -> Changed:
        """No further run begins; one that is under way ends by itself."""
        return Changed(name=agent, changed=await _admin(request, desk).pause(agent))

    @post("/resume", opt=OPERATE, status_code=200)
    async def resume_agent(self, request: Ask, desk: AtDesk, agent: Name) -> Changed:
        """What it missed is caught up as it was declared to."""
        return Changed(name=agent, changed=await _admin(request, desk).resume(agent))

    @post("/trigger", opt=OPERATE, status_code=200)
    async def trigger_agent(self, request: Ask, desk: AtDesk, agent: Name) -> Triggered:
        """Run it now, or once more after the run that is under way."""
        return Triggered(name=agent, queued=not await _admin(request, desk).trigger(agent))

    @post("/backfill", opt=OPERATE, status_code=200)
    async def backfill_agent(self, request: Ask, desk: AtDesk, agent: Name, data: JSONBody[Past]) -> Backfill:
        """Run it for past moments of its schedule, one by one, in between those that come."""
        return await _admin(request, desk).backfill(agent, data.since, data.until)

    @post("/backfill/stop", opt=OPERATE, status_code=200)
    async def stop_backfill(self, request: Ask, desk: AtDesk, agent: Name) -> Changed:
        """Begin no more of its runs; one that is under way ends by itself."""
        return Changed(name=agent, changed=await _admin(request, desk).stop_backfill(agent))

    @delete(opt=ADMIN, status_code=200)
    async def remove_agent(self, request: Ask, desk: AtDesk, agent: Name) -> Changed:
        """Forget it and its history. Whoever still declares it makes it known again."""
        await _admin(request, desk).remove(agent)
        return Changed(name=agent, changed=True)


def _admin(request: Ask, desk: Desk) -> Admin:
    return Admin(desk.database, desk.agents, desk.settings.redis.scheduler.keys, request.user.audited)
