"""Recurring agents: schedule, state, history, and commands.

Agents belong to no show, so a key needs its role in every show. Agent names are query parameters, not path segments,
because they may contain slashes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from litestar import Controller, delete, get, post
from litestar.params import JSONBody, QueryParameter

from rota.agents import health_summary
from rota.agents.admin import AgentAdmin
from rota.api.agents import HISTORY_MAX, AgentRunView, AgentsHealth, AgentView, Backfill, BackfillRange, TriggerResult
from rota.api.pages import Page
from rota.api.resources import ChangeResult
from rota.model.access import Role
from rota.model.agents import NAME_MAX
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, paginate
from rota.server.http.permissions import Deps, requires

VIEW, OPERATE = requires(Role.VIEWER, "everywhere"), requires(Role.OPERATOR, "everywhere")
ADMIN = requires(Role.ADMIN, "everywhere")
AgentNameQuery = Annotated[str, QueryParameter(max_length=NAME_MAX, description="The name of an agent.")]
After = Annotated[str, QueryParameter(max_length=NAME_MAX, description="`next` of the previous page.")]
HistoryLimit = Annotated[int, QueryParameter(ge=1, le=HISTORY_MAX, description="Maximum number of runs.")]


class AgentRoutes(Controller):
    path = "/agents"
    tags = ("agents",)

    @get(opt=VIEW)
    async def find_agents(
        self, request: ApiRequest, deps: Deps, after: After = "", limit: Limit = LIMIT_DEFAULT
    ) -> Page[AgentView]:
        """List agents by name, with state and next due time."""
        found = await _admin(request, deps).list(after=after, most=limit + 1)
        return paginate(found, limit, lambda agent: agent.name)

    @get("/show", opt=VIEW)
    async def get_agent(self, request: ApiRequest, deps: Deps, agent: AgentNameQuery) -> AgentView:
        return await _admin(request, deps).show(agent)

    @get("/history", opt=VIEW)
    async def read_agent_history(
        self, request: ApiRequest, deps: Deps, agent: AgentNameQuery, limit: HistoryLimit = HISTORY_MAX
    ) -> Page[AgentRunView]:
        """List its last runs, newest first, with duration and error."""
        return Page(list(await _admin(request, deps).history(agent, limit)))

    @get("/health", opt=VIEW)
    async def get_agents_health(self, request: ApiRequest, deps: Deps) -> AgentsHealth:
        """Show whether agents run on time, which workers run them, and what is wrong."""
        return await health_summary.summarize_health(_admin(request, deps), datetime.now(UTC))

    @post("/pause", opt=OPERATE, status_code=200)
    async def pause_agent(self, request: ApiRequest, deps: Deps, agent: AgentNameQuery) -> ChangeResult:
        """Start no further runs; a running one continues to its end."""
        return ChangeResult(name=agent, changed=await _admin(request, deps).pause(agent))

    @post("/resume", opt=OPERATE, status_code=200)
    async def resume_agent(self, request: ApiRequest, deps: Deps, agent: AgentNameQuery) -> ChangeResult:
        """Resume its runs; missed ones are caught up as its declaration says."""
        return ChangeResult(name=agent, changed=await _admin(request, deps).resume(agent))

    @post("/trigger", opt=OPERATE, status_code=200)
    async def trigger_agent(self, request: ApiRequest, deps: Deps, agent: AgentNameQuery) -> TriggerResult:
        """Run it now, or once more after the current run."""
        return TriggerResult(name=agent, queued=not await _admin(request, deps).trigger(agent))

    @post("/backfill", opt=OPERATE, status_code=200)
    async def backfill_agent(
        self, request: ApiRequest, deps: Deps, agent: AgentNameQuery, data: JSONBody[BackfillRange]
    ) -> Backfill:
        """Run it for past times of its schedule, one by one, between its regular runs."""
        return await _admin(request, deps).backfill(agent, data.since, data.until)

    @post("/backfill/stop", opt=OPERATE, status_code=200)
    async def stop_backfill(self, request: ApiRequest, deps: Deps, agent: AgentNameQuery) -> ChangeResult:
        """Start no more backfill runs; a running one continues to its end."""
        return ChangeResult(name=agent, changed=await _admin(request, deps).stop_backfill(agent))

    @delete(opt=ADMIN, status_code=200)
    async def remove_agent(self, request: ApiRequest, deps: Deps, agent: AgentNameQuery) -> ChangeResult:
        """Delete it and its history. A worker that still declares it registers it again."""
        await _admin(request, deps).remove(agent)
        return ChangeResult(name=agent, changed=True)


def _admin(request: ApiRequest, deps: HttpDependencies) -> AgentAdmin:
    return AgentAdmin(deps.database, deps.agents, deps.settings.redis.scheduler.keys, request.user.audited)
