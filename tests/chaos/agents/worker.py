"""A worker's agents in a separate process with a short lease, which tests kill and pause. Prints `ready`.

python -m tests.chaos.agents.worker NAME; the environment has AGENTS, URL and REDIS, and optionally OFFSET_MS (error of
its clock), ENABLED (a name pattern) and ORPHANS (clean up orphans continuously).
"""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from rota.agents.membership import AgentMembership
from rota.infra.clock import SystemClock
from rota.infra.postgres import PostgresTarget
from rota.infra.redis import RedisTarget
from rota.infra.service import Service, Supervisor, run_until_signalled
from rota.infra.telemetry import logs
from rota.model.settings import Settings
from rota.runtime import build_submitter
from rota.sdk import load_app
from rota.worker.agents import runner
from tests.support.agents import changed, ignore

APP = "tests.support.run_trace_tasks:app"
LEASE_S = 1.0


class SkewedClock(SystemClock):
    """A system clock with an offset."""

    def now_ms(self):
        return super().now_ms() + int(os.environ.get("OFFSET_MS", "0"))


def settings():
    options = {"interval_ms": 50, "refresh_period_seconds": 1}
    options |= {"circuit_breaker__cooldown_ms": 500, "circuit_breaker__half_open_duration_ms": 100}
    if os.environ.get("ORPHANS"):
        options |= {"orphan_cleanup__threshold_ms": 0, "orphan_cleanup__interval_ms": 50}
        options |= {"orphan_cleanup__force_all_pods": True}
    found = changed(Settings(), **{f"redis__scheduler__{path}": value for path, value in options.items()})
    return changed(found, redis__agent__enabled_pattern=os.environ.get("ENABLED", ".*"))


async def main(name):
    runner.AgentMembership = partial(AgentMembership, lease_s=LEASE_S, clock=SkewedClock())
    configured = settings()
    app = load_app.load(APP, Path.cwd())
    service = runner.WorkerAgents(
        configured,
        runner.AgentApp(APP, Path.cwd(), app.recurring),
        PostgresTarget(url=os.environ["URL"]),
        RedisTarget(url=os.environ["REDIS"], op_timeout_s=1.0, connect_timeout_s=1.0),
        lambda database: build_submitter(configured, database),
        ignore,
        name,
    )

    async def print_ready(life):
        print("ready", flush=True)
        life.ready()
        await life.until_draining()

    supervisor = Supervisor(start_timeout_s=3600, drain_budget_s=20)
    supervisor.add(Service("agents", service.run), Service("say", print_ready))
    return await run_until_signalled(supervisor)


if __name__ == "__main__":
    logs.configure(level="warning")
    sys.exit(asyncio.run(main(*sys.argv[1:])))
