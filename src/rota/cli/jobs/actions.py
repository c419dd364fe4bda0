"""`rota submit`, `rota jobs` and `rota job`: jobs as people handle them, straight in PostgreSQL.

Neither Redis nor NATS need be there. A submission, or the mark that a job is to be cancelled, is committed before
anything is printed; servers do the rest, now or when one is up. Whoever dies, or loses the reply, after a mark may give
the same command again; a submission may be given again with the same `--key`. Waiting is looking: if it is interrupted
the job goes on.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from rota.accounting.resources import unknown_name_error
from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import find_job, find_job_unambiguous
from rota.cli.core.tables import CliPage
from rota.cli.db import commands as db_commands
from rota.cli.jobs import view as jobs_view
from rota.cli.jobs.dry_run import dry_run_page
from rota.cli.jobs.submit_args import SubmitArgs, build_submission, load_declared_task
from rota.cli.jobs.wait import POLL_INTERVAL_MAX_S, frame_value, wait_until_ended
from rota.cli.jobs.watch import JobProgressDisplay
from rota.cli.local.up import read_up_info, with_local_store
from rota.cli.quota.actions import current_actor, print_page
from rota.engine.completion.canceller import request_cancellation
from rota.engine.queries.jobs import FrameEnd, JobFilter, JobQueries, Layer
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, check_current, query
from rota.model.errors import InvalidInput
from rota.model.job_states import JobState
from rota.model.jobs.submission import SubmitResult
from rota.model.protocol import Register
from rota.model.settings import Settings
from rota.model.units import parse_duration
from rota.queue import Queue
from rota.runtime import build_resubmitter, build_submitter
from rota.sdk.task import Task

WORKER_TASKS = query(__package__, "jobs_tasks")

CANCEL_WAIT_S: Final = 5.0
RESULTS_MAX: Final = 10_000


@asynccontextmanager
async def open_jobs(settings: Settings) -> AsyncIterator[JobQueries]:
    async with db_commands.open_database(settings) as database:
        await check_current(database)
        yield JobQueries(database)


def run(settings: Settings, work: Callable[[JobQueries], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with open_jobs(settings) as jobs:
            return await work(jobs)

    print_page(asyncio.run(done()), form=form)


def submit(settings: Settings, wanted: SubmitArgs, *, wait: bool, dry_run: bool, form: OutputFormat) -> int:
    return asyncio.run(_submit(settings, wanted, wait=wait, dry_run=dry_run, form=form))


async def _submit(settings: Settings, wanted: SubmitArgs, *, wait: bool, dry_run: bool, form: OutputFormat) -> int:
    given = msgspec.structs.replace(
        build_submission(wanted, current_actor(), _resolve_task(settings, wanted)), principal=current_actor()
    )
    async with open_jobs(settings) as jobs:
        if wanted.after:
            after = tuple([await find_job(jobs, each) for each in wanted.after])
            given = msgspec.structs.replace(given, after=after)
        if dry_run:
            print_page(await dry_run_page(settings, jobs.database, given), form=form)
            return 0
        [submitted] = await build_submitter(settings, jobs.database).submit([given], may_be_critical=True)
        if wanted.task and not submitted.already:
            await _warn_unknown_task(jobs.database, wanted.task)
        if not wait:
            print_page(jobs_view.submitted_page(submitted, await jobs.get(submitted.job)), form=form)
            return 0
        _report_job_id(submitted)
        return await wait_until_ended(jobs, submitted.job, settings, form=form)


def _resolve_task(settings: Settings, wanted: SubmitArgs) -> Task[..., Any] | None:
    """As the app says that is named, or the one of the `rota up` whose servers are used."""
    told = None if settings.postgres.url else read_up_info(settings)
    if wanted.app or not wanted.task or told is None or not told.app:
        return load_declared_task(wanted)
    try:
        return load_declared_task(msgspec.structs.replace(wanted, app=told.app, app_folder=Path(told.folder)))
    except InvalidInput as error:
        if error.facts.get("kind") != "task":  # a task of other workers is no news
            output.print_stderr(f"What {wanted.task} declares that it needs is not known here: {error.sentence}")
        return None


def _report_job_id(submitted: SubmitResult) -> None:
    word = "Found" if submitted.already else "Submitted"
    output.print_stderr(f"{word} job {submitted.job}.")


async def _warn_unknown_task(database: Database, task: str) -> None:
    """Not refused: a worker that knows it may come later."""
    hellos = [msgspec.msgpack.decode(row["hello"], type=Register) for row in await database.rows(WORKER_TASKS)]
    known = {name for hello in hellos for name in hello.tasks}
    if task in known or not hellos:
        return
    near = difflib.get_close_matches(task, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"they have {', '.join(sorted(known)[:5]) or 'no task'}."
    output.print_stderr(f"No worker that is up knows the task {task}: {hint}")


def wait_for_job(settings: Settings, prefix: str, timeout: str | None, *, watch: bool, form: OutputFormat) -> int:
    within_s = None if timeout is None else parse_duration(timeout)

    async def done() -> int:
        async with open_jobs(settings) as jobs:
            job, picture = await find_job(jobs, prefix), JobProgressDisplay() if watch else None
            return await wait_until_ended(jobs, job, settings, form=form, within_s=within_s, picture=picture)

    return asyncio.run(done())


def parse_state(text: str | None) -> JobState | None:
    if text is None:
        return None
    word = text.upper().replace("-", "_")
    if word not in JobState.__members__:
        raise unknown_name_error("state", word, [state.value for state in JobState])
    return JobState[word]


async def list_jobs(jobs: JobQueries, wanted: JobFilter, limit: int, after: str | None) -> CliPage:
    before = await find_job(jobs, after) if after else None
    return jobs_view.jobs_page(await jobs.list(wanted, after=before, most=limit), limit)


def make_job_filter(
    show: str | None, state: str | None, topic: str | None, reason: str | None, label: str
) -> JobFilter:
    key, equals, value = label.partition("=")
    if label and not (key and equals):
        raise InvalidInput(f"{label[:64]!r} is no label; write key=value.")
    return JobFilter(
        show=show, state=parse_state(state), topic=topic, reason=reason, label=(key, value) if label else None
    )


async def retry_job(settings: Settings, jobs: JobQueries, prefix: str, *, every_frame: bool) -> CliPage:
    job = await find_job(jobs, prefix)
    reopener = build_resubmitter(with_local_store(settings), Queue(jobs.database))
    async with jobs.database.transaction() as tx:
        made = await reopener.retry_job(job, every_frame=every_frame, by=current_actor(), on=tx)
        entry = AuditEntry(current_actor(), "job.retry", f"job:{job}", {"job": str(made.job), "frames": made.frames})
        await audit.append(tx, [entry])
    return jobs_view.retried_page(made)


async def remediate_job(settings: Settings, jobs: JobQueries, prefix: str, remediation: str) -> CliPage:
    job = await find_job(jobs, prefix)
    reopener = build_resubmitter(with_local_store(settings), Queue(jobs.database))
    async with jobs.database.transaction() as tx:
        made = await reopener.remediate(job, remediation, by=current_actor(), on=tx)
        detail = {"job": str(made.job), "remediation": remediation}
        await audit.append(tx, [AuditEntry(current_actor(), "job.remediate", f"job:{job}", detail)])
    data = {"job": made.job, "remediation_of": made.old, "frames": made.frames}
    return CliPage(data, [f"Job {made.job} is job {made.old} in the way its policy suggests."])


async def show_job(jobs: JobQueries, prefix: str) -> CliPage:
    job = await jobs.get(await find_job(jobs, prefix))
    return jobs_view.job_page(job, await jobs.artifact_totals([layer.id for layer in job.layers]))


async def show_results(jobs: JobQueries, prefix: str, settings: Settings, *, frame: int | None, limit: int) -> CliPage:
    """What its frames returned, and why those failed that did; frames that returned nothing are only counted."""
    if not 1 <= limit <= RESULTS_MAX:
        raise InvalidInput(f"{limit} is no number of results: give 1 to {RESULTS_MAX}.")
    job = await jobs.get(await find_job(jobs, prefix))
    found: list[tuple[Layer, FrameEnd, jobs_view.FrameValue]] = []
    for layer in job.layers:
        place = 0 if frame is None else layer.frames.queue_number(frame)
        if place is None:
            continue
        ends = await jobs.frame_ends(layer.id, frame=place, most=1 if frame is not None else limit - len(found))
        wanted = [end for end in ends if frame is None or end.frame == place]
        found += [(layer, end, await frame_value(jobs, job, layer, end, settings)) for end in wanted]
        if len(found) >= limit:
            break
    return jobs_view.results_page(job, found, limit)


async def cancel_jobs(jobs: JobQueries, prefixes: Sequence[str]) -> CliPage:
    found = [await find_job_unambiguous(jobs, prefix) for prefix in prefixes]
    marked = [await request_cancellation(jobs.database, job, current_actor()) for job in found]
    deadline = time.monotonic() + CANCEL_WAIT_S
    while True:
        ended = [await jobs.get(job) for job in found]
        if all(job.state.terminal for job in ended) or time.monotonic() >= deadline:
            return jobs_view.cancelled_page(ended, marked)
        await asyncio.sleep(POLL_INTERVAL_MAX_S / 5)
