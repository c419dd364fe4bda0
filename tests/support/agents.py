"""Replicas that run agents as services of this process, and queries about their runs.

async with Pod(database, redis, beat=every(50, note)) as pod:
    await until(lambda: pod.count("beat") >= 2)
"""

import asyncio
import time
from contextlib import AsyncExitStack

import msgspec

from rota.agents.membership import AgentMembership
from rota.agents.redis_index.index import AgentIndex
from rota.agents.registry import DeclaredAgent
from rota.agents.scheduler import AgentScheduler
from rota.infra.lease import Leases
from rota.infra.redis import RedisKeys
from rota.infra.service import Service, Supervisor
from rota.model.agents import AgentSpec
from rota.model.schedules import IntervalSchedule, OneTimeSchedule
from rota.model.settings import Settings
from tests.support.queue import sql

HOUR_MS = 3_600_000
HISTORY = sql("""
SELECT run, outcome, failure, error, replica, took_ms, (extract(epoch FROM ts_due) * 1000)::bigint AS due_ms,
       (extract(epoch FROM ts_started) * 1000)::bigint AS started_ms
FROM rota.agent_run WHERE name = $1 ORDER BY ts_started, run""")
ROW = sql("""
SELECT a.*, (extract(epoch FROM a.ts_due) * 1000)::bigint AS due_ms, r.run AS running, r.quarantined
FROM rota.agent a LEFT JOIN rota.agent_running r ON r.name = a.name WHERE a.name = $1""")
RUNNING = sql("SELECT name FROM rota.agent_running ORDER BY name")


def changed(settings, **changes):
    """Settings with `path__to__leaf=value`."""
    for path, value in changes.items():
        settings = _set(settings, path.split("__"), value)
    return settings


def _set(section, path, value):
    if len(path) > 1:
        value = _set(getattr(section, path[0]), path[1:], value)
    return msgspec.structs.replace(section, **{path[0]: value})


def every(interval_ms, body, **more):
    return {"schedule": IntervalSchedule(interval_ms), "body": body, **more}


def once(at_ms, body, **more):
    return {"schedule": OneTimeSchedule(at_ms), "body": body, **more}


class RunRecorder:
    """Agent bodies that record their runs and detect overlaps."""

    def __init__(self):
        self.runs = []
        self.inside = {}
        self.overlaps = []
        self.gates = {}

    def count(self, name):
        return sum(run.name == name for run in self.runs)

    def _enter(self, run):
        self.runs.append(run)
        self.inside[run.name] = self.inside.get(run.name, 0) + 1
        if self.inside[run.name] > 1:
            self.overlaps.append(run.name)

    async def quick(self, run):
        self._enter(run)
        try:
            await asyncio.sleep(0)
        finally:
            self.inside[run.name] -= 1

    async def hang(self, run):
        self._enter(run)
        try:
            await self.gates.setdefault(run.name, asyncio.Event()).wait()
        finally:
            self.inside[run.name] -= 1

    async def stubborn(self, run):
        """Ignores cancellations until its gate opens, or until the third one, so that a failed test ends."""
        self._enter(run)
        gate = self.gates.setdefault(run.name, asyncio.Event())
        for _ in range(3):
            try:
                await gate.wait()
                break
            except asyncio.CancelledError:
                continue
        self.inside[run.name] -= 1

    def failing(self, *errors):
        """Raises each error in turn, then succeeds."""
        left = list(errors)

        async def body(run):
            self._enter(run)
            self.inside[run.name] -= 1
            if left:
                raise left.pop(0)

        return body


def ignore(*_given, **_named):
    """For a callback that a test does not look at."""


def no_lease():
    """`lease_until` of runs that no lease bounds."""
    return float("inf")


class Pod:
    """One replica that runs agents."""

    def __init__(
        self,
        database,
        redis,
        *,
        name="pod",
        settings=None,
        lease_s=10.0,
        hook=None,
        clock=None,
        publish_event=ignore,
        **agents,
    ):
        self.database = database
        self.redis = redis
        self.abandoned = []
        wanted = {"scheduler__interval_ms": 50, **(settings or {})}
        self.settings = changed(Settings(), **{f"redis__{path}": value for path, value in wanted.items()})
        self.declared = [self._declared(agent, dict(given)) for agent, given in agents.items()]
        self.agents = AgentScheduler(
            self.settings,
            database,
            redis,
            self._load,
            AgentMembership(Leases(database, name), clock=clock, lease_s=lease_s, abandon=self.abandoned.append),
            publish_event,
            hook,
        )
        self.service = Service("agents", self.agents.run)
        self.supervisor = Supervisor(drain_budget_s=10.0)
        self.supervisor.add(self.service)
        self._open = AsyncExitStack()

    async def __aenter__(self):
        await self._open.enter_async_context(self.supervisor.running())
        return self

    async def __aexit__(self, *failure):
        await self.stop()

    async def stop(self):
        await self._open.aclose()

    async def _load(self):
        return self.declared

    @staticmethod
    def _declared(name, given):
        body = given.pop("body")
        return DeclaredAgent(AgentSpec(name=name.replace("_", "-"), **given), body)


def sets_of(redis, group=""):
    return AgentIndex(redis, RedisKeys().agent_keys(group))


async def row(database, name):
    return await database.row(ROW, name)


async def history(database, name):
    return [dict(row.items()) for row in await database.rows(HISTORY, name)]


async def in_sets(redis, name, group=""):
    """Names of the Redis sets that contain the agent."""
    keys = RedisKeys().agent_keys(group)
    scores = await redis.zscore(keys.waiting, name), await redis.zscore(keys.working, name)
    return [which for which, score in zip(("waiting", "working"), scores, strict=True) if score is not None]


def now_ms():
    return int(time.time() * 1000)
