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

from rota.accounting.items import unknown
from rota.cli import db, output
from rota.cli import jobs_view as view
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page
from rota.cli.form import Form
from rota.cli.jobs_dry_run import rehearsed
from rota.cli.jobs_wait import LOOK_S, until_ended, value_of
from rota.cli.jobs_wanted import Wanted, declared, submission
from rota.cli.jobs_watch import Watching
from rota.cli.local import local_up, with_store
from rota.cli.naming import find, find_for_good
from rota.engine.ender import mark_cancelled
from rota.engine.jobs import FrameEnd, JobFilter, Jobs, Layer
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, check_current, query
from rota.model.errors import InvalidInput
from rota.model.job import Submitted
from rota.model.lifecycle import JobState
from rota.model.messages import Hello
from rota.model.settings import Settings
from rota.model.units import parse_duration
from rota.queue import Queue
from rota.runtime import reopener_of, submitter_of
from rota.sdk.task import Task

TASKS = query(__package__, "jobs_tasks")

CANCELLED_WITHIN_S: Final = 5.0
RESULTS_MAX: Final = 10_000


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Jobs]:
    async with db.opened(settings) as database:
        await check_current(database)
        yield Jobs(database)


def run(settings: Settings, work: Callable[[Jobs], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        async with opened(settings) as jobs:
            return await work(jobs)

    print_page(asyncio.run(done()), form=form)


def submit(settings: Settings, wanted: Wanted, *, wait: bool, dry_run: bool, form: Form) -> int:
    return asyncio.run(_submit(settings, wanted, wait=wait, dry_run=dry_run, form=form))


async def _submit(settings: Settings, wanted: Wanted, *, wait: bool, dry_run: bool, form: Form) -> int:
    given = msgspec.structs.replace(submission(wanted, actor(), _declared(settings, wanted)), principal=actor())
    async with opened(settings) as jobs:
        if wanted.after:
            after = tuple([await find(jobs, each) for each in wanted.after])
            given = msgspec.structs.replace(given, after=after)
        if dry_run:
            print_page(await rehearsed(settings, jobs.database, given), form=form)
            return 0
        [submitted] = await submitter_of(settings, jobs.database).submit([given], may_be_critical=True)
        if wanted.task and not submitted.already:
            await _note_unknown_task(jobs.database, wanted.task)
        if not wait:
            print_page(view.submitted_page(submitted, await jobs.get(submitted.job)), form=form)
            return 0
        _say_which(submitted)
        return await until_ended(jobs, submitted.job, settings, form=form)


def _declared(settings: Settings, wanted: Wanted) -> Task[..., Any] | None:
    """As the app says that is named, or the one of the `rota up` whose servers are used."""
    told = None if settings.postgres.url else local_up(settings)
    if wanted.app or not wanted.task or told is None or not told.app:
        return declared(wanted)
    try:
        return declared(msgspec.structs.replace(wanted, app=told.app, app_folder=Path(told.folder)))
    except InvalidInput as error:
        if error.facts.get("kind") != "task":  # a task of other workers is no news
            output.aside(f"What {wanted.task} declares that it needs is not known here: {error.sentence}")
        return None


def _say_which(submitted: Submitted) -> None:
    word = "Found" if submitted.already else "Submitted"
    output.aside(f"{word} job {submitted.job}.")


async def _note_unknown_task(database: Database, task: str) -> None:
    """Not refused: a worker that knows it may come later."""
    hellos = [msgspec.msgpack.decode(row["hello"], type=Hello) for row in await database.rows(TASKS)]
    known = {name for hello in hellos for name in hello.tasks}
    if task in known or not hellos:
        return
    near = difflib.get_close_matches(task, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"they have {', '.join(sorted(known)[:5]) or 'no task'}."
    output.aside(f"No worker that is up knows the task {task}: {hint}")


def wait(settings: Settings, prefix: str, timeout: str | None, *, watch: bool, form: Form) -> int:
    within_s = None if timeout is None else parse_duration(timeout)

    async def done() -> int:
        async with opened(settings) as jobs:
            job, picture = await find(jobs, prefix), Watching() if watch else None
            return await until_ended(jobs, job, settings, form=form, within_s=within_s, picture=picture)

    return asyncio.run(done())


def state_of(text: str | None) -> JobState | None:
    if text is None:
        return None
    word = text.upper().replace("-", "_")
    if word not in JobState.__members__:
        raise unknown("state", word, [state.value for state in JobState])
    return JobState[word]


async def listed(jobs: Jobs, wanted: JobFilter, limit: int, after: str | None) -> Page:
    before = await find(jobs, after) if after else None
    return view.jobs_page(await jobs.list(wanted, after=before, most=limit), limit)


def wanted_jobs(show: str | None, state: str | None, topic: str | None, reason: str | None, label: str) -> JobFilter:
    key, equals, value = label.partition("=")
    if label and not (key and equals):
        raise InvalidInput(f"{label[:64]!r} is no label; write key=value.")
    return JobFilter(
        show=show, state=state_of(state), topic=topic, reason=reason, label=(key, value) if label else None
    )


async def retry(settings: Settings, jobs: Jobs, prefix: str, *, every_frame: bool) -> Page:
    job = await find(jobs, prefix)
    reopener = reopener_of(with_store(settings), Queue(jobs.database))
    async with jobs.database.transaction() as tx:
        made = await reopener.retry_job(job, every_frame=every_frame, by=actor(), on=tx)
        entry = AuditEntry(actor(), "job.retry", f"job:{job}", {"job": str(made.job), "frames": made.frames})
        await audit.append(tx, [entry])
    return view.retried_page(made)


async def remediate(settings: Settings, jobs: Jobs, prefix: str, remediation: str) -> Page:
    job = await find(jobs, prefix)
    reopener = reopener_of(with_store(settings), Queue(jobs.database))
    async with jobs.database.transaction() as tx:
        made = await reopener.remediate(job, remediation, by=actor(), on=tx)
        detail = {"job": str(made.job), "remediation": remediation}
        await audit.append(tx, [AuditEntry(actor(), "job.remediate", f"job:{job}", detail)])
    data = {"job": made.job, "remediation_of": made.old, "frames": made.frames}
    return Page(data, [f"Job {made.job} is job {made.old} in the way its policy suggests."])


async def shown(jobs: Jobs, prefix: str) -> Page:
    job = await jobs.get(await find(jobs, prefix))
    return view.job_page(job, await jobs.artifacts_of([layer.id for layer in job.layers]))


async def results(jobs: Jobs, prefix: str, settings: Settings, *, frame: int | None, limit: int) -> Page:
    """What its frames returned, and why those failed that did; frames that returned nothing are only counted."""
    if not 1 <= limit <= RESULTS_MAX:
        raise InvalidInput(f"{limit} is no number of results: give 1 to {RESULTS_MAX}.")
    job = await jobs.get(await find(jobs, prefix))
    found: list[tuple[Layer, FrameEnd, view.Value]] = []
    for layer in job.layers:
        place = 0 if frame is None else layer.frames.place(frame)
        if place is None:
            continue
        ends = await jobs.ends(layer.id, frame=place, most=1 if frame is not None else limit - len(found))
        wanted = [end for end in ends if frame is None or end.frame == place]
        found += [(layer, end, await value_of(jobs, job, layer, end, settings)) for end in wanted]
        if len(found) >= limit:
            break
    return view.results_page(job, found, limit)


async def cancel(jobs: Jobs, prefixes: Sequence[str]) -> Page:
    found = [await find_for_good(jobs, prefix) for prefix in prefixes]
    marked = [await mark_cancelled(jobs.database, job, actor()) for job in found]
    deadline = time.monotonic() + CANCELLED_WITHIN_S
    while True:
        ended = [await jobs.get(job) for job in found]
        if all(job.state.terminal for job in ended) or time.monotonic() >= deadline:
            return view.cancelled_page(ended, marked)
        await asyncio.sleep(LOOK_S / 5)
