"""Workflow scenario of the demo: the last of three bookings fails, and the others are compensated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from rota.api.jobs import JobView
from rota.api.workflows import SagaEntryView, SagaView, WorkflowRunView
from rota.demo.stack import ACTOR, DemoSnapshot, DemoStack
from rota.demo.tasks import trip
from rota.demo.view import DemoReport
from rota.model.errors import RotaError
from rota.model.ids import JobId, RunId
from rota.model.workflows.run_state import RunState
from rota.workflow.run_queries import RunQueries

POLL_INTERVAL_S: Final = 0.1
WAIT_TIMEOUT_S: Final = 60.0
EXPECTED_COMPENSATIONS: Final = [("hotel", "done"), ("flight", "done")]


async def run_saga_scenario(
    cluster: DemoStack, report: DemoReport, observe: Callable[[], Awaitable[DemoSnapshot]]
) -> None:
    workflows, runs = cluster.replica.workflows, RunQueries(cluster.database)
    await workflows.declare(trip.spec, ACTOR)
    began = time.monotonic()
    started = await workflows.start(trip.spec.show, trip.name, {"city": "Oslo"}, actor=ACTOR)
    run = await _wait_until_ended(runs, started.run, observe)
    saga = await runs.saga(run.show_id, str(run.id))
    states = {step.id: step.state.value for step in run.steps}
    report.check(
        states == {"flight": "SUCCEEDED", "hotel": "SUCCEEDED", "car": "FAILED"} and run.state is RunState.FAILED,
        "the workflow trip books a flight and a hotel, but there is no car in Oslo: its run fails",
    )
    report.check(
        saga is not None
        and [(each.step, each.state) for each in saga.entries] == EXPECTED_COMPENSATIONS
        and await _undone_in_order(cluster, saga),
        f"both are compensated, the last first: the hotel, then the flight ({time.monotonic() - began:.1f} s in total)",
    )


async def _wait_until_ended(
    runs: RunQueries, run: RunId, observe: Callable[[], Awaitable[DemoSnapshot]]
) -> WorkflowRunView:
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while not (found := await runs.get(run)).state.ended:
        if time.monotonic() > deadline:
            raise RotaError(
                f"The demo waited {WAIT_TIMEOUT_S:.0f} s for a trip to end without success: please report it."
            )
        await observe()
        await asyncio.sleep(POLL_INTERVAL_S)
    return found


async def _undone_in_order(cluster: DemoStack, saga: SagaView) -> bool:
    """Whether each compensation finished before the next started."""
    hotel, flight = [await _compensation_job(cluster, entry) for entry in saga.entries]
    assert hotel.finished_at is not None, "the compensations of an ended saga have ended"
    return hotel.finished_at <= flight.submitted_at


async def _compensation_job(cluster: DemoStack, entry: SagaEntryView) -> JobView:
    assert entry.undo is not None, "a done compensation has a job"
    return await cluster.jobs.get(JobId(entry.undo))
