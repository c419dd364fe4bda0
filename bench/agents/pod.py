"""One replica with many no-op agents, in a process of its own: `python -m bench.agents.pod NAME COUNT SPREAD_S`.

Agent `a<n>` has an interval of 30 to 60 s, the same in every replica; first runs are spread over SPREAD_S. The URLs
hold passwords, so they are found in the environment. Says `ready` when the first cycle may begin, and ends by SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from rota.agents.membership import AgentMembership
from rota.agents.registry import DeclaredAgent
from rota.agents.running import AgentRun
from rota.agents.scheduler import AgentScheduler
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.redis import RedisTarget, connect
from rota.infra.service import Lifecycle, Service, Supervisor, run_until_signalled
from rota.infra.telemetry import logs
from rota.model.agents import AgentSpec
from rota.model.schedules import IntervalSchedule
from rota.model.settings import Settings

SHORTEST_MS, LONGEST_MS = 30_000, 60_000
SPREAD_S = 60
"""The first runs are spread over as long: 10,000 agents that begin at one moment would stay in step for ever."""


def interval_ms(number: int) -> int:
    return SHORTEST_MS + number * 7919 % (LONGEST_MS - SHORTEST_MS)


def settings(max_concurrent: int = 1000, spread_s: int = SPREAD_S) -> Settings:
    plain = Settings()
    jitter = msgspec.structs.replace(plain.redis.scheduler.jitter, initial_registration_seconds=spread_s)
    scheduler = msgspec.structs.replace(plain.redis.scheduler, jitter=jitter)
    agent = msgspec.structs.replace(plain.redis.agent, max_concurrent_agents=max_concurrent)
    return msgspec.structs.replace(plain, redis=msgspec.structs.replace(plain.redis, scheduler=scheduler, agent=agent))


async def noop(_run: AgentRun) -> None:
    return None


def ignore_event(_kind: str, **_fields: object) -> None:
    return None


async def main(name: str, count: int, spread_s: int) -> int:
    database = await Database.open(PostgresTarget(url=os.environ["ROTA_BENCH_POSTGRES"]))
    redis = connect(RedisTarget(url=os.environ["ROTA_BENCH_REDIS"]))
    declared = [
        DeclaredAgent(AgentSpec(name=f"a{at}", schedule=IntervalSchedule(interval_ms(at))), noop) for at in range(count)
    ]

    async def all_of_them() -> list[DeclaredAgent]:
        return declared

    membership = AgentMembership(Leases(database, name))
    agents = AgentScheduler(settings(spread_s=spread_s), database, redis, all_of_them, membership, ignore_event)

    async def say(life: Lifecycle) -> None:
        print("ready", flush=True)
        life.ready()
        await life.until_draining()

    supervisor = Supervisor(start_timeout_s=120.0, drain_budget_s=20.0)
    supervisor.add(Service("agents", agents.run), Service("say", say))
    status = await run_until_signalled(supervisor)
    await redis.aclose()
    await database.close()
    return status


if __name__ == "__main__":
    logs.configure("console", "error")
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
