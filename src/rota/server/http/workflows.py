"""Workflows and their runs: declared, started, looked at, stopped, run again and undone."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter
from msgspec.structs import replace

from rota.model.access import Actor, Role, guard, role_to_submit
from rota.model.errors import Forbidden, InvalidInput, NotFound
from rota.model.events import Event
from rota.model.ids import JobId, RunId, parse_id
from rota.model.workflow import WorkflowSpec
from rota.model.workflow_dry import DryRun, dry_run
from rota.model.workflow_run import RunState
from rota.model.workflow_views import (
    Declared,
    From,
    Moment,
    RolledBack,
    Run,
    RunChanged,
    RunLine,
    RunSpec,
    Saga,
    Started,
    WorkflowLine,
)
from rota.server.http.desk import Desk
from rota.server.http.events import After, LastEventId, watching
from rota.server.http.jobs import Wait
from rota.server.http.pages import LIMIT, Limit, Page, page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.seen import told_to
from rota.server.http.sse import MEDIA_TYPE, Sse
from rota.server.http.wire import Ask
from rota.workflow.explain_told import RunExplained
from rota.workflow.explaining import RunExplainer
from rota.workflow.telling import kind_of
from rota.workflow.watching import RunMoment

VIEW, SUBMIT = needs(Role.VIEWER, "somewhere"), needs(Role.SUBMITTER, "somewhere")
RunPath = Annotated[str, PathParameter(max_length=36, description="The id of a run.")]
NamePath = Annotated[str, PathParameter(max_length=64, description="The name of a workflow.")]
ShowPath = Annotated[str, PathParameter(max_length=64, description="The name of a show.")]
Named = Annotated[str, QueryParameter(max_length=64, description="Runs of this workflow alone.")]
OfShow = Annotated[str, QueryParameter(max_length=64, description="Of this show alone.")]
OfState = Annotated[str, QueryParameter(name="state", max_length=20, description="Such as RUNNING or FAILED.")]


class WorkflowRoutes(Controller):
    path = "/workflows"
    tags = ("workflows",)

    @get(opt=VIEW)
    async def find_workflows(self, request: Ask, desk: AtDesk) -> Page[WorkflowLine]:
        """Every workflow in its latest version."""
        return Page(await desk.workflows.definitions.latest(_ids(request.user)))

    @post(opt=SUBMIT)
    async def declare_workflow(self, request: Ask, desk: AtDesk, data: JSONBody[WorkflowSpec]) -> Declared:
        """One that differs from the latest is a new version; runs keep theirs."""
        for priority in {data.priority, *(step.priority or data.priority for step in data.steps)}:
            guard(request.user, role_to_submit(priority), data.show)
        made = await desk.workflows.declare(data, request.user.audited)
        return Declared(data.name, made.version, made.made)

    @post("/{show:str}/{workflow:str}/runs", opt=needs(Role.SUBMITTER, "show"))
    async def start_run(
        self, request: Ask, desk: AtDesk, show: ShowPath, workflow: NamePath, data: JSONBody[RunSpec]
    ) -> Started:
        """Start a run; its first steps are submitted."""
        who = request.user.name
        return await desk.workflows.start(show, workflow, data.input, actor=who, version=data.version, key=data.key)

    @post("/{show:str}/{workflow:str}/dry-run", opt=needs(Role.VIEWER, "show"), status_code=200)
    async def try_run(self, desk: AtDesk, show: ShowPath, workflow: NamePath, data: JSONBody[RunSpec]) -> DryRun:
        """Check the input of a run, and tell in which order its steps may begin; nothing is started."""
        of = await desk.workflows.definitions.find(show, workflow, data.version)
        return dry_run(of.flow, data.input)


class RunRoutes(Controller):
    path = "/runs"
    tags = ("workflows",)

    @get(opt=VIEW)
    async def find_runs(
        self,
        request: Ask,
        desk: AtDesk,
        show: OfShow = "",
        workflow: Named = "",
        in_state: OfState = "",
        after: FromQuery[str | None] = None,
        limit: Limit = LIMIT,
    ) -> Page[RunLine]:
        """Runs, the newest first."""
        if show:
            guard(request.user, Role.VIEWER, show)
        found = await desk.runs.page(
            shows=[show] if show else None,
            ids=None if show else _ids(request.user),
            workflow=workflow or None,
            state=_state(in_state),
            before=parse_id(RunId, after) if after else None,
            most=limit + 1,
        )
        return page(found, limit, lambda run: run.id)

    @get("/{run:str}", opt=VIEW)
    async def get_run(self, request: Ask, desk: AtDesk, run: RunPath, wait: Wait = 0.0) -> Run:
        """A run with its steps: what each does or waits for, and what it returned; or wait for its end."""
        found = await _seen(request.user, desk, run)
        if wait and not found.state.ended:
            request.auth.go_aside()
            await request.unless_gone(desk.runs_watch.ended(found.id, wait))
            found = await desk.runs.get(found.id)
        return found

    @get("/{run:str}/timeline", opt=VIEW)
    async def read_timeline(self, request: Ask, desk: AtDesk, run: RunPath) -> Page[Moment]:
        """Everything that happened to it, in order."""
        return Page(await desk.runs.timeline((await _seen(request.user, desk, run)).id))

    @get("/{run:str}/events", opt=VIEW, media_type=MEDIA_TYPE)
    async def follow_run(
        self, request: Ask, desk: AtDesk, run: RunPath, after: After = "", last: LastEventId = ""
    ) -> Sse:
        """Everything that happens to a run, from its beginning on, until its end."""
        found = await _seen(request.user, desk, run)
        told = watching(desk.run_histories, found.id, last or after, partial(_event, found))
        return Sse(request, desk.streams, told)

    @get("/{run:str}/explain", opt=VIEW)
    async def explain_run(self, request: Ask, desk: AtDesk, run: RunPath) -> RunExplained:
        """What it waits for, what changes first at first, with what would help; or how it ended."""
        found = await _seen(request.user, desk, run)
        told = await RunExplainer(desk.explainer).explain(found.id)
        return replace(told, jobs=tuple(told_to(request.user, job) for job in told.jobs))

    @get("/{run:str}/saga", opt=VIEW)
    async def get_saga(self, request: Ask, desk: AtDesk, run: RunPath) -> Saga:
        """What it has to undo, and what has become of that; the last recorded first."""
        found = await _seen(request.user, desk, run)
        return await desk.runs.saga(found.show_id, str(found.id)) or Saga("open", None, [])

    @post("/{run:str}/cancel", opt=SUBMIT, status_code=200)
    async def cancel_run(self, request: Ask, desk: AtDesk, run: RunPath) -> RunChanged:
        """Stop what it does; what it did is undone if its workflow says so."""
        found = await _seen(request.user, desk, run, Role.SUBMITTER)
        return await _changed(desk, found, await desk.workflows.cancel(found.id, request.user.audited))

    @post("/{run:str}/pause", opt=SUBMIT, status_code=200)
    async def pause_run(self, request: Ask, desk: AtDesk, run: RunPath) -> RunChanged:
        """No further step begins; those under way go on."""
        found = await _seen(request.user, desk, run, Role.SUBMITTER)
        return await _changed(desk, found, await desk.workflows.pause(found.id, request.user.audited))

    @post("/{run:str}/resume", opt=SUBMIT, status_code=200)
    async def resume_run(self, request: Ask, desk: AtDesk, run: RunPath) -> RunChanged:
        """Steps begin again."""
        found = await _seen(request.user, desk, run, Role.SUBMITTER)
        return await _changed(desk, found, await desk.workflows.resume(found.id, request.user.audited))

    @post("/{run:str}/rerun", opt=SUBMIT)
    async def rerun_run(self, request: Ask, desk: AtDesk, run: RunPath, data: JSONBody[From]) -> Started:
        """A new run from a step on, with what came before taken over from one that has ended."""
        found = await _seen(request.user, desk, run, Role.SUBMITTER)
        return await desk.workflows.rerun(found.id, data.step, request.user.audited, request.user.name)

    @post("/{run:str}/rollback", opt=needs(Role.OPERATOR, "somewhere"), status_code=200)
    async def roll_back_run(self, request: Ask, desk: AtDesk, run: RunPath) -> RolledBack:
        """Undo what a run did that has ended, or what could not be undone before."""
        found = await _seen(request.user, desk, run, Role.OPERATOR)
        return RolledBack(found.id, await desk.workflows.roll_back(found.id, request.user.audited))


def _event(run: Run, number: int, moment: RunMoment) -> Event:
    told = moment.happened
    facts = {"workflow": run.workflow, "step": told.step, "why": told.why}
    return Event(
        id=str(number),
        at=moment.at,
        kind=kind_of(told),
        show=run.show,
        job=JobId(told.job) if told.job is not None else None,
        run=run.id,
        facts={name: value for name, value in facts.items() if value},
    )


async def _seen(actor: Actor, desk: Desk, text: str, role: Role = Role.VIEWER) -> Run:
    """A run that this key may look at; one that it may not look at is answered like one that there is not."""
    run = parse_id(RunId, text)
    found = await desk.runs.get(run)
    try:
        guard(actor, Role.VIEWER, found.show_id)
    except Forbidden:
        raise NotFound(f"There is no run {run}, or it is not kept any more.", run=str(run)) from None
    guard(actor, role, found.show_id)
    return found


async def _changed(desk: Desk, found: Run, changed: bool) -> RunChanged:
    return RunChanged(found.id, (await desk.runs.get(found.id)).state, changed)


def _ids(actor: Actor) -> list[str] | None:
    shows = actor.limited_to(Role.VIEWER)
    return None if shows is None else [str(show) for show in shows]


def _state(text: str) -> RunState | None:
    if not text:
        return None
    try:
        return RunState(text.upper())
    except ValueError:
        raise InvalidInput(f"{text[:20]!r} is no state of a run: there are {', '.join(RunState)}.") from None
