"""Rota's agents: one replica, all due at once, until the end of each run is committed."""

from __future__ import annotations

import asyncio
import os
import time

from bench.agents.pod import ignore_event, settings
from bench.contenders.serve import Body, Countdown, serve
from rota.agents.membership import AgentMembership
from rota.agents.registry import DeclaredAgent
from rota.agents.repository import AgentRepository
from rota.agents.running import AgentRun
from rota.agents.scheduler import AgentScheduler
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.infra.postgres.sql import parse_query
from rota.infra.redis import RedisTarget, connect
from rota.infra.service import Service, Supervisor
from rota.model.agents import AgentSpec
from rota.model.schedules import IntervalSchedule

HOUR_MS = 3_600_000
DECLARED_AT_ONCE = 1000
ENDED = parse_query("bench", "-- Benchmark.\nSELECT coalesce(sum(runs), 0)::bigint FROM rota.agent")


class RotaAgents:
    async def prepare(self, url: str) -> None:
        await migrate(url)

    async def fill(self, url: str, bodies: list[Body]) -> float:
        database = await Database.open(PostgresTarget(url=url))
        records, specs = AgentRepository(database, "bench"), _specs(len(bodies))
        now_ms = time.time_ns() // 1_000_000
        began = time.perf_counter()
        for first in range(0, len(specs), DECLARED_AT_ONCE):
            part = specs[first : first + DECLARED_AT_ONCE]
            await records.declare(part, now_ms, [0] * len(part))
        took_s = time.perf_counter() - began
        await database.close()
        return took_s

    async def drain(self, url: str, n: int) -> float:
        database = await Database.open(PostgresTarget(url=url))
        redis = connect(RedisTarget(url=os.environ["ROTA_BENCH_REDIS"]))
        await redis.flushdb()
        ran = Countdown(n)
        first: list[float] = []

        async def noop(_run: AgentRun) -> None:
            if not first:
                first.append(time.perf_counter())
            ran.tick()

        declared = [DeclaredAgent(spec, noop) for spec in _specs(n)]

        async def all_of_them() -> list[DeclaredAgent]:
            return declared

        supervisor = Supervisor(drain_budget_s=20.0)
        membership = AgentMembership(Leases(database, "bench"))
        agents = AgentScheduler(settings(), database, redis, all_of_them, membership, ignore_event)
        supervisor.add(Service("agents", agents.run))
        async with supervisor.running():
            await ran.finished()
            while await database.value(ENDED) < n:  # noqa: ASYNC110 - PostgreSQL tells nobody
                await asyncio.sleep(0.005)
            took_s = time.perf_counter() - first[0]
        await redis.aclose()
        await database.close()
        return took_s


def _specs(n: int) -> list[AgentSpec]:
    return [AgentSpec(name=f"agent-{at}", schedule=IntervalSchedule(HOUR_MS)) for at in range(n)]


if __name__ == "__main__":
    serve(RotaAgents())
