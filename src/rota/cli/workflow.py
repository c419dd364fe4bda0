"""`rota workflow`: each command is one change with its audit entry, or one read. Servers advance what is started."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from rota import runtime
from rota.cli import db, output, workflow_files
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page, Table
from rota.cli.exits import of_job
from rota.cli.form import Form
from rota.cli.naming import the_run
from rota.infra.postgres import check_current
from rota.model.errors import InvalidInput
from rota.model.ids import RunId
from rota.model.settings import Settings
from rota.model.workflow_check import Flow, compiled
from rota.model.workflow_dry import before, dry_run
from rota.model.workflow_run import RunState
from rota.model.workflow_views import Moment, Run, RunLine, Saga, Started, Step
from rota.queue import Queue
from rota.workflow.desk import Desk
from rota.workflow.looking import Looking

NO_RUNS = "There is no such run: `rota workflow run FILE` starts one."
NO_DEFINITIONS = "There is no workflow: `rota workflow declare FILE` makes one known."
LOOK_S: Final = 0.2
ENDED: Final = "ended"
DEFAULT: Final = "default"
SHOWN: Final = 1000
"""Characters of what a run returned, in text."""


class Office(msgspec.Struct, frozen=True):
    """What the commands work with."""

    desk: Desk
    looking: Looking
    actor: str


class Wanted(msgspec.Struct, frozen=True):
    what: str
    inputs: tuple[str, ...]
    show: str
    version: int
    key: str
    dry_run: bool = False
    wait: bool = False
    follow: bool = False
    """While it waits, tell beside the answer what happens."""


def run(settings: Settings, work: Callable[[Office], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        async with db.opened(settings) as database:
            await check_current(database)
            desk = runtime.workflows_of(settings, Queue(database))
            return await work(Office(desk, Looking(database), actor()))

    page = asyncio.run(done())
    print_page(page, form=form)
    if isinstance(page.data, dict) and ENDED in page.data:
        sys.exit(of_job(page.data[ENDED]))


def validated(file: str) -> Page:
    flow = compiled(workflow_files.read(file)[-1])
    steps = "1 step" if len(flow.steps) == 1 else f"{len(flow.steps)} steps"
    return Page(_plan(flow), [f"{file} is a workflow of {steps}.", _order(flow)])


async def declared(office: Office, file: str) -> Page:
    made = [await office.desk.declare(spec, office.actor) for spec in workflow_files.read(file)][-1]
    name = made.flow.spec.name
    told = f"The workflow {name} has version {made.version}." if made.made else f"Nothing changed: {name} is the same."
    return Page({"workflow": name, "version": made.version, "changed": made.made}, [told])


async def definitions(office: Office) -> Page:
    found = await office.desk.definitions.latest()
    if not found:
        return Page([], [NO_DEFINITIONS])
    rows = [(each.name, each.show, each.version, each.steps, each.runs, each.description) for each in found]
    columns = ("workflow", "show", "version", "steps", "runs now", "what it is")
    return Page([msgspec.to_builtins(each) for each in found], [Table(columns, rows)])


async def started(office: Office, wanted: Wanted) -> Page:
    show, name = wanted.show or DEFAULT, wanted.what
    given = _inputs(wanted.inputs)
    specs = workflow_files.read(wanted.what) if workflow_files.is_file(wanted.what) else []
    spec = specs[-1] if specs else None
    if spec is not None:
        if wanted.show not in ("", spec.show):
            raise InvalidInput(f"{name} is for show {spec.show!r}: leave out --show, or write `show` into the file.")
        show, name = spec.show, spec.name
        for each in specs if not wanted.dry_run else ():
            await office.desk.declare(each, office.actor)
    if wanted.dry_run:
        flow = (
            compiled(spec)
            if spec is not None
            else (await office.desk.definitions.find(show, name, wanted.version)).flow
        )
        return Page(_data(dry_run(flow, given)), ["Nothing was started.", _order(flow)])
    told = await office.desk.start(show, name, given, actor=office.actor, version=wanted.version, key=wanted.key)
    return await _awaited(office, told, follow=wanted.follow) if wanted.wait else _started(told)


def _started(told: Started) -> Page:
    return Page(_data(told), [_begun(told), f"`rota workflow show {told.run}` says how far it is."])


def _begun(told: Started) -> str:
    return f"Run {told.run} was there before." if told.already else f"Run {told.run} has begun."


async def _awaited(office: Office, told: Started, *, follow: bool) -> Page:
    seen = 0
    if follow:
        output.aside(_begun(told))
    while True:
        found = await office.looking.get(told.run)
        if follow:
            moments = await office.looking.timeline(told.run)
            for each in moments[seen:]:
                output.aside("  ".join(word for word in _told(each) if word))
            seen = len(moments)
        if found.state.ended:
            break
        await asyncio.sleep(LOOK_S)
    page = await _shown(office, found)
    assert isinstance(page.data, dict)
    return Page({**page.data, ENDED: found.state.value}, page.parts)


async def listed(office: Office, show: str, name: str, state: str, most: int) -> Page:
    found = await office.looking.page(
        shows=[show] if show else None, workflow=name or None, state=_state(state), most=most
    )
    if not found:
        return Page([], [NO_RUNS])
    columns = ("run", "workflow", "show", "state", "started", "took", "error")
    rows = [_row(each) for each in found]
    return Page([msgspec.to_builtins(each) for each in found], [Table(columns, rows, wide=("error",))])


async def shown(office: Office, text: str) -> Page:
    return await _shown(office, await office.looking.get(await _run(office, text)))


async def _shown(office: Office, found: Run) -> Page:
    saga = await office.looking.saga(found.show_id, str(found.id))
    parts: list[str | Table] = [f"Run {found.id} of {found.workflow} (version {found.version}) is {found.state}."]
    if found.error:
        parts.append(found.error)
    if waits := waits_for(found):
        parts.append(f"It waits for {waits}.")
    if found.output is not None:
        parts.append(f"It returned {_short(found.output)}")
    parts.append(Table(("step", "type", "state", "attempt", "why", "job"), [_step_row(step) for step in found.steps]))
    if saga is not None:
        parts += _saga_parts(saga)
    return Page({**_data(found), "saga": _data(saga) if saga is not None else None}, parts)


def waits_for(run: Run) -> str:
    """What keeps a run from going on, in words."""
    if run.state is RunState.PAUSED:
        return f"a person: `rota workflow resume {run.id}`"
    if run.state is RunState.COMPENSATING:
        return "what it did to be undone"
    running = [step for step in run.steps if step.state in ("RUNNING", "STOPPING")]
    return ", ".join(_waits(run.id, step) for step in running if step.type != "parallel")


def _waits(run: RunId, step: Step) -> str:
    if step.due_at is not None and step.type == "delay":
        return f"{_moment(step.due_at)} (step {step.id})"
    if step.type == "approval":
        return f"people to agree: `rota approvals show {run}:{step.id}`"
    what = "run" if step.type == "workflow" else "job"
    return f"{what} {step.job} (step {step.id})"


def _saga_parts(saga: Saga) -> list[str | Table]:
    rows = [(entry.step, entry.state, entry.undo or "", entry.error or "") for entry in saga.entries]
    told = {"open": "can be undone", "rolling_back": "is being undone", "rolled_back": "was undone"}
    what = told.get(saga.state, "was undone in part")
    return [f"What it did {what}, the last first:", Table(("step", "state", "by job", "why"), rows)]


async def timeline(office: Office, text: str) -> Page:
    found = await office.looking.timeline(await _run(office, text))
    data = [{"at": _data(each.at), **_data(each.happened)} for each in found]
    return Page(data, [Table(("at", "step", "what", "why"), [_told(each) for each in found])])


def _told(each: Moment) -> tuple[str, str, str, str]:
    return _moment(each.at, ms=True), each.happened.step or "(run)", each.happened.what, each.happened.why


async def cancelled(office: Office, text: str) -> Page:
    run = await _run(office, text)
    return _changed(run, await office.desk.cancel(run, office.actor), "stops")


async def paused(office: Office, text: str) -> Page:
    run = await _run(office, text)
    return _changed(run, await office.desk.pause(run, office.actor), "begins no further step")


async def resumed(office: Office, text: str) -> Page:
    run = await _run(office, text)
    return _changed(run, await office.desk.resume(run, office.actor), "goes on")


def _changed(run: RunId, changed: bool, does: str) -> Page:
    told = f"Run {run} {does}." if changed else f"Nothing changed: run {run} has ended."
    return Page({"run": str(run), "changed": changed}, [told])


async def rerun(office: Office, text: str, step: str) -> Page:
    return _started(await office.desk.rerun(await _run(office, text), step, office.actor))


async def rolled_back(office: Office, text: str) -> Page:
    run = await _run(office, text)
    entries = await office.desk.roll_back(run, office.actor)
    jobs = "1 job" if entries == 1 else f"{entries} jobs"
    told = f"What {jobs} of run {run} did is being undone." if entries else "Nothing is left to undo."
    return Page({"run": str(run), "entries": entries}, [told])


def _inputs(given: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in map(_given, given):
        if name in found:
            raise InvalidInput(f"The input {name} is given twice: leave one out.")
        found[name] = value
    return found


def _given(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInput(f"{text[:60]!r} is no input: write NAME=VALUE.")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        if value[:1] in ("{", "[", '"'):
            raise InvalidInput(f"The value of input {name} begins like JSON and is none: correct it.") from None
        return name, value


def _plan(flow: Flow) -> dict[str, Any]:
    return {
        "workflow": flow.spec.name,
        "steps": [{"id": step.id, "type": step.spec.type, "after": before(flow, step.place)} for step in flow.steps],
    }


def _order(flow: Flow) -> Table:
    rows = [(step.id, step.spec.type, ", ".join(before(flow, step.place)), step.role) for step in flow.steps]
    return Table(("step", "type", "after", "as"), rows)


def _state(text: str) -> RunState | None:
    if not text:
        return None
    try:
        return RunState(text.upper())
    except ValueError:
        raise InvalidInput(f"{text[:40]!r} is no state of a run: use one of {', '.join(RunState)}.") from None


async def _run(office: Office, text: str) -> RunId:
    return await the_run(office.looking.database, text)


def _row(line: RunLine) -> tuple[object, ...]:
    took = (line.ended_at or datetime.now(UTC)) - line.started_at
    error = (line.error or "").splitlines()[0][:80] if line.error else ""
    name = f"{line.workflow} v{line.version}"
    return (line.id, name, line.show, line.state, _moment(line.started_at), f"{took.total_seconds():.1f} s", error)


def _step_row(step: Step) -> tuple[object, ...]:
    why = step.reason.splitlines()[0][:80] if step.reason else ""
    if step.due_at is not None:
        why = f"until {_moment(step.due_at)}"
    return (step.id, step.type, step.state, step.attempt or "", why, step.job or "")


def _short(value: object) -> str:
    told = msgspec.json.encode(value).decode()
    return told if len(told) <= SHOWN else f"{told[:SHOWN]}... (all of it: -o json)"


def _moment(at: datetime, *, ms: bool = False) -> str:
    told = at.astimezone(UTC)
    return f"{told:%Y-%m-%d %H:%M:%S}.{told.microsecond // 1000:03}" if ms else f"{told:%Y-%m-%d %H:%M:%S}"


def _data(value: object) -> Any:
    return msgspec.to_builtins(value)
