"""A process that runs agents; the tests kill, pause and crash it. Prints `ready` once it runs.

    python -m tests.integration.agents.agents_pod NAME LEASE_S WORK_MS AGENT=INTERVAL_MS …

Each run writes a `begin` and, `WORK_MS` later, an `end` to `rota.agent_note`, each only while PostgreSQL has it as the
current run: the run number serves as a fencing token.
"""

import asyncio
import os
import sys

from rota.infra.postgres import Database, PostgresTarget
from rota.infra.redis import RedisTarget, connect
from rota.infra.service import Service, run_until_signalled
from rota.infra.telemetry import logs
from tests.support.agents import Pod, every
from tests.support.queue import sql

MAKE_NOTES = sql(
    "CREATE TABLE rota.agent_note (n bigint GENERATED ALWAYS AS IDENTITY, name text, run bigint, what text)"
)
NOTE = sql("""
INSERT INTO rota.agent_note (name, run, what)
SELECT r.name, r.run, $3 FROM rota.agent_running r WHERE r.name = $1 AND r.run = $2 FOR UPDATE""")
NOTES = sql("SELECT name, run, what FROM rota.agent_note ORDER BY n")


async def main(name, lease_s, work_ms, *agents):
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    redis = connect(RedisTarget(url=os.environ["REDIS"], op_timeout_s=1.0, connect_timeout_s=1.0))

    async def body(run):
        await database.run(NOTE, run.name, run.run, "begin")
        await asyncio.sleep(float(work_ms) / 1000)
        await database.run(NOTE, run.name, run.run, "end")

    given = dict(each.split("=") for each in agents)
    declared = {agent: every(int(interval_ms), body) for agent, interval_ms in given.items()}
    breaker = "scheduler__circuit_breaker__"
    settings = {f"{breaker}cooldown_ms": 500, f"{breaker}half_open_duration_ms": 50}
    settings |= {"scheduler__refresh_period_seconds": 1}
    pod = Pod(database, redis, name=name, lease_s=float(lease_s), settings=settings, **declared)

    async def announce(life):
        print("ready", flush=True)
        life.ready()
        await life.until_draining()

    pod.supervisor.add(Service("announce", announce))
    status = await run_until_signalled(pod.supervisor)
    await redis.aclose()
    await database.close()
    return status


if __name__ == "__main__":
    logs.configure(level="warning")
    sys.exit(asyncio.run(main(*sys.argv[1:])))
