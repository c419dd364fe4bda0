"""What a run that begins at a step takes over from the one before it, and what undoes that.

Of a step that has succeeded there is something to undo, or there was. What was undone is not taken over: it runs again,
with all that comes after it. What undoes the others belongs to the new run, so that it is undone with the rest of it,
once. While any of it is being undone nobody knows what there is to take over, and a rerun is refused; so it is while
another run goes on with it, one that has taken it over before, or the outer one of a run inside a run. The run that has
ended is locked first, so two reruns of it come one after the other, and nobody forgets it meanwhile.
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
    """What the run before has done, as far as it can be undone."""

    undone: set[int] = set()
    """Steps that were."""
    left: dict[int, set[UUID]] = {}
    """By step, jobs that were not."""
    sagas: set[str] = set()
    """To which these belong."""
    held: dict[int, str] = {}
    """By step, the run that goes on with it."""


def rerun_from(
    flow: CompiledWorkflow, then: RunStatus, step: str, undone: Collection[int] = ()
) -> tuple[RunStatus, set[int]]:
    """The state of a run that begins at a step, and the places that it takes over."""
    begins = flow.steps[flow.index_of(step)]
    if begins.owner >= 0:
        raise Refused(f"Step {step} belongs to {flow.steps[begins.owner].id}: run again from there.")
    anew = flow.after(begins.place).union(*(flow.after(place) for place in undone))
    now = new_run_status(flow)
    kept = {place for place, each in enumerate(then.steps) if place not in anew and each.state in REUSABLE_STATES}
    kept |= {
        each.place for each in flow.steps if each.place not in anew and _failure_was_handled(flow, then, each, anew)
    }
    for place in kept:
        now.steps[place] = then.steps[place]
    return now, kept


def _failure_was_handled(flow: CompiledWorkflow, then: RunStatus, step: CompiledStep, anew: Collection[int]) -> bool:
    """Whether whoever handles its failure has succeeded, or was mended, too, and is taken over with it."""
    if step.handler < 0 or step.handler in anew:
        return False
    handled = then.steps[step.handler].state
    if handled in REUSABLE_STATES:
        return handled is StepState.SUCCEEDED
    return _failure_was_handled(flow, then, flow.steps[step.handler], anew)


async def lock_compensations(tx: Transaction, run: RunId, then: RunStatus) -> PriorCompensations:
    """Locks the sagas that what a run did belongs to; Refused while one of them rolls back."""
    places = await _steps_by_job(tx, then)
    before = PriorCompensations()
    for row in await tx.rows(ENTRIES, list(places)):
        place = places[row["last"]]
        if row["saga"] == "rolling_back":
            raise Refused(f"What run {run} did is being undone: run it again when that is over.")
        if row["state"] == "done":
            before.undone.add(place)
        elif row["state"] == "pending":
            before.left.setdefault(place, set()).add(row["pk_job"])
            before.sagas.add(row["workflow_id"])
            if row["goes_on"]:
                before.held[place] = row["workflow_id"]
    return before


async def transfer_compensations(
    tx: Transaction, sagas: Sagas, show: ShowId, run: RunId, before: PriorCompensations, kept: Collection[int]
) -> None:
    """What undoes the steps that a new run has taken over is its own."""
    if held := [run for place, run in before.held.items() if place in kept]:
        raise Refused(f"The run {held[0]} goes on with what is to be taken over: wait until it has ended.")
    jobs = [job for place, left in before.left.items() if place in kept for job in left]
    if jobs:
        await tx.run(TRANSFER_ENTRIES, show, str(run), jobs)
        sagas.notify_after_commit(tx, [(show, str(run)), *((show, saga) for saga in before.sagas)])


async def _steps_by_job(tx: Transaction, then: RunStatus) -> Mapping[UUID, int]:
    """Jobs that steps ran last, those of runs that they started included, and of which step each is."""
    found = {step.job: place for place, step in enumerate(then.steps) if step.job is not None}
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
