"""`rota submit`, `rota jobs` and `rota job`, directly in PostgreSQL. Neither Redis nor NATS is needed.

A submission or a cancellation request is committed before anything is printed; servers do the rest, now or when one is
up. After a crash or a lost reply, a cancellation can be repeated as it is, and a submission with the same `--key`.
Waiting is polling: if it is interrupted, the job continues.
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
from rota.api.jobs import Layer
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
from rota.engine.queries.jobs import FrameEnd, JobFilter, JobQueries
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


def submit(settings: Settings, args: SubmitArgs, *, wait: bool, dry_run: bool, form: OutputFormat) -> int:
    return asyncio.run(_submit(settings, args, wait=wait, dry_run=dry_run, form=form))


async def _submit(settings: Settings, args: SubmitArgs, *, wait: bool, dry_run: bool, form: OutputFormat) -> int:
    submission = msgspec.structs.replace(
        build_submission(args, current_actor(), _resolve_task(settings, args)), principal=current_actor()
    )
    async with open_jobs(settings) as jobs:
        if args.after:
            after = tuple([await find_job(jobs, each) for each in args.after])
            submission = msgspec.structs.replace(submission, after=after)
        if dry_run:
            print_page(await dry_run_page(settings, jobs.database, submission), form=form)
            return 0
        [submitted] = await build_submitter(settings, jobs.database).submit([submission], may_be_critical=True)
        if args.task and not submitted.already:
            await _warn_unknown_task(jobs.database, args.task)
        if not wait:
            print_page(jobs_view.submitted_page(submitted, await jobs.get(submitted.job)), form=form)
            return 0
        _report_job_id(submitted)
        return await wait_until_ended(jobs, submitted.job, settings, form=form)


def _resolve_task(settings: Settings, args: SubmitArgs) -> Task[..., Any] | None:
    """The task as declared by `--app`, or by the app of the local `rota up` when that instance's servers are used."""
    up_info = None if settings.postgres.url else read_up_info(settings)
    if args.app or not args.task or up_info is None or not up_info.app:
        return load_declared_task(args)
    try:
        return load_declared_task(msgspec.structs.replace(args, app=up_info.app, app_folder=Path(up_info.folder)))
    except InvalidInput as error:
        if error.facts.get("kind") != "task":  # the task may belong to other workers
            output.print_stderr(
                f"The task {args.task} cannot be loaded, so its defaults do not apply: {error.sentence}"
            )
        return None


def _report_job_id(submitted: SubmitResult) -> None:
    verb = "Found" if submitted.already else "Submitted"
    output.print_stderr(f"{verb} job {submitted.job}.")


async def _warn_unknown_task(database: Database, task: str) -> None:
    """Warn only: a worker that has the task may start later."""
    registrations = [msgspec.msgpack.decode(row["hello"], type=Register) for row in await database.rows(WORKER_TASKS)]
    known = {name for registration in registrations for name in registration.tasks}
    if task in known or not registrations:
        return
    near = difflib.get_close_matches(task, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the workers have {', '.join(sorted(known)[:5]) or 'no task'}."
    output.print_stderr(f"No running worker has the task {task}: {hint}")


def wait_for_job(settings: Settings, prefix: str, timeout: str | None, *, watch: bool, form: OutputFormat) -> int:
    within_s = None if timeout is None else parse_duration(timeout)

    async def done() -> int:
        async with open_jobs(settings) as jobs:
            job, display = await find_job(jobs, prefix), JobProgressDisplay() if watch else None
            return await wait_until_ended(jobs, job, settings, form=form, within_s=within_s, display=display)

    return asyncio.run(done())


def parse_state(text: str | None) -> JobState | None:
    if text is None:
        return None
    name = text.upper().replace("-", "_")
    if name not in JobState.__members__:
        raise unknown_name_error("state", name, [state.value for state in JobState])
    return JobState[name]


async def list_jobs(jobs: JobQueries, job_filter: JobFilter, limit: int, after: str | None) -> CliPage:
    before = await find_job(jobs, after) if after else None
    return jobs_view.jobs_page(await jobs.list(job_filter, after=before, most=limit), limit)


def make_job_filter(
    show: str | None, state: str | None, topic: str | None, reason: str | None, label: str
) -> JobFilter:
    key, equals, value = label.partition("=")
    if label and not (key and equals):
        raise InvalidInput(f"{label[:64]!r} is not a valid label: use key=value.")
    return JobFilter(
        show=show, state=parse_state(state), topic=topic, reason=reason, label=(key, value) if label else None
    )


async def retry_job(settings: Settings, jobs: JobQueries, prefix: str, *, every_frame: bool) -> CliPage:
    job = await find_job(jobs, prefix)
    resubmitter = build_resubmitter(with_local_store(settings), Queue(jobs.database))
    async with jobs.database.transaction() as tx:
        result = await resubmitter.retry_job(job, every_frame=every_frame, by=current_actor(), on=tx)
        entry = AuditEntry(
            current_actor(), "job.retry", f"job:{job}", {"job": str(result.job), "frames": result.frames}
        )
        await audit.append(tx, [entry])
    return jobs_view.retried_page(result)


async def remediate_job(settings: Settings, jobs: JobQueries, prefix: str, remediation: str) -> CliPage:
    job = await find_job(jobs, prefix)
    resubmitter = build_resubmitter(with_local_store(settings), Queue(jobs.database))
    async with jobs.database.transaction() as tx:
        result = await resubmitter.remediate(job, remediation, by=current_actor(), on=tx)
        detail = {"job": str(result.job), "remediation": remediation}
        await audit.append(tx, [AuditEntry(current_actor(), "job.remediate", f"job:{job}", detail)])
    data = {"job": result.job, "remediation_of": result.old, "frames": result.frames}
    return CliPage(data, [f"Job {result.job} is job {result.old} with the remediation that its policy suggests."])


async def show_job(jobs: JobQueries, prefix: str) -> CliPage:
    job = await jobs.get(await find_job(jobs, prefix))
    return jobs_view.job_page(job, await jobs.artifact_totals([layer.id for layer in job.layers]))


async def show_results(jobs: JobQueries, prefix: str, settings: Settings, *, frame: int | None, limit: int) -> CliPage:
    """Values of succeeded frames and errors of failed ones; frames that returned nothing are only counted."""
    if not 1 <= limit <= RESULTS_MAX:
        raise InvalidInput(f"{limit} is not a valid number of results: use 1 to {RESULTS_MAX}.")
    job = await jobs.get(await find_job(jobs, prefix))
    found: list[tuple[Layer, FrameEnd, jobs_view.FrameValue]] = []
    for layer in job.layers:
        queue_number = 0 if frame is None else layer.frames.queue_number(frame)
        if queue_number is None:
            continue
        ends = await jobs.frame_ends(layer.id, frame=queue_number, most=1 if frame is not None else limit - len(found))
        selected = [end for end in ends if frame is None or end.frame == queue_number]
        found += [(layer, end, await frame_value(jobs, job, layer, end, settings)) for end in selected]
        if len(found) >= limit:
            break
    return jobs_view.results_page(job, found, limit)


async def cancel_jobs(jobs: JobQueries, prefixes: Sequence[str]) -> CliPage:
    found = [await find_job_unambiguous(jobs, prefix) for prefix in prefixes]
    requested = [await request_cancellation(jobs.database, job, current_actor()) for job in found]
    deadline = time.monotonic() + CANCEL_WAIT_S
    while True:
        ended = [await jobs.get(job) for job in found]
        if all(job.state.terminal for job in ended) or time.monotonic() >= deadline:
            return jobs_view.cancelled_page(ended, requested)
        await asyncio.sleep(POLL_INTERVAL_MAX_S / 5)
