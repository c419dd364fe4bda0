"""A hundred thousand timers that are pending: how late those fire that become due, and how soon after a restart.

Ten thousand of them become due within ten seconds while a server runs; the others are due in a year. Then the server is
stopped, a thousand more become overdue, and it is started again: the restart is over when nothing fires late any more,
which timers tell that become due in the meantime. At last all hundred thousand are overdue when a server starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import msgspec

from bench.e2e.cpu import memory_mb
from bench.e2e.deployment import SHOW, Farm, farm, prepare
from bench.e2e.setup import Ground
from bench.report import Figure
from bench.server import opened, statement
from bench.workflow.race import POLL_S, desk_of
from rota.infra.postgres import Database
from rota.model.workflows.run_state import RunStatus, StepState, StepStatus
from rota.model.workflows.spec import StepSpec, WorkflowSpec

PENDING: Final = 100_000
DUE: Final = 10_000
DUE_S: Final = 10.0
OVERDUE: Final = 1_000
LATE_S: Final = 1.0
LEAD_S: Final = 3.0
WAIT_S: Final = 180.0
YEAR_S: Final = 366 * 86_400.0
DATABASE: Final = "timers_of_workflows"
FLOW: Final = WorkflowSpec(name="wait", show=SHOW, steps=(StepSpec(id="wait", type="delay", delay_sec=3600),))
STEPS: Final = msgspec.msgpack.encode(RunStatus([StepStatus(StepState.RUNNING, 1, None, "", timed=True)]))
NO_INPUT: Final = msgspec.msgpack.encode({})

MAKE = statement("""
WITH made AS (
  INSERT INTO rota.workflow_run (pk_run, pk_show, pk_workflow, state, steps, fence, input, pk_root)
  SELECT id, w.pk_show, w.pk_workflow, 'WAITING', $1::bytea, 1, $2::bytea, id
  FROM rota.workflow w, LATERAL (SELECT gen_random_uuid() AS id FROM generate_series(1, $3::int)) AS made
  WHERE w.name = 'wait' RETURNING pk_run
)
INSERT INTO rota.workflow_timer (pk_run, place, attempt, ts_due)
SELECT pk_run, 0, 1, clock_timestamp() + make_interval(secs => $4::float8 + random() * $5::float8) FROM made""")
LEFT = statement(
    "SELECT ts_due FROM rota.workflow_timer WHERE ts_due < now() + interval '1 day' ORDER BY ts_due LIMIT 1"
)
DUES = statement("SELECT pk_run, ts_due FROM rota.workflow_timer WHERE ts_due < now() + interval '1 day'")
BRING_FORWARD = statement("UPDATE rota.workflow_timer SET ts_due = clock_timestamp() - interval '1 hour'")
FIRED = statement("SELECT pk_run, at FROM rota.workflow_event WHERE fence = 1")
NOW = statement("SELECT clock_timestamp()")


@dataclass(slots=True)
class Timers:
    late_ms: list[float] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)
    catch_up_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        late = sorted(self.late_ms)
        p99 = [late[int(len(late) * 0.99)]] if late else []
        yield Figure("timer_lateness_p99_ms_100k", p99, bar=1000, note=f"{DUE} of {PENDING} pending due in {DUE_S:g} s")
        told = f"from spawning a server until nothing fires late; {OVERDUE} of {PENDING} pending are overdue"
        yield Figure("timer_restart_s_100k", self.restart_s, bar=5, note=told)
        yield Figure("timer_catch_up_s_100k", self.catch_up_s, note="the same, all of them overdue")
        yield Figure("timer_server_memory_mb_100k", self.memory_mb, note="resident, of a server with as many pending")


async def timers(ground: Ground) -> Timers:
    await prepare(ground, DATABASE)
    found = Timers()
    async with farm(ground, DATABASE, warm=100) as running:
        await desk_of(running).declare(FLOW, "bench")
        await _make(running.database, PENDING - DUE, YEAR_S)
        await _make(running.database, DUE, LEAD_S, DUE_S)
        dues = await _dues(running.database)
        await _until_fired(running.database)
        fired = await _fired(running.database)
        found.late_ms = [(fired[run] - due).total_seconds() * 1000 for run, due in dues.items()]
        found.memory_mb = [memory_mb(running.pids["server"])]
    async with opened(ground.postgres.url(DATABASE)) as database:
        await _make(database, OVERDUE, -60.0)
        await _make(database, OVERDUE, 0.0, DUE_S)
        found.restart_s = [await _late_for_s(ground, database)]
        await _make(database, DUE - OVERDUE, YEAR_S)
        await database.run(BRING_FORWARD)
        found.catch_up_s = [await _late_for_s(ground, database)]
    return found


async def _make(database: Database, n: int, in_s: float, within_s: float = 0.0) -> None:
    await database.run(MAKE, STEPS, NO_INPUT, n, in_s, within_s)


async def _dues(database: Database) -> dict[object, datetime]:
    return {row["pk_run"]: row["ts_due"] for row in await database.rows(DUES)}


async def _fired(database: Database) -> dict[object, datetime]:
    return {row["pk_run"]: row["at"] for row in await database.rows(FIRED)}


async def _late_for_s(ground: Ground, database: Database) -> float:
    """From spawning a server until the last timer that fired late."""
    dues = await _dues(database)
    began: datetime = await database.value(NOW)
    async with _firing(ground, database):
        fired = await _fired(database)
    late = [fired[run] for run, due in dues.items() if (fired[run] - due).total_seconds() > LATE_S]
    return (max(late) - began).total_seconds()


@asynccontextmanager
async def _firing(ground: Ground, database: Database) -> AsyncIterator[Farm]:
    firing = asyncio.create_task(_until_fired(database))
    async with farm(ground, DATABASE, warm=1) as running:
        await firing
        yield running


async def _until_fired(database: Database) -> None:
    async with asyncio.timeout(WAIT_S):
        while await database.value(LEFT):  # noqa: ASYNC110  of another process
            await asyncio.sleep(POLL_S)
