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
from rota.model.workflow_advance import new
from rota.model.workflow_check import Flow, FlowStep
from rota.model.workflow_run import DEPTH_MAX, RunNow, StepState
from rota.workflow.sagas import Sagas

RUNS = query(__package__, "rerun_runs")
ENTRIES = query(__package__, "rerun_entries")
TAKE_OVER = query(__package__, "rerun_take_over")

GOOD = (StepState.SUCCEEDED, StepState.SKIPPED, StepState.PASSED)
_NOW = msgspec.msgpack.Decoder(RunNow)


class Before(msgspec.Struct):
    """What the run before has done, as far as it can be undone."""

    undone: set[int] = set()
    """Steps that were."""
    left: dict[int, set[UUID]] = {}
    """By step, jobs that were not."""
    sagas: set[str] = set()
    """To which these belong."""
    held: dict[int, str] = {}
    """By step, the run that goes on with it."""


def rerun_from(flow: Flow, then: RunNow, step: str, undone: Collection[int] = ()) -> tuple[RunNow, set[int]]:
    """The state of a run that begins at a step, and the places that it takes over."""
    begins = flow.steps[flow.place(step)]
    if begins.owner >= 0:
        raise Refused(f"Step {step} belongs to {flow.steps[begins.owner].id}: run again from there.")
    anew = flow.after(begins.place).union(*(flow.after(place) for place in undone))
    now = new(flow)
    kept = {place for place, each in enumerate(then.steps) if place not in anew and each.state in GOOD}
    kept |= {each.place for each in flow.steps if each.place not in anew and _was_mended(flow, then, each, anew)}
    for place in kept:
        now.steps[place] = then.steps[place]
    return now, kept


def _was_mended(flow: Flow, then: RunNow, step: FlowStep, anew: Collection[int]) -> bool:
    """Whether whoever handles its failure has succeeded, or was mended, too, and is taken over with it."""
    if step.handler < 0 or step.handler in anew:
        return False
    handled = then.steps[step.handler].state
    if handled in GOOD:
        return handled is StepState.SUCCEEDED
    return _was_mended(flow, then, flow.steps[step.handler], anew)


async def look(tx: Transaction, run: RunId, then: RunNow) -> Before:
    """Locks the sagas that what a run did belongs to; Refused while one of them rolls back."""
    places = await _jobs(tx, then)
    before = Before()
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


async def take_over(
    tx: Transaction, sagas: Sagas, show: ShowId, run: RunId, before: Before, kept: Collection[int]
) -> None:
    """What undoes the steps that a new run has taken over is its own."""
    if held := [run for place, run in before.held.items() if place in kept]:
        raise Refused(f"The run {held[0]} goes on with what is to be taken over: wait until it has ended.")
    jobs = [job for place, left in before.left.items() if place in kept for job in left]
    if jobs:
        await tx.run(TAKE_OVER, show, str(run), jobs)
        sagas.tell(tx, [(show, str(run)), *((show, saga) for saga in before.sagas)])


async def _jobs(tx: Transaction, then: RunNow) -> Mapping[UUID, int]:
    """Jobs that steps ran last, those of runs that they started included, and of which step each is."""
    found = {step.job: place for place, step in enumerate(then.steps) if step.job is not None}
    wave = list(found)
    for _ in range(DEPTH_MAX + 1):
        rows = await tx.rows(RUNS, wave) if wave else []
        inner = [(row["pk_run"], _NOW.decode(row["steps"])) for row in rows]
        wave = []
        for run, now in inner:
            jobs = [step.job for step in now.steps if step.job is not None and step.job not in found]
            found.update(dict.fromkeys(jobs, found[run]))
            wave += jobs
    return found
