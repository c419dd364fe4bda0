"""`rota explain`: why a job is not running, or what a run waits for, as told from PostgreSQL alone. Words only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from rota.cli.books_view import Page
from rota.cli.dlq_view import several
from rota.cli.jobs_view import needs
from rota.cli.naming import find, find_run
from rota.engine.explain import Explainer
from rota.engine.explain_told import Cause, Explained, Holder, LayerTold
from rota.engine.jobs import Job, Jobs
from rota.infra.postgres import Database
from rota.model.ids import RunId
from rota.model.units import Centicores, format_cores, span
from rota.workflow.explain_told import RunExplained
from rota.workflow.explaining import RunExplainer

RUNNING_SHOWN: Final = 5


async def explained(jobs: Jobs, prefix: str, layer: str | None = None) -> Page:
    run = await find_run(jobs.database, prefix) if layer is None else None
    if run is not None:
        return await explained_run(jobs.database, run)
    which = await find(jobs, prefix)
    told = await Explainer(jobs.database).explain(which, layer=layer)
    lines = [*_ended(told)] if told.state.terminal else [*_live(told, await jobs.get(which))]
    return Page(msgspec.to_builtins(told), lines)


async def explained_run(database: Database, run: RunId) -> Page:
    told = await RunExplainer(Explainer(database)).explain(run)
    return Page(msgspec.to_builtins(told), [*_run(told)])


def _run(told: RunExplained) -> Iterator[str]:
    yield f"{told.workflow} {told.run}: {told.state}"
    if not told.reasons:
        yield f"  {told.sentence}"
    for reason in told.reasons:
        inside = f"(run {reason.run}) " if reason.run != told.run else ""
        yield f"  {reason.code}: {inside}{reason.sentence}"
        yield f"    {reason.remedy}"
    for job in told.jobs:
        if not job.state.terminal and job.reasons:
            yield f"  Job {job.job} ({job.name}) is {job.state}:"
            yield from (f"  {line}" for line in told_live(job, named=len(job.layers) > 1))


def _ended(told: Explained) -> Iterator[str]:
    yield f"{told.name} {told.job}: {told.state}"
    yield f"  {told.sentence}"


def _live(told: Explained, job: Job) -> Iterator[str]:
    each = "; ".join(f"{needs(layer)} per frame" for layer in job.layers)
    waiting = several(told.waiting, "frame")
    yield f"{told.name} {told.job}: {told.state}, {waiting} waiting, {told.on_workers} on workers ({each})."
    yield from told_live(told, named=len(job.layers) > 1)
    for run in told.running[:RUNNING_SHOWN]:
        since_s = (datetime.now(UTC) - run.since).total_seconds()
        yield f"  {several(run.frames, 'frame')} of {run.layer} on {run.worker}, the first for {span(since_s)}."
    if told.waiting and told.not_known:
        yield f"  (Not known here: {told.not_known}.)"


def told_live(told: Explained, *, named: bool) -> Iterator[str]:
    """What holds it, and when it starts; layers by name where there are several."""
    for reason in told.reasons:
        yield from _reason(reason, named=named)
    if not told.reasons:
        yield f"  {told.sentence}"
    for layer in told.layers:
        yield f"  {_start(layer, named=named)}"
    yield from _times(told)


def _times(told: Explained) -> Iterator[str]:
    """What ends it if it waits for too long."""
    if told.waiting and told.wait_until is not None:
        yield f"  It fails unless a frame of it starts within {_until(told.wait_until)}."
    if told.deadline_at is not None:
        yield f"  It must have ended in {_until(told.deadline_at)}, or is stopped."


def _until(at: datetime) -> str:
    return span(max(0.0, (at - datetime.now(UTC)).total_seconds()))


def _reason(reason: Cause, *, named: bool) -> Iterator[str]:
    where = f"{reason.layer}: " if reason.layer and named else ""
    yield f"  {reason.code}: {where}{reason.sentence}"
    if reason.holders:
        yield f"    in use by {_holders(reason.holders)}"
    yield f"    {reason.remedy}"


def _holders(holders: Sequence[Holder]) -> str:
    return ", ".join(f"{holder.name}{_amount(holder)}" for holder in holders)


def _amount(holder: Holder) -> str:
    if not holder.frames:
        return ""
    cores = format_cores(Centicores(round(holder.cores * 100)))
    gpus = f", {several(holder.gpus, 'GPU')}" if holder.gpus else ""
    return f" ({several(holder.frames, 'frame')}, {cores} {'core' if cores == '1' else 'cores'}{gpus})"


def _start(layer: LayerTold, *, named: bool) -> str:
    what = f"The next frame of {layer.name}" if named else "The next frame"
    if layer.start.in_s is None:
        return f"When it starts is not known: {layer.start.basis}."
    if not layer.start.in_s:
        return f"{what} starts within moments: {layer.start.basis}."
    return f"{what} starts in about {span(layer.start.in_s)}: {layer.start.basis}."
