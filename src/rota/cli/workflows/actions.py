"""`rota workflow`: each command is one change with its audit entry, or one read. Servers advance what is started."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from rota import runtime
from rota.api.workflows import (
    RunStartResult,
    RunTimelineEntry,
    SagaView,
    WorkflowRunSummary,
    WorkflowRunView,
    WorkflowStepView,
)
from rota.cli.core import output
from rota.cli.core.exit_codes import exit_code_of_job
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import require_run
from rota.cli.core.tables import CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.quota.actions import current_actor, print_page
from rota.cli.workflows import load_file
from rota.infra.postgres import check_current
from rota.model.errors import InvalidInput
from rota.model.ids import RunId
from rota.model.settings import Settings
from rota.model.workflows.compiler import CompiledWorkflow, compile_workflow
from rota.model.workflows.dry_run import dry_run_workflow, predecessors
from rota.model.workflows.run_state import RunState
from rota.queue import Queue
from rota.workflow.run_commands import RunCommands
from rota.workflow.run_queries import RunQueries

NO_RUNS = "There is no such run: `rota workflow run FILE` starts one."
NO_DEFINITIONS = "There is no workflow: `rota workflow declare FILE` makes one known."
POLL_INTERVAL_S: Final = 0.2
FINAL_STATE_KEY: Final = "ended"
DEFAULT_SHOW: Final = "default"
OUTPUT_CHARS_MAX: Final = 1000
"""Characters of what a run returned, in text."""


class WorkflowContext(msgspec.Struct, frozen=True):
    """What the commands work with."""

    desk: RunCommands
    looking: RunQueries
    actor: str


class StartRunArgs(msgspec.Struct, frozen=True):
    what: str
    inputs: tuple[str, ...]
    show: str
    version: int
    key: str
    dry_run: bool = False
    wait: bool = False
    follow: bool = False
    """While it waits, tell beside the answer what happens."""


def run(settings: Settings, work: Callable[[WorkflowContext], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            desk = runtime.build_run_commands(settings, Queue(database))
            return await work(WorkflowContext(desk, RunQueries(database), current_actor()))

    page = asyncio.run(done())
    print_page(page, form=form)
    if isinstance(page.data, dict) and FINAL_STATE_KEY in page.data:
        sys.exit(exit_code_of_job(page.data[FINAL_STATE_KEY]))


def validate_file(file: str) -> CliPage:
    flow = compile_workflow(load_file.read_definitions(file)[-1])
    steps = "1 step" if len(flow.steps) == 1 else f"{len(flow.steps)} steps"
    return CliPage(_plan_data(flow), [f"{file} is a workflow of {steps}.", _steps_table(flow)])


async def declare_workflow(office: WorkflowContext, file: str) -> CliPage:
    made = [await office.desk.declare(spec, office.actor) for spec in load_file.read_definitions(file)][-1]
    name = made.flow.spec.name
    told = f"The workflow {name} has version {made.version}." if made.made else f"Nothing changed: {name} is the same."
    return CliPage({"workflow": name, "version": made.version, "changed": made.made}, [told])


async def list_definitions(office: WorkflowContext) -> CliPage:
    found = await office.desk.definitions.latest()
    if not found:
        return CliPage([], [NO_DEFINITIONS])
    rows = [(each.name, each.show, each.version, each.steps, each.runs, each.description) for each in found]
    columns = ("workflow", "show", "version", "steps", "runs now", "what it is")
    return CliPage([msgspec.to_builtins(each) for each in found], [Table(columns, rows)])


async def start_run(office: WorkflowContext, wanted: StartRunArgs) -> CliPage:
    show, name = wanted.show or DEFAULT_SHOW, wanted.what
    given = _parse_inputs(wanted.inputs)
    specs = load_file.read_definitions(wanted.what) if load_file.is_definition_file(wanted.what) else []
    spec = specs[-1] if specs else None
    if spec is not None:
        if wanted.show not in ("", spec.show):
            raise InvalidInput(f"{name} is for show {spec.show!r}: leave out --show, or write `show` into the file.")
        show, name = spec.show, spec.name
        for each in specs if not wanted.dry_run else ():
            await office.desk.declare(each, office.actor)
    if wanted.dry_run:
        flow = (
            compile_workflow(spec)
            if spec is not None
            else (await office.desk.definitions.find(show, name, wanted.version)).flow
        )
        return CliPage(_data(dry_run_workflow(flow, given)), ["Nothing was started.", _steps_table(flow)])
    told = await office.desk.start(show, name, given, actor=office.actor, version=wanted.version, key=wanted.key)
    return await _wait_for_run(office, told, follow=wanted.follow) if wanted.wait else _started_page(told)


def _started_page(told: RunStartResult) -> CliPage:
    return CliPage(_data(told), [_started_text(told), f"`rota workflow show {told.run}` says how far it is."])


def _started_text(told: RunStartResult) -> str:
    return f"Run {told.run} was there before." if told.already else f"Run {told.run} has begun."


async def _wait_for_run(office: WorkflowContext, told: RunStartResult, *, follow: bool) -> CliPage:
    seen = 0
    if follow:
        output.print_stderr(_started_text(told))
    while True:
        found = await office.looking.get(told.run)
        if follow:
            moments = await office.looking.timeline(told.run)
            for each in moments[seen:]:
                output.print_stderr("  ".join(word for word in _moment_row(each) if word))
            seen = len(moments)
        if found.state.ended:
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    page = await _run_page(office, found)
    assert isinstance(page.data, dict)
    return CliPage({**page.data, FINAL_STATE_KEY: found.state.value}, page.parts)


async def list_runs(office: WorkflowContext, show: str, name: str, state: str, most: int) -> CliPage:
    found = await office.looking.page(
        shows=[show] if show else None, workflow=name or None, state=_parse_state(state), most=most
    )
    if not found:
        return CliPage([], [NO_RUNS])
    columns = ("run", "workflow", "show", "state", "started", "took", "error")
    rows = [_run_row(each) for each in found]
    return CliPage([msgspec.to_builtins(each) for each in found], [Table(columns, rows, wide=("error",))])


async def show_run(office: WorkflowContext, text: str) -> CliPage:
    return await _run_page(office, await office.looking.get(await _find_run(office, text)))


async def _run_page(office: WorkflowContext, found: WorkflowRunView) -> CliPage:
    saga = await office.looking.saga(found.show_id, str(found.id))
    parts: list[str | Table] = [f"Run {found.id} of {found.workflow} (version {found.version}) is {found.state}."]
    if found.error:
        parts.append(found.error)
    if waits := wait_text(found):
        parts.append(f"It waits for {waits}.")
    if found.output is not None:
        parts.append(f"It returned {_truncate(found.output)}")
    parts.append(Table(("step", "type", "state", "attempt", "why", "job"), [_step_row(step) for step in found.steps]))
    if saga is not None:
        parts += _saga_parts(saga)
    return CliPage({**_data(found), "saga": _data(saga) if saga is not None else None}, parts)


def wait_text(run: WorkflowRunView) -> str:
    """What keeps a run from going on, in words."""
    if run.state is RunState.PAUSED:
        return f"a person: `rota workflow resume {run.id}`"
    if run.state is RunState.COMPENSATING:
        return "what it did to be undone"
    running = [step for step in run.steps if step.state in ("RUNNING", "STOPPING")]
    return ", ".join(_step_wait_text(run.id, step) for step in running if step.type != "parallel")


def _step_wait_text(run: RunId, step: WorkflowStepView) -> str:
    if step.due_at is not None and step.type == "delay":
        return f"{_format_time(step.due_at)} (step {step.id})"
    if step.type == "approval":
        return f"people to agree: `rota approvals show {run}:{step.id}`"
    what = "run" if step.type == "workflow" else "job"
    return f"{what} {step.job} (step {step.id})"


def _saga_parts(saga: SagaView) -> list[str | Table]:
    rows = [(entry.step, entry.state, entry.undo or "", entry.error or "") for entry in saga.entries]
    told = {"open": "can be undone", "rolling_back": "is being undone", "rolled_back": "was undone"}
    what = told.get(saga.state, "was undone in part")
    return [f"What it did {what}, the last first:", Table(("step", "state", "by job", "why"), rows)]


async def show_timeline(office: WorkflowContext, text: str) -> CliPage:
    found = await office.looking.timeline(await _find_run(office, text))
    data = [{"at": _data(each.at), **_data(each.happened)} for each in found]
    return CliPage(data, [Table(("at", "step", "what", "why"), [_moment_row(each) for each in found])])


def _moment_row(each: RunTimelineEntry) -> tuple[str, str, str, str]:
    return _format_time(each.at, ms=True), each.happened.step or "(run)", each.happened.what, each.happened.why


async def cancel_run(office: WorkflowContext, text: str) -> CliPage:
    run = await _find_run(office, text)
    return _changed_page(run, await office.desk.cancel(run, office.actor), "stops")


async def pause_run(office: WorkflowContext, text: str) -> CliPage:
    run = await _find_run(office, text)
    return _changed_page(run, await office.desk.pause(run, office.actor), "begins no further step")


async def resume_run(office: WorkflowContext, text: str) -> CliPage:
    run = await _find_run(office, text)
    return _changed_page(run, await office.desk.resume(run, office.actor), "goes on")


def _changed_page(run: RunId, changed: bool, does: str) -> CliPage:
    told = f"Run {run} {does}." if changed else f"Nothing changed: run {run} has ended."
    return CliPage({"run": str(run), "changed": changed}, [told])


async def rerun_from_step(office: WorkflowContext, text: str, step: str) -> CliPage:
    return _started_page(await office.desk.rerun(await _find_run(office, text), step, office.actor))


async def roll_back_run(office: WorkflowContext, text: str) -> CliPage:
    run = await _find_run(office, text)
    entries = await office.desk.roll_back(run, office.actor)
    jobs = "1 job" if entries == 1 else f"{entries} jobs"
    told = f"What {jobs} of run {run} did is being undone." if entries else "Nothing is left to undo."
    return CliPage({"run": str(run), "entries": entries}, [told])


def _parse_inputs(given: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in map(_parse_input, given):
        if name in found:
            raise InvalidInput(f"The input {name} is given twice: leave one out.")
        found[name] = value
    return found


def _parse_input(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInput(f"{text[:60]!r} is no input: write NAME=VALUE.")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        if value[:1] in ("{", "[", '"'):
            raise InvalidInput(f"The value of input {name} begins like JSON and is none: correct it.") from None
        return name, value


def _plan_data(flow: CompiledWorkflow) -> dict[str, Any]:
    return {
        "workflow": flow.spec.name,
        "steps": [
            {"id": step.id, "type": step.spec.type, "after": predecessors(flow, step.place)} for step in flow.steps
        ],
    }


def _steps_table(flow: CompiledWorkflow) -> Table:
    rows = [(step.id, step.spec.type, ", ".join(predecessors(flow, step.place)), step.role) for step in flow.steps]
    return Table(("step", "type", "after", "as"), rows)


def _parse_state(text: str) -> RunState | None:
    if not text:
        return None
    try:
        return RunState(text.upper())
    except ValueError:
        raise InvalidInput(f"{text[:40]!r} is no state of a run: use one of {', '.join(RunState)}.") from None


async def _find_run(office: WorkflowContext, text: str) -> RunId:
    return await require_run(office.looking.database, text)


def _run_row(line: WorkflowRunSummary) -> tuple[object, ...]:
    took = (line.ended_at or datetime.now(UTC)) - line.started_at
    error = (line.error or "").splitlines()[0][:80] if line.error else ""
    name = f"{line.workflow} v{line.version}"
    return (line.id, name, line.show, line.state, _format_time(line.started_at), f"{took.total_seconds():.1f} s", error)


def _step_row(step: WorkflowStepView) -> tuple[object, ...]:
    why = step.reason.splitlines()[0][:80] if step.reason else ""
    if step.due_at is not None:
        why = f"until {_format_time(step.due_at)}"
    return (step.id, step.type, step.state, step.attempt or "", why, step.job or "")


def _truncate(value: object) -> str:
    told = msgspec.json.encode(value).decode()
    return told if len(told) <= OUTPUT_CHARS_MAX else f"{told[:OUTPUT_CHARS_MAX]}... (all of it: -o json)"


def _format_time(at: datetime, *, ms: bool = False) -> str:
    told = at.astimezone(UTC)
    return f"{told:%Y-%m-%d %H:%M:%S}.{told.microsecond // 1000:03}" if ms else f"{told:%Y-%m-%d %H:%M:%S}"


def _data(value: object) -> Any:
    return msgspec.to_builtins(value)
