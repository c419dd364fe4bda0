"""The part of the demo that a workflow plays: of three things to book the last cannot be had, and all is undone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from rota.cli.demo_farm import ACTOR, DemoFarm, Seen
from rota.cli.demo_tasks import trip
from rota.cli.demo_view import Story
from rota.engine.jobs import Job
from rota.model.errors import RotaError
from rota.model.ids import JobId, RunId
from rota.model.workflow_run import RunState
from rota.model.workflow_views import Entry, Run, Saga
from rota.workflow.looking import Looking

LOOK_S: Final = 0.1
LONG_S: Final = 60.0
UNDONE: Final = [("hotel", "done"), ("flight", "done")]


async def tell(farm: DemoFarm, story: Story, look: Callable[[], Awaitable[Seen]]) -> None:
    desk, runs = farm.replica.workflows, Looking(farm.database)
    await desk.declare(trip.spec, ACTOR)
    began = time.monotonic()
    started = await desk.start(trip.spec.show, trip.name, {"city": "Oslo"}, actor=ACTOR)
    run = await _ended(runs, started.run, look)
    saga = await runs.saga(run.show_id, str(run.id))
    states = {step.id: step.state.value for step in run.steps}
    story.kept(
        states == {"flight": "SUCCEEDED", "hotel": "SUCCEEDED", "car": "FAILED"} and run.state is RunState.FAILED,
        "trip, a workflow, books a flight and a hotel, and there is no car left in Oslo: its run fails",
    )
    story.kept(
        saga is not None
        and [(each.step, each.state) for each in saga.entries] == UNDONE
        and await _in_order(farm, saga),
        f"both are given back, the last first: the hotel, then the flight ({time.monotonic() - began:.1f} s in all)",
    )


async def _ended(runs: Looking, run: RunId, look: Callable[[], Awaitable[Seen]]) -> Run:
    deadline = time.monotonic() + LONG_S
    while not (found := await runs.get(run)).state.ended:
        if time.monotonic() > deadline:
            raise RotaError(f"The demo waited {LONG_S:.0f} s in vain for a trip to end; please report it.")
        await look()
        await asyncio.sleep(LOOK_S)
    return found


async def _in_order(farm: DemoFarm, saga: Saga) -> bool:
    """Whether each was undone before the next began to be."""
    hotel, flight = [await _undo(farm, entry) for entry in saga.entries]
    assert hotel.finished_at is not None, "a saga that has ended waits for nothing"
    return hotel.finished_at <= flight.submitted_at


async def _undo(farm: DemoFarm, entry: Entry) -> Job:
    assert entry.undo is not None, "what is done was done by a job"
    return await farm.jobs.get(JobId(entry.undo))
