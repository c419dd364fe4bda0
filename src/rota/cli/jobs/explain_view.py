"""`rota explain`: formats why a job is not running or what a run waits for. The facts come from PostgreSQL alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from rota.api.explanation import Cause, Holder, JobExplanation, WaitingLayerView
from rota.api.jobs import JobView
from rota.api.run_explanation import RunExplanation
from rota.cli.core.resolve_ids import find_job, find_run
from rota.cli.core.tables import CliPage
from rota.cli.dlq.view import pluralize
from rota.cli.jobs.view import resources_text
from rota.engine.explain.explainer import Explainer
from rota.engine.queries.jobs import JobQueries
from rota.infra.postgres import Database
from rota.model.ids import RunId
from rota.model.units import Centicores, format_cores, humanize_duration
from rota.workflow.explain import RunExplainer

RUNNING_SHOWN_MAX: Final = 5


async def explain_page(jobs: JobQueries, prefix: str, layer: str | None = None) -> CliPage:
    run = await find_run(jobs.database, prefix) if layer is None else None
    if run is not None:
        return await explain_run_page(jobs.database, run)
    which = await find_job(jobs, prefix)
    explanation = await Explainer(jobs.database).explain(which, layer=layer)
    lines = (
        [*_ended_lines(explanation)]
        if explanation.state.terminal
        else [*_live_lines(explanation, await jobs.get(which))]
    )
    return CliPage(msgspec.to_builtins(explanation), lines)


async def explain_run_page(database: Database, run: RunId) -> CliPage:
    explanation = await RunExplainer(Explainer(database)).explain(run)
    return CliPage(msgspec.to_builtins(explanation), [*_run_lines(explanation)])


def _run_lines(explanation: RunExplanation) -> Iterator[str]:
    yield f"{explanation.workflow} {explanation.run}: {explanation.state}"
    if not explanation.reasons:
        yield f"  {explanation.sentence}"
    for reason in explanation.reasons:
        inside = f"(run {reason.run}) " if reason.run != explanation.run else ""
        yield f"  {reason.code}: {inside}{reason.sentence}"
        yield f"    {reason.remedy}"
    for job in explanation.jobs:
        if not job.state.terminal and job.reasons:
            yield f"  Job {job.job} ({job.name}) is {job.state}:"
            yield from (f"  {line}" for line in waiting_lines(job, named=len(job.layers) > 1))


def _ended_lines(explanation: JobExplanation) -> Iterator[str]:
    yield f"{explanation.name} {explanation.job}: {explanation.state}"
    yield f"  {explanation.sentence}"


def _live_lines(explanation: JobExplanation, job: JobView) -> Iterator[str]:
    each = "; ".join(f"{resources_text(layer)} per frame" for layer in job.layers)
    waiting = pluralize(explanation.waiting, "frame")
    head = f"{explanation.name} {explanation.job}: {explanation.state}"
    yield f"{head}, {waiting} waiting, {explanation.on_workers} on workers ({each})."
    yield from waiting_lines(explanation, named=len(job.layers) > 1)
    for run in explanation.running[:RUNNING_SHOWN_MAX]:
        age = humanize_duration((datetime.now(UTC) - run.since).total_seconds())
        yield f"  {pluralize(run.frames, 'frame')} of {run.layer} on {run.worker}, the first for {age}."
    if explanation.waiting and explanation.not_known:
        yield f"  (Unknown here: {explanation.not_known}.)"


def waiting_lines(explanation: JobExplanation, *, named: bool) -> Iterator[str]:
    """Reasons, remedies and the expected start; with layer names when `named`."""
    for reason in explanation.reasons:
        yield from _reason_lines(reason, named=named)
    if not explanation.reasons:
        yield f"  {explanation.sentence}"
    for layer in explanation.layers:
        yield f"  {_start_text(layer, named=named)}"
    yield from _deadline_lines(explanation)


def _deadline_lines(explanation: JobExplanation) -> Iterator[str]:
    """Deadlines that end the job."""
    if explanation.waiting and explanation.wait_until is not None:
        yield f"  It fails unless one of its frames starts within {_remaining_text(explanation.wait_until)}."
    if explanation.deadline_at is not None:
        yield f"  Its deadline is in {_remaining_text(explanation.deadline_at)}; it is then stopped."


def _remaining_text(at: datetime) -> str:
    return humanize_duration(max(0.0, (at - datetime.now(UTC)).total_seconds()))


def _reason_lines(reason: Cause, *, named: bool) -> Iterator[str]:
    where = f"{reason.layer}: " if reason.layer and named else ""
    yield f"  {reason.code}: {where}{reason.sentence}"
    if reason.holders:
        yield f"    in use by {_holders_text(reason.holders)}"
    yield f"    {reason.remedy}"


def _holders_text(holders: Sequence[Holder]) -> str:
    return ", ".join(f"{holder.name}{_usage_text(holder)}" for holder in holders)


def _usage_text(holder: Holder) -> str:
    if not holder.frames:
        return ""
    cores = format_cores(Centicores(round(holder.cores * 100)))
    gpus = f", {pluralize(holder.gpus, 'GPU')}" if holder.gpus else ""
    return f" ({pluralize(holder.frames, 'frame')}, {cores} {'core' if cores == '1' else 'cores'}{gpus})"


def _start_text(layer: WaitingLayerView, *, named: bool) -> str:
    what = f"The next frame of {layer.name}" if named else "The next frame"
    if layer.start.in_s is None:
        return f"The start time is unknown: {layer.start.basis}."
    if not layer.start.in_s:
        return f"{what} starts in a moment: {layer.start.basis}."
    return f"{what} starts in about {humanize_duration(layer.start.in_s)}: {layer.start.basis}."
