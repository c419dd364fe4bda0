"""Runs of workflows against DBOS Transact, in turn on one PostgreSQL: ten no-op steps in a row, and a hundred at once.

Rota runs as people run it, a server and a worker in processes of their own, and every step is a job with quotas and
placement; the peer runs its steps in its own process. Both clocks run from the first start to the last end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bench import peers
from bench.contender_process import Stopped, made, started
from bench.contenders.dbos_shape import SHAPE, STEPS, WIDTH
from bench.e2e.deployment import POOL, SHOW, Broken, Farm, farm, prepare
from bench.e2e.setup import Ground
from bench.report import Figure
from bench.server import statement
from rota.model.workflows.spec import StepSpec, WorkflowSpec
from rota.queue import Queue
from rota.workflow.advance_transaction import AdvanceTransaction
from rota.workflow.definitions import Definitions
from rota.workflow.executor import RunExecutor
from rota.workflow.notifier import UnpublishedRuns
from rota.workflow.run_commands import RunCommands
from rota.workflow.sagas import Sagas

PEER: Final = "dbos_workflows"
PEERS_NAME: Final = "dbos"
ROTA_MADE: Final = "made_rota_workflows"
DATABASE: Final = "lap_of_workflows"
BAR: Final = 5.0
START: Final = 250
POLL_S: Final = 0.02
LAP_TIMEOUT_S: Final = 120.0
LIVE = statement("SELECT pk_run FROM rota.workflow_run WHERE ts_ended IS NULL ORDER BY pk_run DESC LIMIT 1")
"""The youngest that has not ended: by index, and not by looking at all of them each time."""
ODD = statement("SELECT count(*) FROM rota.workflow_run WHERE state <> 'SUCCEEDED'")
SHAPES: Final = {
    "linear": WorkflowSpec(
        name="linear",
        show=SHOW,
        steps=tuple(
            StepSpec(id=f"s{at}", task="noop", topic=POOL, depends_on=(f"s{at - 1}",) if at else ())
            for at in range(STEPS)
        ),
    ),
    "fan": WorkflowSpec(
        name="fan",
        show=SHOW,
        steps=(StepSpec(id="all", task="noop", topic=POOL, for_each=list(range(WIDTH)), input={"n": "${item}"}),),
    ),
}
FRAMES: Final = {"linear": STEPS, "fan": WIDTH}


@dataclass(slots=True)
class WorkflowRace:
    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    absent: str = ""

    def figures(self) -> Iterator[Figure]:
        note = f"not measured: {self.absent}" if self.absent else f"DBOS Transact {peers.version(PEERS_NAME)}"
        for shape, told in (("linear", f"{STEPS} steps"), ("fan", f"{WIDTH} wide")):
            ours, theirs = self.ours.get(shape, []), self.theirs.get(shape, [])
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
            name = "fanout" if shape == "fan" else shape
            yield Figure(f"{name}_vs_dbos", ratios, bar=BAR, higher_is_better=True, note=note)
            yield Figure(f"{name}_runs_per_s", ours, note=f"{told}, one server and one worker")
            yield Figure(f"{name}_dbos_runs_per_s", theirs, note=f"{told}, in its own process")


async def race(ground: Ground, rounds: int, ours: dict[str, int], theirs: dict[str, int]) -> WorkflowRace:
    found = WorkflowRace(absent=peers.absence(PEERS_NAME) or "")
    await prepare(ground, ROTA_MADE)
    if not found.absent:
        url = await ground.postgres.create(made(PEER))
        async with started(PEER) as contender:
            await contender.ask("prepare", url)
    for _ in range(rounds):
        for shape in SHAPES:
            found.ours.setdefault(shape, []).append(await _ours(ground, shape, ours[shape]))
            if not found.absent:
                await _theirs(ground, found, shape, theirs[shape])
    return found


async def _ours(ground: Ground, shape: str, n: int) -> float:
    await ground.postgres.create(DATABASE, ROTA_MADE)
    try:
        async with farm(ground, DATABASE) as running:
            desk = desk_of(running)
            await desk.declare(SHAPES[shape], "bench")
            await lap(running, desk, shape, max(1, n // 10))
            return n / await lap(running, desk, shape, n)
    finally:
        await ground.postgres.drop(DATABASE)


def desk_of(running: Farm) -> RunCommands:
    sagas = Sagas(running.database, Queue(running.database).dead_letters, UnpublishedRuns())
    return RunCommands(
        RunExecutor(
            running.database,
            AdvanceTransaction(running.submitter, Definitions(running.database), sagas),
            UnpublishedRuns(),
        )
    )


async def lap(running: Farm, desk: RunCommands, shape: str, n: int) -> float:
    running.expect(n * FRAMES[shape])
    began = time.perf_counter()
    for first in range(0, n, START):
        await desk.start_many(SHOW, shape, [{}] * min(START, n - first), actor="bench")
    async with asyncio.timeout(LAP_TIMEOUT_S):
        while await running.database.value(LIVE):  # noqa: ASYNC110  of another process
            await asyncio.sleep(POLL_S)
    seconds = time.perf_counter() - began
    if odd := await running.database.value(ODD):
        raise Broken(f"{odd} runs did not succeed")
    return seconds


async def _theirs(ground: Ground, found: WorkflowRace, shape: str, n: int) -> None:
    url = await ground.postgres.create(DATABASE, made(PEER))
    os.environ[SHAPE] = shape
    try:
        async with started(PEER) as contender:
            await ground.postgres.checkpoint()
            found.theirs.setdefault(shape, []).append(n / await contender.ask("drain", url, n))
    except Stopped as stopped:
        found.absent = str(stopped)
    finally:
        await ground.postgres.drop(DATABASE)
