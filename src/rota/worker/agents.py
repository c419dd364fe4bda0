"""The agents of an app, run by its worker: async bodies on the loop, sync ones in processes, jobs as submissions.

Unlike frames, agents need PostgreSQL and Redis: who may run is decided there. While either is away the service waits,
and frames go on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rota.agents.jobs import submitting
from rota.agents.registry import Declared
from rota.agents.runs import Body
from rota.agents.scheduler import Agents
from rota.agents.telling import Tell
from rota.engine.submit import Submitter
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget, check_current
from rota.infra.redis import RedisTarget, check_fit, connect
from rota.infra.service import Lifecycle
from rota.model.failures import Hook
from rota.model.settings import Settings
from rota.sdk.agent import Agent
from rota.worker.agent_processes import AgentProcesses


class WorkerAgents:
    """`Service("agents", WorkerAgents(...).run)`. `submitter` makes what agents that submit a job need."""

    def __init__(
        self,
        settings: Settings,
        agents: dict[str, Agent],
        app: str,
        folder: Path,
        postgres: PostgresTarget,
        redis: RedisTarget,
        submitter: Callable[[Database], Submitter],
        owner: str | None = None,
        hook: Hook | None = None,
        tell: Tell | None = None,
    ) -> None:
        self._settings = settings
        self._declared = agents
        self._app = app
        self._folder = folder
        self._postgres = postgres
        self._redis = redis
        self._submitter = submitter
        self._owner = owner
        self._hook = hook
        self._tell = tell
        self.agents: Agents | None = None

    async def run(self, life: Lifecycle) -> None:
        async with AsyncExitStack() as closing:
            database = await Database.open(self._postgres)
            closing.push_async_callback(database.close)
            await check_current(database)
            redis = connect(self._redis)
            closing.push_async_callback(redis.aclose)
            await check_fit(redis)
            processes = AgentProcesses(self._app, self._folder, self._lease_until)
            closing.push_async_callback(processes.close)
            submitter = self._submitter(database)
            bodies = [Declared(each.spec, _body(each, processes, submitter)) for each in self._declared.values()]

            async def declared() -> list[Declared]:
                return bodies

            leases = Leases(database, self._owner)
            self.agents = Agents(
                self._settings, database, redis, declared, leases=leases, hook=self._hook, tell=self._tell
            )
            await self.agents.run(life)

    def _lease_until(self) -> float:
        return self.agents.lease_until() if self.agents is not None else 0.0


def _body(agent: Agent, processes: AgentProcesses, submitter: Submitter) -> Body:
    if agent.spec.job is not None:
        return submitting(submitter, agent.spec)
    return agent.call if agent.is_async else processes.body
