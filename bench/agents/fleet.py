"""Ten thousand agents on two replicas: whether they run on time, what that asks of Redis, and what a kill costs.

All of it is read from the books afterwards: due times, starts and outcomes as PostgreSQL has them, calls as Redis
counts them. A call is one that a client has sent; what scripts do inside of it is not counted again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import redis.asyncio

from bench.agents.pod import SPREAD_S
from bench.e2e.setup import Ground
from bench.report import Figure
from bench.server import opened, statement
from rota.infra.postgres import Database, migrate

AGENTS: Final = 10_000
REDIS: Final = 5
START_S: Final = 120.0
HOURS_S: Final = 36_000
DATABASE: Final = "agents_fleet"
CLIENT_COMMANDS: Final = ("evalsha", "eval", "set", "get", "script|load", "ping")

NOW = statement("SELECT clock_timestamp()")
RUNS = statement("""
SELECT count(*) AS runs, count(*) FILTER (WHERE ts_started < ts_due) AS early,
       coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM ts_started - ts_due)), 0)::float8 * 1000
         AS p99_ms
FROM rota.agent_run WHERE ts_started >= $1""")
MISSED = statement("""
SELECT coalesce(max(extract(epoch FROM apart) / (a.spec -> 'schedule' ->> 'interval_ms')::float8 * 1000 - 1), 0)::float8
FROM (SELECT name, coalesce(lead(ts_started) OVER (PARTITION BY name ORDER BY ts_started), clock_timestamp())
               - ts_started AS apart FROM rota.agent_run) AS gaps JOIN rota.agent a ON a.name = gaps.name""")
OVERLAPPED = statement("""
SELECT count(*) FROM (SELECT ts_started + make_interval(secs => took_ms / 1000.0) AS ended, outcome,
  lead(ts_started) OVER (PARTITION BY name ORDER BY ts_started) AS next FROM rota.agent_run) AS runs
WHERE next < ended AND outcome <> 'LOST'""")


@dataclass(slots=True)
class Fleet:
    early: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    calls_per_run: list[float] = field(default_factory=list)
    idle_calls_per_s: list[float] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        yield Figure("early_runs", self.early, bar=0, note="begun before they were due")
        yield Figure("lateness_p99_ms_10k", self.p99_ms, bar=1000, note="10,000 at 30 to 60 s on two replicas")
        yield Figure("redis_calls_per_run", self.calls_per_run, bar=0.2, note="of both replicas, at that load")
        yield Figure("idle_calls_per_s", self.idle_calls_per_s, bar=2, note="two replicas, none of 200 agents due")
        yield Figure(
            "missed_after_kill", self.missed, bar=1, note="intervals that the unluckiest waited beyond its own, kill -9"
        )
        yield Figure("overlaps", self.overlaps, bar=0, note="runs that began before the one before had ended")


async def fleet(ground: Ground, agents: int = AGENTS, load_s: float = 90.0) -> Fleet:
    found = Fleet()
    client = redis.asyncio.from_url(ground.redis_url(REDIS))
    try:
        async with _database(ground) as url:
            await _idle(ground, url, client, found)
        async with _database(ground) as url, opened(url) as database:
            await _loaded(ground, url, client, database, found, agents, load_s)
    finally:
        await client.aclose()
    return found


@asynccontextmanager
async def _database(ground: Ground) -> AsyncIterator[str]:
    url = await ground.postgres.create(DATABASE)
    try:
        await migrate(url)
        await ground.flush(REDIS)
        yield url
    finally:
        await ground.postgres.drop(DATABASE)


async def _idle(ground: Ground, url: str, client: redis.asyncio.Redis, found: Fleet, seconds: float = 20.0) -> None:
    """Agents wait for hours, or so they are told: what is left is what waiting costs."""
    async with _pod(ground, url, "one", 200, HOURS_S), _pod(ground, url, "two", 200, HOURS_S):
        await asyncio.sleep(seconds / 2)
        before = await _calls(client)
        await asyncio.sleep(seconds)
        found.idle_calls_per_s.append((await _calls(client) - before) / seconds)


async def _loaded(
    ground: Ground,
    url: str,
    client: redis.asyncio.Redis,
    database: Database,
    found: Fleet,
    agents: int,
    load_s: float,
) -> None:
    async with _pod(ground, url, "one", agents) as one, _pod(ground, url, "two", agents):
        await asyncio.sleep(SPREAD_S + 5)
        since, before = await database.value(NOW), await _calls(client)
        await asyncio.sleep(load_s)
        calls = await _calls(client) - before
        row = await database.row(RUNS, since)
        assert row is not None
        found.early.append(row["early"])
        found.p99_ms.append(row["p99_ms"])
        found.calls_per_run.append(calls / max(1, row["runs"]))
        one.kill()
        await asyncio.sleep(load_s)
        found.missed.append(await database.value(MISSED))
        found.overlaps.append(await database.value(OVERLAPPED))


async def _calls(client: redis.asyncio.Redis) -> int:
    stats = await client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in CLIENT_COMMANDS)


@asynccontextmanager
async def _pod(ground: Ground, url: str, name: str, agents: int, spread_s: int = SPREAD_S) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.agents.pod", name, str(agents), str(spread_s)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"ROTA_BENCH_POSTGRES": url, "ROTA_BENCH_REDIS": ground.redis_url(REDIS)},
    )
    assert process.stdout
    try:
        async with asyncio.timeout(START_S):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
