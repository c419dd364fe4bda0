"""Recurring agents: when they run, where, what came of it, and what can be done with them.

Agents belong to no show, so a key needs its role in every show. Names may hold slashes and are no part of a path.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from litestar import Controller, delete, get, post
from litestar.params import JSONBody, QueryParameter

from rota.agents import health_summary
from rota.agents.admin import AgentAdmin
from rota.api.agents import HISTORY_MAX, AgentRunView, AgentsHealth, AgentView, Backfill, BackfillRange, TriggerResult
from rota.api.resources import ChangeResult
from rota.model.access import Role
from rota.model.agents import NAME_MAX
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, Page, paginate
from rota.server.http.permissions import Deps, requires

VIEW, OPERATE = requires(Role.VIEWER, "everywhere"), requires(Role.OPERATOR, "everywhere")
ADMIN = requires(Role.ADMIN, "everywhere")
AgentNameQuery = Annotated[str, QueryParameter(max_length=NAME_MAX, description="The name of an agent.")]
After = Annotated[str, QueryParameter(max_length=NAME_MAX, description="`next` of the page before.")]
HistoryLimit = Annotated[int, QueryParameter(ge=1, le=HISTORY_MAX, description="Runs at most.")]


class AgentRoutes(Controller):
    path = "/agents"
    tags = ("agents",)

    @get(opt=VIEW)
    async def find_agents(
        self, request: ApiRequest, desk: Deps, after: After = "", limit: Limit = LIMIT_DEFAULT
    ) -> Page[AgentView]:
        """By name, each with what it does now and when it is due."""
        found = await _admin(request, desk).list(after=after, most=limit + 1)
        return paginate(found, limit, lambda agent: agent.name)

    @get("/show", opt=VIEW)
    async def get_agent(self, request: ApiRequest, desk: Deps, agent: AgentNameQuery) -> AgentView:
        return await _admin(request, desk).show(agent)

    @get("/history", opt=VIEW)
    async def read_agent_history(
        self, request: ApiRequest, desk: Deps, agent: AgentNameQuery, limit: HistoryLimit = HISTORY_MAX
    ) -> Page[AgentRunView]:
        """Its last runs, the latest first, with duration and error."""
        return Page(list(await _admin(request, desk).history(agent, limit)))

    @get("/health", opt=VIEW)
    async def get_agents_health(self, request: ApiRequest, desk: Deps) -> AgentsHealth:
        """Whether agents run on time, who runs them, and what is wrong."""
        return await health_summary.summarize_health(_admin(request, desk), datetime.now(UTC))

    @post("/pause", opt=OPERATE, status_code=200)
    async def pause_agent(self, request: ApiRequest, desk: Deps, agent: AgentNameQuery) -> ChangeResult:
        """No further run begins; one that is under way ends by itself."""
        return ChangeResult(name=agent, changed=await _admin(request, desk).pause(agent))

    @post("/resume", opt=OPERATE, status_code=200)
    async def resume_agent(self, request: ApiRequest, desk: Deps, agent: AgentNameQuery) -> ChangeResult:
        """What it missed is caught up as it was declared to."""
        return ChangeResult(name=agent, changed=await _admin(request, desk).resume(agent))

    @post("/trigger", opt=OPERATE, status_code=200)
    async def trigger_agent(self, request: ApiRequest, desk: Deps, agent: AgentNameQuery) -> TriggerResult:
        """Run it now, or once more after the run that is under way."""
        return TriggerResult(name=agent, queued=not await _admin(request, desk).trigger(agent))

    @post("/backfill", opt=OPERATE, status_code=200)
    async def backfill_agent(
        self, request: ApiRequest, desk: Deps, agent: AgentNameQuery, data: JSONBody[BackfillRange]
    ) -> Backfill:
        """Run it for past moments of its schedule, one by one, in between those that come."""
        return await _admin(request, desk).backfill(agent, data.since, data.until)

    @post("/backfill/stop", opt=OPERATE, status_code=200)
    async def stop_backfill(self, request: ApiRequest, desk: Deps, agent: AgentNameQuery) -> ChangeResult:
        """Begin no more of its runs; one that is under way ends by itself."""
        return ChangeResult(name=agent, changed=await _admin(request, desk).stop_backfill(agent))

    @delete(opt=ADMIN, status_code=200)
    async def remove_agent(self, request: ApiRequest, desk: Deps, agent: AgentNameQuery) -> ChangeResult:
        """Forget it and its history. Whoever still declares it makes it known again."""
        await _admin(request, desk).remove(agent)
        return ChangeResult(name=agent, changed=True)


def _admin(request: ApiRequest, desk: HttpDependencies) -> AgentAdmin:
    return AgentAdmin(desk.database, desk.agents, desk.settings.redis.scheduler.keys, request.user.audited)
