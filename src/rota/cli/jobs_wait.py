"""Waiting for a job to end: looking again and again, with a picture of how far it is where a person looks.

If it is interrupted the job goes on. The exit status tells how the job ended (`rota.cli.exits`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from rota.cli import jobs_view as view
from rota.cli import output
from rota.cli.books import print_page
from rota.cli.books_view import Page
from rota.cli.exits import of_job
from rota.cli.form import Form
from rota.cli.jobs_watch import Watching
from rota.cli.local import with_store
from rota.engine.engine import store_target
from rota.engine.jobs import FrameEnd, Job, Jobs, Layer
from rota.infra.store import Store
from rota.model.errors import BlobMissing, InvalidInput, NotEnded, SetupFailed
from rota.model.ids import JobId
from rota.model.lifecycle import FrameState, JobState
from rota.model.output import unreadable
from rota.model.settings import Settings
from rota.sdk.bar import Bar

FIRST_LOOK_S: Final = 0.02
LOOK_S: Final = 0.25


async def until_ended(
    jobs: Jobs,
    which: JobId,
    settings: Settings,
    *,
    form: Form,
    within_s: float | None = None,
    picture: Bar | Watching | None = None,
) -> int:
    """The exit status."""
    try:
        job = await _ended(jobs, which, within_s, picture or Bar())
    except asyncio.CancelledError:
        output.aside(f"Not waiting any more; the job goes on: `rota job wait {which}`, `rota job cancel {which}`.")
        raise
    if not job.state.terminal:
        raise NotEnded(f"Job {which} has not ended within {within_s:g} s, it is {job.state}: `rota explain {which}`.")
    print_page(await _ended_page(jobs, job, settings), form=form)
    if not form.is_data and _is_one_frame(job) and job.layers[0].work.argv:
        from rota.cli import jobs_logs

        jobs_logs.write(await jobs_logs.of_one_frame(jobs, which))
    return of_job(job.state)


async def _ended(jobs: Jobs, which: JobId, within_s: float | None, picture: Bar | Watching) -> Job:
    """The job as it ended, or as it is when the time is over."""
    deadline = None if within_s is None else time.monotonic() + within_s
    pause_s = FIRST_LOOK_S
    with picture:
        while True:
            job = await jobs.get(which)
            picture.show(job)
            if job.state.terminal or (deadline is not None and time.monotonic() >= deadline):
                return job
            await asyncio.sleep(pause_s if deadline is None else min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(LOOK_S, pause_s * 2)


async def _ended_page(jobs: Jobs, job: Job, settings: Settings) -> Page:
    """With what it returned, when that is one value."""
    failed = [end for layer in job.layers for end in await _failures(jobs, layer)]
    single = _is_one_frame(job) and job.state is JobState.SUCCEEDED
    layer = job.layers[0]
    values = [await value_of(jobs, job, layer, end, settings) for end in await jobs.ends(layer.id)] if single else []
    return view.ended_page(job, failed[:1], values)


def _is_one_frame(job: Job) -> bool:
    return len(job.layers) == 1 and job.layers[0].frames.count == 1


async def _failures(jobs: Jobs, layer: Layer) -> Sequence[tuple[Layer, FrameEnd]]:
    if not any(state.terminal and state is not FrameState.SUCCEEDED for state in layer.counts):
        return []
    return [(layer, end) for end in await jobs.ends(layer.id, most=1000) if end.state is not FrameState.SUCCEEDED]


async def value_of(jobs: Jobs, job: Job, layer: Layer, end: FrameEnd, settings: Settings) -> view.Value:
    refused = unreadable(end.output, job.id, layer.frames.number(end.frame))
    if refused is not None:
        return view.Value(problem=refused.sentence)
    if end.value is not None:
        return view.Value(view.decoded(end.value))
    if end.value_at is None:
        return view.Value()
    store = Store(jobs.database, store_target(with_store(settings)))
    try:
        return view.Value(view.decoded(await store.get(end.value_at)))
    except (BlobMissing, SetupFailed, InvalidInput) as error:
        return view.Value(problem=error.sentence)
