"""Polls a job until it ends, with a progress display on a terminal.

If the wait is interrupted, the job continues. The exit status says how the job ended (`rota.cli.core.exit_codes`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from rota.api.jobs import JobView, Layer
from rota.cli.core import output
from rota.cli.core.exit_codes import exit_code_of_job
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import CliPage
from rota.cli.jobs import view as jobs_view
from rota.cli.jobs.watch import JobProgressDisplay
from rota.cli.local.up import with_local_store
from rota.cli.quota.actions import print_page
from rota.engine.engine import store_target
from rota.engine.queries.jobs import FrameEnd, JobQueries
from rota.infra.blob_store import BlobStore
from rota.model.errors import BlobMissing, InvalidInput, NotEnded, SetupFailed
from rota.model.ids import JobId
from rota.model.job_states import FrameState, JobState
from rota.model.policy.outputs import read_refusal
from rota.model.settings import Settings
from rota.sdk.progress_bar import ProgressBar

POLL_INTERVAL_MIN_S: Final = 0.02
POLL_INTERVAL_MAX_S: Final = 0.25


async def wait_until_ended(
    jobs: JobQueries,
    which: JobId,
    settings: Settings,
    *,
    form: OutputFormat,
    within_s: float | None = None,
    display: ProgressBar | JobProgressDisplay | None = None,
) -> int:
    """Returns the exit status."""
    try:
        job = await _poll_until_ended(jobs, which, within_s, display or ProgressBar())
    except asyncio.CancelledError:
        output.print_stderr(f"Stopped waiting; the job continues: `rota job wait {which}`, `rota job cancel {which}`.")
        raise
    if not job.state.terminal:
        raise NotEnded(
            f"Job {which} has not ended within {within_s:g} s and is {job.state}: see `rota explain {which}`."
        )
    print_page(await _ended_page(jobs, job, settings), form=form)
    if not form.is_data and _is_one_frame(job) and job.layers[0].work.argv:
        from rota.cli.jobs import logs

        logs.write_logs(await logs.read_first_frame(jobs, which))
    return exit_code_of_job(job.state)


async def _poll_until_ended(
    jobs: JobQueries, which: JobId, within_s: float | None, display: ProgressBar | JobProgressDisplay
) -> JobView:
    """The job as it ended, or its state at the deadline."""
    deadline = None if within_s is None else time.monotonic() + within_s
    pause_s = POLL_INTERVAL_MIN_S
    with display:
        while True:
            job = await jobs.get(which)
            display.show(job)
            if job.state.terminal or (deadline is not None and time.monotonic() >= deadline):
                return job
            await asyncio.sleep(pause_s if deadline is None else min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(POLL_INTERVAL_MAX_S, pause_s * 2)


async def _ended_page(jobs: JobQueries, job: JobView, settings: Settings) -> CliPage:
    """Includes the return value when the job has a single frame."""
    failed = [end for layer in job.layers for end in await _failures(jobs, layer)]
    single = _is_one_frame(job) and job.state is JobState.SUCCEEDED
    layer = job.layers[0]
    values = (
        [await frame_value(jobs, job, layer, end, settings) for end in await jobs.frame_ends(layer.id)]
        if single
        else []
    )
    return jobs_view.ended_page(job, failed[:1], values)


def _is_one_frame(job: JobView) -> bool:
    return len(job.layers) == 1 and job.layers[0].frames.count == 1


async def _failures(jobs: JobQueries, layer: Layer) -> Sequence[tuple[Layer, FrameEnd]]:
    if not any(state.terminal and state is not FrameState.SUCCEEDED for state in layer.counts):
        return []
    return [(layer, end) for end in await jobs.frame_ends(layer.id, most=1000) if end.state is not FrameState.SUCCEEDED]


async def frame_value(
    jobs: JobQueries, job: JobView, layer: Layer, end: FrameEnd, settings: Settings
) -> jobs_view.FrameValue:
    refused = read_refusal(end.output, job.id, layer.frames.number(end.frame))
    if refused is not None:
        return jobs_view.FrameValue(problem=refused.sentence)
    if end.value is not None:
        return jobs_view.FrameValue(jobs_view.decode_value(end.value))
    if end.value_at is None:
        return jobs_view.FrameValue()
    store = BlobStore(jobs.database, store_target(with_local_store(settings)))
    try:
        return jobs_view.FrameValue(jobs_view.decode_value(await store.get(end.value_at)))
    except (BlobMissing, SetupFailed, InvalidInput) as error:
        return jobs_view.FrameValue(problem=error.sentence)
