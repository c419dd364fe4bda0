"""Jobs: submitted one by one or thousands a request, looked at, waited for, cancelled, tried again."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from litestar import Controller, get, post
from litestar.params import FromQuery, HeaderParameter, JSONBody, QueryParameter

from rota.engine.explain_told import Explained
from rota.engine.jobs import Job, JobLine
from rota.engine.submit import plans_of
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.telemetry import tracing
from rota.model.access import Actor, Role, guard_submission
from rota.model.errors import Forbidden, InvalidInput
from rota.model.ids import JobId, parse_id
from rota.model.job import Reopened, Submission, Submitted
from rota.model.lifecycle import JobState
from rota.server.http.filters import parse_filter
from rota.server.http.lines import BYTES_MAX, read_many
from rota.server.http.pages import LIMIT, Limit, Page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.seen import JobPath, check_after, seen, told_to
from rota.server.http.wire import Ask

BULK_MAX: Final = 10_000
WAIT_S_MAX: Final = 60.0

Query = Annotated[
    str,
    QueryParameter(
        description="`state:RUNNING show:film topic:render reason:quota_job label:shot=12`, each at most once.",
        max_length=1024,
    ),
]
Wait = Annotated[
    float, QueryParameter(ge=0, le=WAIT_S_MAX, description="Answer once it has ended, or after so many seconds.")
]
Idempotency = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key", max_length=200, description="Repeated under the same key it is the same job."
    ),
]


class Cancelled(msgspec.Struct, frozen=True):
    job: JobId
    state: JobState
    changed: bool
    """False: it had ended before."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    remediation: str = ""
    """The id of one that its policy suggests; may be left out where it suggests one."""


class Several(msgspec.Struct, frozen=True):
    """In the order of the lines."""

    items: list[Submitted]


class JobRoutes(Controller):
    path = "/jobs"
    tags = ("jobs",)

    @post(opt=needs(Role.SUBMITTER, "somewhere"))
    async def submit_job(
        self, request: Ask, data: JSONBody[Submission], desk: AtDesk, key: Idempotency = None
    ) -> Submitted:
        """Submit one job."""
        _continue_trace(request)
        guard_submission(request.user, data)
        given = _keyed(_owned(data, request.user), key)
        await check_after(request.user, desk, [given])
        return await desk.together.submit(given)

    @post("/bulk", opt=needs(Role.SUBMITTER, "somewhere"), request_max_body_size=BYTES_MAX)
    async def submit_jobs(self, request: Ask, desk: AtDesk) -> Several:
        """Submit up to ten thousand jobs, a line of JSON each, or one array in msgpack: all of them or none."""
        _continue_trace(request)
        read = await read_many(request, most=BULK_MAX)
        for one in {(each.show, each.priority): each for each in read}.values():
            guard_submission(request.user, one)
        given = [_owned(each, request.user) for each in read]
        await check_after(request.user, desk, given)
        return Several(await desk.submitter.write(plans_of(given)))

    @get(opt=needs(Role.VIEWER, "somewhere"))
    async def find_jobs(
        self, request: Ask, desk: AtDesk, q: Query = "", after: FromQuery[str | None] = None, limit: Limit = LIMIT
    ) -> Page[JobLine]:
        """List jobs, the newest first. A page may be short and have a next one: rare jobs are looked for in steps."""
        wanted = parse_filter(q, request.user)
        found = await desk.jobs.list(wanted, after=parse_id(JobId, after) if after else None, most=limit)
        return Page(found.items, str(found.next) if found.next else None)

    @get("/{job:str}", opt=needs(Role.VIEWER, "somewhere"))
    async def get_job(self, request: Ask, desk: AtDesk, job: JobPath, wait: Wait = 0.0) -> Job:
        """Look at a job, or wait for its end."""
        found = await seen(request.user, desk, job)
        if wait and not found.state.terminal:
            request.auth.go_aside()
            await request.unless_gone(desk.watch.ended(found.id, wait))
            found = await desk.jobs.get(found.id)
        return found

    @post("/{job:str}/cancel", opt=needs(Role.SUBMITTER, "somewhere"), status_code=200)
    async def cancel_job(self, request: Ask, desk: AtDesk, job: JobPath) -> Cancelled:
        """End a job: what waits at once, what runs as soon as its worker has stopped it."""
        found = await seen(request.user, desk, job, Role.SUBMITTER)
        changed = await desk.ender.cancel(found.id, request.user.audited)
        return Cancelled(found.id, (await desk.jobs.get(found.id)).state, changed)

    @post("/{job:str}/retry", opt=needs(Role.SUBMITTER, "somewhere"))
    async def retry_job(
        self, request: Ask, desk: AtDesk, job: JobPath, every_frame: FromQuery[bool] = False
    ) -> Reopened:
        """Run what failed of a job, or all of it, as a new job."""
        found = await seen(request.user, desk, job, Role.SUBMITTER)
        async with desk.database.transaction() as tx:
            reopened = await desk.reopener.retry_job(found.id, every_frame=every_frame, by=request.user.name, on=tx)
            detail = {"job": str(reopened.job), "frames": reopened.frames}
            await audit.append(tx, [AuditEntry(request.user.audited, "job.retry", f"job:{found.id}", detail)])
        desk.teller.retried(found.id, found.show, reopened.job)
        return reopened

    @post("/{job:str}/remediate", opt=needs(Role.SUBMITTER, "somewhere"))
    async def remediate_job(self, request: Ask, desk: AtDesk, job: JobPath, data: JSONBody[Remedy]) -> Reopened:
        """Submit a denied job as its policy suggests, as a new job: under a safer topic, capability or labels."""
        found = await seen(request.user, desk, job, Role.SUBMITTER)
        async with desk.database.transaction() as tx:
            made = await desk.reopener.remediate(found.id, data.remediation, by=request.user.name, on=tx)
            detail = {"job": str(made.job), "remediation": data.remediation}
            await audit.append(tx, [AuditEntry(request.user.audited, "job.remediate", f"job:{found.id}", detail)])
        desk.teller.retried(found.id, found.show, made.job)
        return made

    @get("/{job:str}/explain", opt=needs(Role.VIEWER, "somewhere"))
    async def explain_job(
        self, request: Ask, desk: AtDesk, job: JobPath, layer: FromQuery[str | None] = None
    ) -> Explained:
        """Why it is not running, what is to be mended first at first, with what would help."""
        found = await seen(request.user, desk, job)
        return told_to(request.user, await desk.explainer.explain(found.id, layer=layer))


def _continue_trace(request: Ask) -> None:
    """Jobs belong to the trace of whoever sent them."""
    if tracing.on() and (parent := request.headers.get("traceparent")):
        tracing.enter(parent)


def _owned(submission: Submission, actor: Actor) -> Submission:
    """In the name of whoever sent it: nobody submits as somebody else."""
    undone_by = submission.compensation.principal if submission.compensation is not None else ""
    for principal in (submission.principal, undone_by):
        if principal and principal != actor.name:
            raise Forbidden(f"The key {actor.name} cannot submit as principal {principal[:64]!r}: leave principal out.")
    return msgspec.structs.replace(submission, principal=actor.name)


def _keyed(submission: Submission, key: str | None) -> Submission:
    if not key or submission.idempotency_key == key:
        return submission
    if submission.idempotency_key:
        raise InvalidInput("The header Idempotency-Key and idempotency_key of the body differ: send one of them.")
    return msgspec.structs.replace(submission, idempotency_key=key)
