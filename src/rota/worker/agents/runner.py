"""Service that runs an app's agents: async bodies on the event loop, sync bodies in processes, jobs by submission.

Unlike frames, agents need PostgreSQL and Redis, which decide who may run an agent. While either is unavailable this
service waits; frames continue.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from rota.agents.events import PublishEvent
from rota.agents.job_agents import submitting_body
from rota.agents.membership import AgentMembership
from rota.agents.registry import DeclaredAgent
from rota.agents.running import AgentBody, PreparedBody
from rota.agents.scheduler import AgentScheduler
from rota.engine.submission.submitter import Submitter
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget, check_current
from rota.infra.redis import RedisTarget, check_server, connect
from rota.infra.service import Lifecycle
from rota.model.failure_classes import ClassifyHook
from rota.model.settings import Settings
from rota.sdk.agent import AgentDefinition
from rota.worker.agents.process_runner import AgentProcessRunner


class AgentApp(msgspec.Struct, frozen=True):
    """An app whose agents run here. Processes of sync bodies load it by `reference` (`module:name`), in `folder`."""

    reference: str
    folder: Path
    agents: dict[str, AgentDefinition]
    failure_hook: ClassifyHook | None = None


class WorkerAgents:
    """`Service("agents", WorkerAgents(...).run)`. `submitter` is used by agents that submit jobs."""

    def __init__(
        self,
        settings: Settings,
        app: AgentApp,
        postgres: PostgresTarget,
        redis: RedisTarget,
        submitter: Callable[[Database], Submitter],
        publish_event: PublishEvent,
        owner: str | None = None,
    ) -> None:
        self._settings = settings
        self._declared = app.agents
        self._app = app.reference
        self._folder = app.folder
        self._postgres = postgres
        self._redis = redis
        self._submitter = submitter
        self._owner = owner
        self._hook = app.failure_hook
        self._publish_event = publish_event
        self.agents: AgentScheduler | None = None

    async def run(self, life: Lifecycle) -> None:
        async with AsyncExitStack() as closing:
            database = await Database.open(self._postgres)
            closing.push_async_callback(database.close)
            await check_current(database)
            redis = connect(self._redis)
            closing.push_async_callback(redis.aclose)
            await check_server(redis)
            processes = AgentProcessRunner(self._app, self._folder, self._lease_until)
            closing.push_async_callback(processes.close)
            submitter = self._submitter(database)
            bodies = [
                DeclaredAgent(each.spec, _agent_body(each, processes, submitter)) for each in self._declared.values()
            ]

            async def declared() -> list[DeclaredAgent]:
                return bodies

            membership = AgentMembership(Leases(database, self._owner))
            self.agents = AgentScheduler(
                self._settings, database, redis, declared, membership, self._publish_event, self._hook
            )
            await self.agents.run(life)

    def _lease_until(self) -> float:
        return self.agents.membership.lease_until() if self.agents is not None else 0.0


def _agent_body(
    agent: AgentDefinition, processes: AgentProcessRunner, submitter: Submitter
) -> AgentBody | PreparedBody:
    if agent.spec.job is not None:
        return submitting_body(submitter, agent.spec)
    return agent.call if agent.is_async else processes
