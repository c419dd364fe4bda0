"""`rota submit`, `rota jobs` and `rota job`: jobs as people handle them, straight in PostgreSQL.

Neither Redis nor NATS need be there. A submission, or the mark that a job is to be cancelled, is committed before
anything is printed; servers do the rest, now or when one is up. Whoever dies, or loses the reply, after a mark may give
the same command again; a submission may be given again with the same `--key`. Waiting is looking: if it is interrupted
the job goes on.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.accounting.items import unknown
from rota.cli import db, output
from rota.cli import jobs_view as view
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page
from rota.cli.form import Form
from rota.cli.jobs_wanted import Wanted, declared, submission
from rota.cli.local import local_up, with_store
from rota.engine.ender import mark_cancelled
from rota.engine.engine import store_target
from rota.engine.jobs import FrameEnd, Job, JobFilter, Jobs, Layer
from rota.engine.submit_steps import Submitted
from rota.infra.postgres import Database, check_current, query
from rota.infra.store import Store
from rota.model.errors import BlobMissing, InvalidInput, NotFound, Refused, SetupFailed
from rota.model.ids import JobId
from rota.model.lifecycle import FrameState, JobState
from rota.model.messages import Hello
from rota.model.settings import Settings
from rota.model.units import parse_duration
from rota.runtime import submitter_of
from rota.sdk.task import Task

FIND = query(__package__, "jobs_find")
NAMED = query(__package__, "jobs_named")
TASKS = query(__package__, "jobs_tasks")

PREFIX_LEAST: Final = 4
FIRST_LOOK_S, LOOK_S = 0.02, 0.25
CANCELLED_WITHIN_S: Final = 5.0
RESULTS_MAX: Final = 10_000
_PREFIX = re.compile(r"[0-9a-f-]{4,36}", re.ASCII)


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


def submit(settings: Settings, wanted: Wanted, *, wait: bool, form: Form) -> int:
    return asyncio.run(_submit(settings, wanted, wait=wait, form=form))


async def _submit(settings: Settings, wanted: Wanted, *, wait: bool, form: Form) -> int:
    given = submission(wanted, actor(), _declared(settings, wanted))
    async with opened(settings) as jobs:
        [submitted] = await submitter_of(settings, jobs.database).submit([given], may_be_critical=True)
        if wanted.task and not submitted.already:
            await _note_unknown_task(jobs.database, wanted.task)
        if not wait:
            print_page(view.submitted_page(submitted, await jobs.get(submitted.job)), form=form)
            return 0
        _say_which(submitted)
        return await _until_ended(jobs, submitted.job, within_s=None, form=form, settings=settings)


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


def wait(settings: Settings, prefix: str, timeout: str | None, *, form: Form) -> int:
    within_s = None if timeout is None else parse_duration(timeout)

    async def done() -> int:
        async with opened(settings) as jobs:
            job = await find(jobs, prefix)
            return await _until_ended(jobs, job, within_s=within_s, form=form, settings=settings)

    return asyncio.run(done())


async def _until_ended(jobs: Jobs, which: JobId, *, within_s: float | None, form: Form, settings: Settings) -> int:
    """Exit status 0 when it succeeded."""
    try:
        job = await _ended(jobs, which, within_s)
    except asyncio.CancelledError:
        output.aside(f"Not waiting any more; the job goes on: `rota job wait {which}`, `rota job cancel {which}`.")
        raise
    if not job.state.terminal:
        raise Refused(f"Job {which} has not ended within {within_s:g} s, it is {job.state}: `rota explain {which}`.")
    page = await _ended_page(jobs, job, settings)
    print_page(page, form=form)
    if not form.is_data and _is_one_frame(job) and job.layers[0].work.argv:
        from rota.cli import jobs_logs

        jobs_logs.write(await jobs_logs.of_one_frame(jobs, which))
    return 0 if job.state is JobState.SUCCEEDED else 1


async def _ended(jobs: Jobs, which: JobId, within_s: float | None) -> Job:
    """The job as it ended, or as it is when the time is over."""
    deadline = None if within_s is None else time.monotonic() + within_s
    pause_s = FIRST_LOOK_S
    with view.Bar() as bar:
        while True:
            job = await jobs.get(which)
            bar.show(job)
            if job.state.terminal or (deadline is not None and time.monotonic() >= deadline):
                return job
            await asyncio.sleep(pause_s if deadline is None else min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(LOOK_S, pause_s * 2)


async def _ended_page(jobs: Jobs, job: Job, settings: Settings) -> Page:
    """With what it returned, when that is one value."""
    failed = [end for layer in job.layers for end in await _failures(jobs, layer)]
    single = _is_one_frame(job) and job.state is JobState.SUCCEEDED
    values = [await _value(jobs, end, settings) for end in await jobs.ends(job.layers[0].id)] if single else []
    return view.ended_page(job, failed[:1], values)


def _is_one_frame(job: Job) -> bool:
    return len(job.layers) == 1 and job.layers[0].frames.count == 1


async def _failures(jobs: Jobs, layer: Layer) -> Sequence[tuple[Layer, FrameEnd]]:
    if not any(state.terminal and state is not FrameState.SUCCEEDED for state in layer.counts):
        return []
    return [(layer, end) for end in await jobs.ends(layer.id, most=1000) if end.state is not FrameState.SUCCEEDED]


def state_of(text: str | None) -> JobState | None:
    if text is None:
        return None
    word = text.upper().replace("-", "_")
    if word not in JobState.__members__:
        raise unknown("state", word, [state.value for state in JobState])
    return JobState[word]


async def listed(jobs: Jobs, show: str | None, state: JobState | None, limit: int, after: str | None) -> Page:
    before = await find(jobs, after) if after else None
    page = await jobs.list(JobFilter(show=show, state=state), after=before, most=limit)
    return view.jobs_page(page.items)


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
        found += [(layer, end, await _value(jobs, end, settings)) for end in wanted]
        if len(found) >= limit:
            break
    return view.results_page(job, found, limit)


async def _value(jobs: Jobs, end: FrameEnd, settings: Settings) -> view.Value:
    if end.value is not None:
        return view.Value(view.decoded(end.value))
    if end.value_at is None:
        return view.Value()
    store = Store(jobs.database, store_target(with_store(settings)))
    try:
        return view.Value(view.decoded(await store.get(end.value_at)))
    except (BlobMissing, SetupFailed, InvalidInput) as error:
        return view.Value(problem=error.sentence)


async def cancel(jobs: Jobs, prefixes: Sequence[str]) -> Page:
    found = [await find_by_id(jobs, prefix) for prefix in prefixes]
    marked = [await mark_cancelled(jobs.database, job, actor()) for job in found]
    deadline = time.monotonic() + CANCELLED_WITHIN_S
    while True:
        ended = [await jobs.get(job) for job in found]
        if all(job.state.terminal for job in ended) or time.monotonic() >= deadline:
            return view.cancelled_page(ended, marked)
        await asyncio.sleep(LOOK_S / 5)


async def find(jobs: Jobs, text: str) -> JobId:
    """The job whose id begins like this, or else the newest of this name."""
    found = await _by_prefix(jobs, text.strip().lower())
    if found is None:
        found = await jobs.database.value(NAMED, text)
    if found is None:
        raise NotFound(f"There is no job {text[:64]!r}, by id or name, or it is not kept any more: see `rota jobs`.")
    return JobId(found)


async def find_by_id(jobs: Jobs, text: str) -> JobId:
    """For what cannot be undone: a name may be somebody else's, too."""
    found = await _by_prefix(jobs, text.strip().lower())
    if found is None:
        raise NotFound(f"There is no job with the id {text[:64]!r}: `rota jobs` lists them.")
    return found


async def _by_prefix(jobs: Jobs, text: str) -> JobId | None:
    digits = text.replace("-", "")
    if not _PREFIX.fullmatch(text) or not PREFIX_LEAST <= len(digits) <= 32:
        return None
    first, last = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    found = [JobId(row["id"]) for row in await jobs.database.rows(FIND, first, last)]
    if len(found) > 1:
        several = ", ".join(str(job) for job in found[:3])
        raise InvalidInput(
            f"Several jobs begin with {text} ({several}{', ...' if len(found) > 3 else ''}): write more."
        )
    return found[0] if found else None
