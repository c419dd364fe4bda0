"""Workflows and runs: declare, start, read, cancel, pause, rerun and roll back."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter
from msgspec.structs import replace

from rota.api.pages import Page
from rota.api.run_explanation import RunExplanation
from rota.api.workflows import (
    RerunSpec,
    RollbackResult,
    RunChangeResult,
    RunSpec,
    RunStartResult,
    RunTimelineEntry,
    SagaView,
    WorkflowDeclareResult,
    WorkflowRunSummary,
    WorkflowRunView,
    WorkflowSummary,
)
from rota.engine.admission.policy_queries import policy_preview
from rota.model.access import Actor, Role, require_role, role_required_to_submit
from rota.model.errors import Forbidden, InvalidInput, NotFound
from rota.model.events import Event
from rota.model.ids import JobId, RunId, parse_id
from rota.model.workflows.dry_run import WorkflowDryRun
from rota.model.workflows.run_state import RunState
from rota.model.workflows.spec import WorkflowSpec
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, paginate
from rota.server.http.permissions import Deps, requires
from rota.server.http.routes.events import After, LastEventId, open_history
from rota.server.http.routes.jobs import WaitQuery
from rota.server.http.sse import MEDIA_TYPE, SseResponse
from rota.server.http.visibility import redact_explanation
from rota.workflow.dry_run import dry_run
from rota.workflow.explain import RunExplainer
from rota.workflow.run_events import event_kind
from rota.workflow.run_history import RunHistoryEntry

VIEW, SUBMIT = requires(Role.VIEWER, "somewhere"), requires(Role.SUBMITTER, "somewhere")
RunPath = Annotated[str, PathParameter(max_length=36, description="The id of a run.")]
NamePath = Annotated[str, PathParameter(max_length=64, description="The name of a workflow.")]
ShowPath = Annotated[str, PathParameter(max_length=64, description="The name of a show.")]
WorkflowQuery = Annotated[str, QueryParameter(max_length=64, description="Only runs of this workflow.")]
ShowQuery = Annotated[str, QueryParameter(max_length=64, description="Only runs of this show.")]
StateQuery = Annotated[
    str, QueryParameter(name="state", max_length=20, description="A run state, such as RUNNING or FAILED.")
]


class WorkflowRoutes(Controller):
    path = "/workflows"
    tags = ("workflows",)

    @get(opt=VIEW)
    async def find_workflows(self, request: ApiRequest, deps: Deps) -> Page[WorkflowSummary]:
        """List workflows in their latest versions."""
        return Page(await deps.workflows.definitions.latest(_visible_show_ids(request.user)))

    @post(opt=SUBMIT)
    async def declare_workflow(
        self, request: ApiRequest, deps: Deps, data: JSONBody[WorkflowSpec]
    ) -> WorkflowDeclareResult:
        """Declare a workflow. A changed definition becomes a new version; existing runs keep theirs."""
        for priority in {data.priority, *(step.priority or data.priority for step in data.steps)}:
            require_role(request.user, role_required_to_submit(priority), data.show)
        declared = await deps.workflows.declare(data, request.user.audited)
        return WorkflowDeclareResult(data.name, declared.version, declared.made)

    @post("/{show:str}/{workflow:str}/runs", opt=requires(Role.SUBMITTER, "show"))
    async def start_run(
        self, request: ApiRequest, deps: Deps, show: ShowPath, workflow: NamePath, data: JSONBody[RunSpec]
    ) -> RunStartResult:
        """Start a run and submit its first steps."""
        actor = request.user.principal.name
        return await deps.workflows.start(show, workflow, data.input, actor=actor, version=data.version, key=data.key)

    @post("/{show:str}/{workflow:str}/dry-run", opt=requires(Role.VIEWER, "show"), status_code=200)
    async def try_run(
        self, request: ApiRequest, deps: Deps, show: ShowPath, workflow: NamePath, data: JSONBody[RunSpec]
    ) -> WorkflowDryRun:
        """Check the input of a run, show the order in which its steps can start and what the policy would decide about
        their jobs; starts nothing."""
        definition = await deps.workflows.definitions.find(show, workflow, data.version)
        preview = policy_preview(deps.settings, deps.kernel, asks=deps.kernel is not None)
        return await dry_run(definition.flow, data.input, preview, actor=request.user.principal.name, show=show)


class RunRoutes(Controller):
    path = "/runs"
    tags = ("workflows",)

    @get(opt=VIEW)
    async def find_runs(
        self,
        request: ApiRequest,
        deps: Deps,
        show: ShowQuery = "",
        workflow: WorkflowQuery = "",
        in_state: StateQuery = "",
        after: FromQuery[str | None] = None,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[WorkflowRunSummary]:
        """List runs, newest first."""
        if show:
            require_role(request.user, Role.VIEWER, show)
        found = await deps.runs.page(
            shows=[show] if show else None,
            ids=None if show else _visible_show_ids(request.user),
            workflow=workflow or None,
            state=_parse_state(in_state),
            before=parse_id(RunId, after) if after else None,
            most=limit + 1,
        )
        return paginate(found, limit, lambda run: run.id)

    @get("/{run:str}", opt=VIEW)
    async def get_run(self, request: ApiRequest, deps: Deps, run: RunPath, wait: WaitQuery = 0.0) -> WorkflowRunView:
        """Read a run with the state and result of each step, or wait for its end."""
        if not wait or request.is_head:
            return await _visible_run(request.user, deps, run)
        with deps.runs_watch.watching(parse_id(RunId, run)) as watch:
            found = await _visible_run(request.user, deps, run)
            if found.state.ended:
                return found
            request.auth.begin_wait()
            await request.run_while_connected(watch.wait(wait))
            return await deps.runs.get(found.id)

    @get("/{run:str}/timeline", opt=VIEW)
    async def read_timeline(self, request: ApiRequest, deps: Deps, run: RunPath) -> Page[RunTimelineEntry]:
        """Read the history of a run, in order."""
        return Page(await deps.runs.timeline((await _visible_run(request.user, deps, run)).id))

    @get("/{run:str}/events", opt=VIEW, media_type=MEDIA_TYPE)
    async def follow_run(
        self, request: ApiRequest, deps: Deps, run: RunPath, after: After = "", last: LastEventId = ""
    ) -> SseResponse:
        """Follow the history of a run from its first entry until its end."""
        found = await _visible_run(request.user, deps, run)
        source = open_history(deps.run_histories, found.id, last or after, partial(_run_event, found))
        return SseResponse(request, deps.streams, source)

    @get("/{run:str}/explain", opt=VIEW)
    async def explain_run(self, request: ApiRequest, deps: Deps, run: RunPath) -> RunExplanation:
        """Explain what a run waits for, soonest change first, with remedies; or how it ended."""
        found = await _visible_run(request.user, deps, run)
        explanation = await RunExplainer(deps.explainer).explain(found.id)
        return replace(explanation, jobs=tuple(redact_explanation(request.user, job) for job in explanation.jobs))

    @get("/{run:str}/saga", opt=VIEW)
    async def get_saga(self, request: ApiRequest, deps: Deps, run: RunPath) -> SagaView:
        """Show the compensations of a run and their states, last recorded first."""
        found = await _visible_run(request.user, deps, run)
        return await deps.runs.saga(found.show_id, str(found.id)) or SagaView("open", None, [])

    @post("/{run:str}/cancel", opt=SUBMIT, status_code=200)
    async def cancel_run(self, request: ApiRequest, deps: Deps, run: RunPath) -> RunChangeResult:
        """Cancel a run; its completed steps are compensated if the workflow says so."""
        found = await _visible_run(request.user, deps, run, Role.SUBMITTER)
        return await _changed_reply(deps, found, await deps.workflows.cancel(found.id, request.user.audited))

    @post("/{run:str}/pause", opt=SUBMIT, status_code=200)
    async def pause_run(self, request: ApiRequest, deps: Deps, run: RunPath) -> RunChangeResult:
        """Start no further steps; running steps continue."""
        found = await _visible_run(request.user, deps, run, Role.SUBMITTER)
        return await _changed_reply(deps, found, await deps.workflows.pause(found.id, request.user.audited))

    @post("/{run:str}/resume", opt=SUBMIT, status_code=200)
    async def resume_run(self, request: ApiRequest, deps: Deps, run: RunPath) -> RunChangeResult:
        """Resume a paused run."""
        found = await _visible_run(request.user, deps, run, Role.SUBMITTER)
        return await _changed_reply(deps, found, await deps.workflows.resume(found.id, request.user.audited))

    @post("/{run:str}/rerun", opt=SUBMIT)
    async def rerun_run(
        self, request: ApiRequest, deps: Deps, run: RunPath, data: JSONBody[RerunSpec]
    ) -> RunStartResult:
        """Start a new run from a step of an ended run, reusing the results of earlier steps."""
        found = await _visible_run(request.user, deps, run, Role.SUBMITTER)
        return await deps.workflows.rerun(found.id, data.step, request.user.audited, request.user.principal.name)

    @post("/{run:str}/rollback", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def roll_back_run(self, request: ApiRequest, deps: Deps, run: RunPath) -> RollbackResult:
        """Compensate an ended run, or retry failed compensations."""
        found = await _visible_run(request.user, deps, run, Role.OPERATOR)
        return RollbackResult(found.id, await deps.workflows.roll_back(found.id, request.user.audited))


def _run_event(run: WorkflowRunView, number: int, entry: RunHistoryEntry) -> Event:
    happened = entry.happened
    facts = {"workflow": run.workflow, "step": happened.step, "why": happened.why}
    return Event(
        id=str(number),
        at=entry.at,
        kind=event_kind(happened),
        show=run.show,
        job=JobId(happened.job) if happened.job is not None else None,
        run=run.id,
        facts={name: value for name, value in facts.items() if value},
    )


async def _visible_run(actor: Actor, deps: HttpDependencies, text: str, role: Role = Role.VIEWER) -> WorkflowRunView:
    """The run, with `role` checked. Raises NotFound for a show that the key cannot view."""
    run = parse_id(RunId, text)
    found = await deps.runs.get(run)
    try:
        require_role(actor, Role.VIEWER, found.show_id)
    except Forbidden:
        raise NotFound(f"There is no run {run}, or it is not kept any more.", run=str(run)) from None
    require_role(actor, role, found.show_id)
    return found


async def _changed_reply(deps: HttpDependencies, found: WorkflowRunView, changed: bool) -> RunChangeResult:
    return RunChangeResult(found.id, (await deps.runs.get(found.id)).state, changed)


def _visible_show_ids(actor: Actor) -> list[str] | None:
    shows = actor.shows_with_role(Role.VIEWER)
    return None if shows is None else [str(show) for show in shows]


def _parse_state(text: str) -> RunState | None:
    if not text:
        return None
    try:
        return RunState(text.upper())
    except ValueError:
        raise InvalidInput(f"{text[:20]!r} is not a run state: use one of {', '.join(RunState)}.") from None
