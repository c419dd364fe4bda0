"""`rota workflow`: each command is one read, or one change with its audit entry. Servers execute the runs."""

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
from rota.cli.jobs.dry_run import VERDICT_TEXT
from rota.cli.quota.actions import current_actor, print_page
from rota.cli.workflows import load_file
from rota.engine.admission.decision import AdmissionVerdict
from rota.engine.admission.policy_queries import policy_preview
from rota.infra.postgres import check_current
from rota.model.errors import InvalidInput
from rota.model.ids import RunId
from rota.model.settings import Settings
from rota.model.workflows.compiler import CompiledWorkflow, compile_workflow
from rota.model.workflows.dry_run import StepGate, predecessors
from rota.model.workflows.run_state import RunState
from rota.policy import enabled_flag, factory
from rota.queue import Queue
from rota.workflow.dry_run import dry_run
from rota.workflow.run_commands import RunCommands
from rota.workflow.run_queries import RunQueries

NO_RUNS = "No run matches: `rota workflow run FILE` starts one."
NO_DEFINITIONS = "There is no workflow: `rota workflow declare FILE` declares one."
POLL_INTERVAL_S: Final = 0.2
FINAL_STATE_KEY: Final = "ended"
DEFAULT_SHOW: Final = "default"
OUTPUT_CHARS_MAX: Final = 1000
"""Maximum characters of a run's output in text format."""


class WorkflowContext(msgspec.Struct, frozen=True):
    """The dependencies of the commands."""

    settings: Settings
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
    """While waiting, print the timeline to standard error."""


def run(settings: Settings, work: Callable[[WorkflowContext], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            commands = runtime.build_run_commands(settings, Queue(database))
            return await work(WorkflowContext(settings, commands, RunQueries(database), current_actor()))

    page = asyncio.run(done())
    print_page(page, form=form)
    if isinstance(page.data, dict) and FINAL_STATE_KEY in page.data:
        sys.exit(exit_code_of_job(page.data[FINAL_STATE_KEY]))


def validate_file(file: str) -> CliPage:
    flow = compile_workflow(load_file.read_definitions(file)[-1])
    steps = "1 step" if len(flow.steps) == 1 else f"{len(flow.steps)} steps"
    return CliPage(_plan_data(flow), [f"{file} is a workflow of {steps}.", _steps_table(flow)])


async def declare_workflow(context: WorkflowContext, file: str) -> CliPage:
    declared = [await context.desk.declare(spec, context.actor) for spec in load_file.read_definitions(file)][-1]
    name = declared.flow.spec.name
    text = (
        f"The workflow {name} has version {declared.version}."
        if declared.made
        else f"Nothing changed: {name} is the same."
    )
    return CliPage({"workflow": name, "version": declared.version, "changed": declared.made}, [text])


async def list_definitions(context: WorkflowContext) -> CliPage:
    found = await context.desk.definitions.latest()
    if not found:
        return CliPage([], [NO_DEFINITIONS])
    rows = [(each.name, each.show, each.version, each.steps, each.runs, each.description) for each in found]
    columns = ("workflow", "show", "version", "steps", "runs now", "what it is")
    return CliPage([msgspec.to_builtins(each) for each in found], [Table(columns, rows)])


async def start_run(context: WorkflowContext, args: StartRunArgs) -> CliPage:
    show, name = args.show or DEFAULT_SHOW, args.what
    inputs = _parse_inputs(args.inputs)
    specs = load_file.read_definitions(args.what) if load_file.is_definition_file(args.what) else []
    spec = specs[-1] if specs else None
    if spec is not None:
        if args.show not in ("", spec.show):
            raise InvalidInput(f"{name} is for show {spec.show!r}: omit --show, or set `show` in the file.")
        show, name = spec.show, spec.name
        for each in specs if not args.dry_run else ():
            await context.desk.declare(each, context.actor)
    if args.dry_run:
        flow = (
            compile_workflow(spec)
            if spec is not None
            else (await context.desk.definitions.find(show, name, args.version)).flow
        )
        return await _dry_run_page(context, flow, inputs, show)
    started = await context.desk.start(show, name, inputs, actor=context.actor, version=args.version, key=args.key)
    return await _wait_for_run(context, started, follow=args.follow) if args.wait else _started_page(started)


async def _dry_run_page(context: WorkflowContext, flow: CompiledWorkflow, inputs: dict[str, Any], show: str) -> CliPage:
    kernel = factory.open_kernel(context.settings, None)
    try:
        asks = await enabled_flag.is_enabled(context.desk.database)
        preview = policy_preview(context.settings, kernel, asks=asks)
        result = await dry_run(flow, inputs, preview, actor=context.actor, show=show)
    finally:
        if kernel is not None:
            await kernel.close()
    gates = [_gate_text(step.gate) for step in result.steps]
    return CliPage(_data(result), ["Nothing was started.", _steps_table(flow, gates)])


def _gate_text(gate: StepGate | None) -> str:
    if gate is None:
        return ""
    why = gate.because or gate.reason
    text = f"{VERDICT_TEXT[AdmissionVerdict(gate.verdict)]}{f' ({why})' if why else ''}"
    return text if gate.complete else f"{text}, without its input"


def _started_page(started: RunStartResult) -> CliPage:
    return CliPage(_data(started), [_started_text(started), f"`rota workflow show {started.run}` shows its progress."])


def _started_text(started: RunStartResult) -> str:
    return f"Run {started.run} already exists." if started.already else f"Run {started.run} has started."


async def _wait_for_run(context: WorkflowContext, started: RunStartResult, *, follow: bool) -> CliPage:
    printed = 0
    if follow:
        output.print_stderr(_started_text(started))
    while True:
        found = await context.looking.get(started.run)
        if follow:
            moments = await context.looking.timeline(started.run)
            for each in moments[printed:]:
                output.print_stderr("  ".join(cell for cell in _moment_row(each) if cell))
            printed = len(moments)
        if found.state.ended:
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    page = await _run_page(context, found)
    assert isinstance(page.data, dict)
    return CliPage({**page.data, FINAL_STATE_KEY: found.state.value}, page.parts)


async def list_runs(context: WorkflowContext, show: str, name: str, state: str, most: int) -> CliPage:
    found = await context.looking.page(
        shows=[show] if show else None, workflow=name or None, state=_parse_state(state), most=most
    )
    if not found:
        return CliPage([], [NO_RUNS])
    columns = ("run", "workflow", "show", "state", "started", "took", "error")
    rows = [_run_row(each) for each in found]
    return CliPage([msgspec.to_builtins(each) for each in found], [Table(columns, rows, wide=("error",))])


async def show_run(context: WorkflowContext, text: str) -> CliPage:
    return await _run_page(context, await context.looking.get(await _find_run(context, text)))


async def _run_page(context: WorkflowContext, found: WorkflowRunView) -> CliPage:
    saga = await context.looking.saga(found.show_id, str(found.id))
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
    """What a run is waiting for."""
    if run.state is RunState.PAUSED:
        return f"a resume: `rota workflow resume {run.id}`"
    if run.state is RunState.COMPENSATING:
        return "its compensation to finish"
    running = [step for step in run.steps if step.state in ("RUNNING", "STOPPING")]
    return ", ".join(_step_wait_text(run.id, step) for step in running if step.type != "parallel")


def _step_wait_text(run: RunId, step: WorkflowStepView) -> str:
    if step.due_at is not None and step.type == "delay":
        return f"{_format_time(step.due_at)} (step {step.id})"
    if step.type == "approval":
        return f"approval: `rota approvals show {run}:{step.id}`"
    what = "run" if step.type == "workflow" else "job"
    return f"{what} {step.job} (step {step.id})"


def _saga_parts(saga: SagaView) -> list[str | Table]:
    rows = [(entry.step, entry.state, entry.undo or "", entry.error or "") for entry in saga.entries]
    texts = {"open": "possible", "rolling_back": "in progress", "rolled_back": "complete"}
    what = texts.get(saga.state, "incomplete")
    return [f"Compensation is {what}, last step first:", Table(("step", "state", "by job", "why"), rows)]


async def show_timeline(context: WorkflowContext, text: str) -> CliPage:
    found = await context.looking.timeline(await _find_run(context, text))
    data = [{"at": _data(each.at), **_data(each.happened)} for each in found]
    return CliPage(data, [Table(("at", "step", "what", "why"), [_moment_row(each) for each in found])])


def _moment_row(each: RunTimelineEntry) -> tuple[str, str, str, str]:
    return _format_time(each.at, ms=True), each.happened.step or "(run)", each.happened.what, each.happened.why


async def cancel_run(context: WorkflowContext, text: str) -> CliPage:
    run = await _find_run(context, text)
    return _changed_page(run, await context.desk.cancel(run, context.actor), "stops")


async def pause_run(context: WorkflowContext, text: str) -> CliPage:
    run = await _find_run(context, text)
    return _changed_page(run, await context.desk.pause(run, context.actor), "starts no further step")


async def resume_run(context: WorkflowContext, text: str) -> CliPage:
    run = await _find_run(context, text)
    return _changed_page(run, await context.desk.resume(run, context.actor), "continues")


def _changed_page(run: RunId, changed: bool, does: str) -> CliPage:
    text = f"Run {run} {does}." if changed else f"Nothing changed: run {run} has ended."
    return CliPage({"run": str(run), "changed": changed}, [text])


async def rerun_from_step(context: WorkflowContext, text: str, step: str) -> CliPage:
    return _started_page(await context.desk.rerun(await _find_run(context, text), step, context.actor))


async def roll_back_run(context: WorkflowContext, prefix: str) -> CliPage:
    run = await _find_run(context, prefix)
    entries = await context.desk.roll_back(run, context.actor)
    jobs = "1 job" if entries == 1 else f"{entries} jobs"
    text = f"{jobs} of run {run} are being compensated." if entries else "Nothing is left to compensate."
    return CliPage({"run": str(run), "entries": entries}, [text])


def _parse_inputs(inputs: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in map(_parse_input, inputs):
        if name in found:
            raise InvalidInput(f"The input {name} is repeated: give it once.")
        found[name] = value
    return found


def _parse_input(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInput(f"{text[:60]!r} is not a valid input: use NAME=VALUE.")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        if value[:1] in ("{", "[", '"'):
            raise InvalidInput(
                f"The value of input {name} starts like JSON but is not valid JSON: correct it."
            ) from None
        return name, value


def _plan_data(flow: CompiledWorkflow) -> dict[str, Any]:
    return {
        "workflow": flow.spec.name,
        "steps": [
            {"id": step.id, "type": step.spec.type, "after": predecessors(flow, step.place)} for step in flow.steps
        ],
    }


def _steps_table(flow: CompiledWorkflow, gates: Sequence[str] = ()) -> Table:
    """`gates`: what the policy would decide about each step."""
    rows = [(step.id, step.spec.type, ", ".join(predecessors(flow, step.place)), step.role) for step in flow.steps]
    if not gates:
        return Table(("step", "type", "after", "as"), rows)
    return Table(
        ("step", "type", "after", "as", "policy"), [(*row, gate) for row, gate in zip(rows, gates, strict=True)]
    )


def _parse_state(text: str) -> RunState | None:
    if not text:
        return None
    try:
        return RunState(text.upper())
    except ValueError:
        raise InvalidInput(f"{text[:40]!r} is not a valid state of a run: use one of {', '.join(RunState)}.") from None


async def _find_run(context: WorkflowContext, text: str) -> RunId:
    return await require_run(context.looking.database, text)


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
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= OUTPUT_CHARS_MAX else f"{text[:OUTPUT_CHARS_MAX]}... (all of it: -o json)"


def _format_time(at: datetime, *, ms: bool = False) -> str:
    utc = at.astimezone(UTC)
    return f"{utc:%Y-%m-%d %H:%M:%S}.{utc.microsecond // 1000:03}" if ms else f"{utc:%Y-%m-%d %H:%M:%S}"


def _data(value: object) -> Any:
    return msgspec.to_builtins(value)
