"""A hundred thousand timers that are pending: how late those fire that become due, and how soon after a restart.

Ten thousand of them become due within ten seconds while a server runs; the others are due in a year. Then the server is
stopped, a thousand more become overdue, and it is started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from bench.e2e_farm import SHOW, farm, prepare
from bench.e2e_ground import Ground
from bench.report import Figure
from bench.server import opened, statement
from bench.workflow_race import POLL_S, desk_of
from rota.infra.postgres import Database
from rota.model.workflow import StepSpec, WorkflowSpec
from rota.model.workflow_run import RunNow, StepNow, StepState

PENDING: Final = 100_000
DUE: Final = 10_000
DUE_S: Final = 10.0
OVERDUE: Final = 1_000
LEAD_S: Final = 3.0
WAIT_S: Final = 120.0
DATABASE: Final = "timers_of_workflows"
FLOW: Final = WorkflowSpec(name="wait", show=SHOW, steps=(StepSpec(id="wait", type="delay", delay_sec=3600),))

MAKE = statement("""
WITH made AS (
  INSERT INTO rota.workflow_run (pk_run, pk_show, pk_workflow, state, steps, fence, input, pk_root)
  SELECT id, w.pk_show, w.pk_workflow, 'WAITING', $1::bytea, 1, $2::bytea, id
  FROM rota.workflow w, LATERAL (SELECT gen_random_uuid() AS id FROM generate_series(1, $3::int)) AS made
  WHERE w.name = 'wait' RETURNING pk_run
)
INSERT INTO rota.workflow_timer (pk_run, place, attempt, ts_due)
SELECT pk_run, 0, 1, clock_timestamp() + make_interval(secs => $4::float8 + random() * $5::float8) FROM made""")
LEFT = statement("SELECT count(*) FROM rota.workflow_timer WHERE ts_due < now() + interval '1 day'")
DUES = statement("SELECT pk_run, ts_due FROM rota.workflow_timer WHERE ts_due < now() + interval '1 day'")
FIRED = statement("SELECT pk_run, at FROM rota.workflow_event WHERE fence = 1")


@dataclass(slots=True)
class Timers:
    late_ms: list[float] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        late = sorted(self.late_ms)
        p99 = [late[int(len(late) * 0.99)]] if late else []
        yield Figure("timer_lateness_p99_ms_100k", p99, bar=1000, note=f"{DUE} of {PENDING} pending due in {DUE_S:g} s")
        yield Figure(
            "timer_restart_s_100k", self.restart_s, bar=5, note=f"{OVERDUE} overdue, from the start of the server"
        )


async def timers(ground: Ground) -> Timers:
    await prepare(ground, DATABASE)
    found = Timers()
    steps = msgspec.msgpack.encode(RunNow([StepNow(StepState.RUNNING, 1, None, "", timed=True)]))
    given = msgspec.msgpack.encode({})
    async with farm(ground, DATABASE, warm=100) as running:
        await desk_of(running).declare(FLOW, "bench")
        await running.database.run(MAKE, steps, given, PENDING - DUE, 366 * 86_400.0, 0.0)
        await running.database.run(MAKE, steps, given, DUE, LEAD_S, DUE_S)
        dues = {row["pk_run"]: row["ts_due"] for row in await running.database.rows(DUES)}
        await _until_fired(running.database)
        fired = await running.database.rows(FIRED)
        found.late_ms = [
            (row["at"] - dues[row["pk_run"]]).total_seconds() * 1000 for row in fired if row["pk_run"] in dues
        ]
    async with opened(ground.postgres.url(DATABASE)) as database:
        await database.run(MAKE, steps, given, OVERDUE, -60.0, 0.0)
        began = time.perf_counter()
        firing = asyncio.create_task(_until_fired(database))
        firing.add_done_callback(lambda _: found.restart_s.append(time.perf_counter() - began))
        async with farm(ground, DATABASE, warm=1):
            await firing
    return found


async def _until_fired(database: Database) -> None:
    async with asyncio.timeout(WAIT_S):
        while await database.value(LEFT):  # noqa: ASYNC110  of another process
            await asyncio.sleep(POLL_S)
