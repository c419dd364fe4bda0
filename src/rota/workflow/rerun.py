"""Rerun: the steps and compensations that a new run takes over from an ended one.

A succeeded step has a compensation, or had one. Undone steps are not taken over: they run again, with every step after
them. The compensations of the others move to the new run, so that each is carried out once, with the rest of that run.
A rerun is refused while any of them is being carried out, and while another live run owns them: an earlier rerun, or
the root run of a child run. The ended run is locked first, so two reruns are serialised, and retention cannot delete it
meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from uuid import UUID

import msgspec

from rota.infra.postgres import Transaction, query
from rota.model.errors import Refused
from rota.model.ids import RunId, ShowId
from rota.model.workflows.compiler import CompiledStep, CompiledWorkflow
from rota.model.workflows.run_state import RUN_DEPTH_MAX, RunStatus, StepState
from rota.model.workflows.state_machine import new_run_status
from rota.workflow.sagas import Sagas

RUNS = query(__package__, "rerun_runs")
ENTRIES = query(__package__, "rerun_entries")
TRANSFER_ENTRIES = query(__package__, "rerun_take_over")

REUSABLE_STATES = (StepState.SUCCEEDED, StepState.SKIPPED, StepState.PASSED)
_RUN_STATUS_DECODER = msgspec.msgpack.Decoder(RunStatus)


class PriorCompensations(msgspec.Struct):
    """The state of the ended run's compensations."""

    undone: set[int] = set()
    """Steps that were undone."""
    left: dict[int, set[UUID]] = {}
    """By step, jobs that were not undone."""
    sagas: set[str] = set()
    """The sagas of these jobs."""
    held: dict[int, str] = {}
    """By step, the live run that owns its compensation."""


def rerun_from(
    flow: CompiledWorkflow, prior: RunStatus, step: str, undone: Collection[int] = ()
) -> tuple[RunStatus, set[int]]:
    """The status of a run that starts at a step, and the places that it takes over."""
    start = flow.steps[flow.index_of(step)]
    if start.owner >= 0:
        raise Refused(f"Step {step} belongs to {flow.steps[start.owner].id}: rerun from that step.")
    rerun_places = flow.after(start.place).union(*(flow.after(place) for place in undone))
    now = new_run_status(flow)
    reused = {
        place for place, each in enumerate(prior.steps) if place not in rerun_places and each.state in REUSABLE_STATES
    }
    reused |= {
        each.place
        for each in flow.steps
        if each.place not in rerun_places and _failure_was_handled(flow, prior, each, rerun_places)
    }
    for place in reused:
        now.steps[place] = prior.steps[place]
    return now, reused


def _failure_was_handled(
    flow: CompiledWorkflow, prior: RunStatus, step: CompiledStep, rerun_places: Collection[int]
) -> bool:
    """Whether its error handler succeeded, or that handler's failure was handled, and is taken over as well."""
    if step.handler < 0 or step.handler in rerun_places:
        return False
    handled = prior.steps[step.handler].state
    if handled in REUSABLE_STATES:
        return handled is StepState.SUCCEEDED
    return _failure_was_handled(flow, prior, flow.steps[step.handler], rerun_places)


async def lock_compensations(tx: Transaction, run: RunId, prior: RunStatus) -> PriorCompensations:
    """Lock the sagas with this run's compensations; Refused while one of them rolls back."""
    places = await _steps_by_job(tx, prior)
    before = PriorCompensations()
    for row in await tx.rows(ENTRIES, list(places)):
        place = places[row["last"]]
        if row["saga"] == "rolling_back":
            raise Refused(f"Run {run} is being rolled back: rerun it after the rollback has ended.")
        if row["state"] == "done":
            before.undone.add(place)
        elif row["state"] == "pending":
            before.left.setdefault(place, set()).add(row["pk_job"])
            before.sagas.add(row["workflow_id"])
            if row["goes_on"]:
                before.held[place] = row["workflow_id"]
    return before


async def transfer_compensations(
    tx: Transaction, sagas: Sagas, show: ShowId, run: RunId, before: PriorCompensations, reused: Collection[int]
) -> None:
    """Move the compensations of the steps taken over to the new run."""
    if held := [run for place, run in before.held.items() if place in reused]:
        raise Refused(f"Run {held[0]} is live and owns a compensation of these steps: wait until it has ended.")
    jobs = [job for place, left in before.left.items() if place in reused for job in left]
    if jobs:
        await tx.run(TRANSFER_ENTRIES, show, str(run), jobs)
        sagas.notify_after_commit(tx, [(show, str(run)), *((show, saga) for saga in before.sagas)])


async def _steps_by_job(tx: Transaction, prior: RunStatus) -> Mapping[UUID, int]:
    """The last jobs of each step, including those of child runs, and their steps."""
    found = {step.job: place for place, step in enumerate(prior.steps) if step.job is not None}
    wave = list(found)
    for _ in range(RUN_DEPTH_MAX + 1):
        rows = await tx.rows(RUNS, wave) if wave else []
        inner = [(row["pk_run"], _RUN_STATUS_DECODER.decode(row["steps"])) for row in rows]
        wave = []
        for run, now in inner:
            jobs = [step.job for step in now.steps if step.job is not None and step.job not in found]
            found.update(dict.fromkeys(jobs, found[run]))
            wave += jobs
    return found
