"""Jobs: submit (singly, in bulk or in a batch), list, read, wait, cancel, retry, remediate, explain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Final

import msgspec
from litestar import Controller, get, post, put
from litestar.params import FromQuery, HeaderParameter, JSONBody, PathParameter, QueryParameter

from rota.api.explanation import JobExplanation
from rota.api.jobs import CancelJobReply, JobSummary, JobView, RemediateRequest
from rota.api.pages import Page
from rota.api.submission import (
    BulkSubmitReply,
    SubmitBatchAnswer,
    SubmitBatchItem,
    SubmitBatchReply,
    SubmitBatchRequest,
    SubmitProblem,
)
from rota.engine.submission.bulk_key import BulkKey
from rota.engine.submission.submitter import validate_decoded
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.telemetry import tracing
from rota.model.access import Actor, Role, require_submit_role
from rota.model.errors import Forbidden, InvalidInput, RotaError
from rota.model.ids import JobId, parse_id
from rota.model.jobs.submission import ResubmitResult, Submission, SubmitResult
from rota.model.jobs.validation import check_idempotency_key
from rota.server.http.bulk_body import BULK_BYTES_MAX, read_submissions
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.job_filter import parse_filter
from rota.server.http.pagination import LIMIT_DEFAULT, Limit
from rota.server.http.permissions import Deps, requires
from rota.server.http.problem_details import ProblemResponse, response_for_defect, response_for_error
from rota.server.http.visibility import JobPath, check_dependencies_visible, redact_explanation, visible_job

BULK_MAX: Final = 10_000
WAIT_S_MAX: Final = 60.0
KEY_CHARS_MAX: Final = 200

JobFilterQuery = Annotated[
    str,
    QueryParameter(
        description="`state:RUNNING show:film topic:render reason:quota_job label:shot=12`, each at most once.",
        max_length=1024,
    ),
]
WaitQuery = Annotated[
    float, QueryParameter(ge=0, le=WAIT_S_MAX, description="Wait up to this many seconds for its end.")
]
IdempotencyKeyHeader = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        max_length=KEY_CHARS_MAX,
        description="A repeated submission with the same key is the same job.",
    ),
]


class JobRoutes(Controller):
    path = "/jobs"
    tags = ("jobs",)

    @post(opt=requires(Role.SUBMITTER, "somewhere"))
    async def submit_job(
        self, request: ApiRequest, data: JSONBody[Submission], deps: Deps, key: IdempotencyKeyHeader = None
    ) -> SubmitResult:
        """Submit one job."""
        return await submit_one(request.user, deps, data, key, request.headers.get("traceparent"))

    @post("/bulk", opt=requires(Role.SUBMITTER, "somewhere"), request_max_body_size=BULK_BYTES_MAX)
    async def submit_jobs(self, request: ApiRequest, deps: Deps) -> BulkSubmitReply:
        """Submit up to ten thousand jobs, as JSON lines or one msgpack array: all or none."""
        return await self._submit_bulk(request, deps, None)

    @put("/bulk/{key:str}", opt=requires(Role.SUBMITTER, "somewhere"), request_max_body_size=BULK_BYTES_MAX)
    async def submit_jobs_once(
        self,
        request: ApiRequest,
        deps: Deps,
        key: Annotated[str, PathParameter(description="An idempotency key.", max_length=KEY_CHARS_MAX)],
    ) -> BulkSubmitReply:
        """The same with one idempotency key for all: a repetition of the request returns the same jobs."""
        return await self._submit_bulk(request, deps, key)

    async def _submit_bulk(self, request: ApiRequest, deps: Deps, key: str | None) -> BulkSubmitReply:
        _continue_trace(request.headers.get("traceparent"))
        if key is not None:
            check_idempotency_key(key)
        digest = sha256()
        decoded = await read_submissions(request, max_count=BULK_MAX, digest=digest if key is not None else None)
        for one in {(each.show, each.priority): each for each in decoded}.values():
            require_submit_role(request.user, one)
        submissions = [_with_principal(each, request.user) for each in decoded]
        await check_dependencies_visible(request.user, deps, submissions)
        plans = validate_decoded(submissions)
        if key is None:
            return BulkSubmitReply(await deps.submitter.write(plans))
        if any(plan.key is not None for plan in plans):
            raise InvalidInput(
                "A submission has an idempotency key of its own: remove it, or send the bulk without a key for all."
            )
        digest.update(submissions[0].principal.encode())
        bulk = BulkKey(plans[0].show, key, digest.digest())
        return BulkSubmitReply(await deps.submitter.write(plans, bulk=bulk))

    @post("/batch", opt=requires(Role.SUBMITTER, "somewhere"))
    async def submit_batch(
        self, request: ApiRequest, data: JSONBody[SubmitBatchRequest], deps: Deps
    ) -> SubmitBatchReply:
        """Submit up to a thousand jobs that do not depend on each other's success: each has its own answer."""
        return SubmitBatchReply(await submit_items(request.user, deps, data.items))

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_jobs(
        self,
        request: ApiRequest,
        deps: Deps,
        q: JobFilterQuery = "",
        after: FromQuery[str | None] = None,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[JobSummary]:
        """List jobs, newest first. A short page can have a next one: scans for rare jobs are bounded."""
        job_filter = parse_filter(q, request.user)
        found = await deps.jobs.list(job_filter, after=parse_id(JobId, after) if after else None, most=limit)
        return Page(found.items, str(found.next) if found.next else None)

    @get("/{job:str}", opt=requires(Role.VIEWER, "somewhere"))
    async def get_job(self, request: ApiRequest, deps: Deps, job: JobPath, wait: WaitQuery = 0.0) -> JobView:
        """Read a job, or wait for its end."""
        return await job_after_wait(request, deps, job, wait)

    @post("/{job:str}/cancel", opt=requires(Role.SUBMITTER, "somewhere"), status_code=200)
    async def cancel_job(self, request: ApiRequest, deps: Deps, job: JobPath) -> CancelJobReply:
        """Cancel a job: waiting frames immediately, running ones when their worker has stopped them."""
        found = await visible_job(request.user, deps, job, Role.SUBMITTER)
        changed = await deps.ender.cancel(found.id, request.user.audited)
        return CancelJobReply(found.id, (await deps.jobs.get(found.id)).state, changed)

    @post("/{job:str}/retry", opt=requires(Role.SUBMITTER, "somewhere"))
    async def retry_job(
        self, request: ApiRequest, deps: Deps, job: JobPath, every_frame: FromQuery[bool] = False
    ) -> ResubmitResult:
        """Run the failed frames of a job, or all of them, as a new job."""
        found = await visible_job(request.user, deps, job, Role.SUBMITTER)
        async with deps.database.transaction() as tx:
            retried = await deps.reopener.retry_job(
                found.id, every_frame=every_frame, by=request.user.principal.name, on=tx
            )
            detail = {"job": str(retried.job), "frames": retried.frames}
            await audit.append(tx, [AuditEntry(request.user.audited, "job.retry", f"job:{found.id}", detail)])
        deps.teller.emit_job_retried(found.id, found.show, retried.job)
        return retried

    @post("/{job:str}/remediate", opt=requires(Role.SUBMITTER, "somewhere"))
    async def remediate_job(
        self, request: ApiRequest, deps: Deps, job: JobPath, data: JSONBody[RemediateRequest]
    ) -> ResubmitResult:
        """Submit a denied job again as the policy suggests: a new job with a safer topic, capability or labels."""
        found = await visible_job(request.user, deps, job, Role.SUBMITTER)
        async with deps.database.transaction() as tx:
            remediated = await deps.reopener.remediate(
                found.id, data.remediation, by=request.user.principal.name, on=tx
            )
            detail = {"job": str(remediated.job), "remediation": data.remediation}
            await audit.append(tx, [AuditEntry(request.user.audited, "job.remediate", f"job:{found.id}", detail)])
        deps.teller.emit_job_retried(found.id, found.show, remediated.job)
        return remediated

    @get("/{job:str}/explain", opt=requires(Role.VIEWER, "somewhere"))
    async def explain_job(
        self, request: ApiRequest, deps: Deps, job: JobPath, layer: FromQuery[str | None] = None
    ) -> JobExplanation:
        """Explain why a job is not running: reasons, most important first, with remedies."""
        found = await visible_job(request.user, deps, job)
        return redact_explanation(request.user, await deps.explainer.explain(found.id, layer=layer))


async def submit_one(
    actor: Actor, deps: HttpDependencies, data: Submission, key: str | None, traceparent: str | None
) -> SubmitResult:
    """Submit one job, with the checks of every job that comes by HTTP."""
    _continue_trace(traceparent)
    require_submit_role(actor, data)
    submission = _with_idempotency_key(_with_principal(data, actor), key)
    if submission.after:
        await check_dependencies_visible(actor, deps, [submission])
    return await deps.together.submit(submission)


async def submit_items(
    actor: Actor, deps: HttpDependencies, items: Sequence[SubmitBatchItem]
) -> list[SubmitBatchAnswer]:
    return await asyncio.gather(*(_submit_item(actor, deps, item) for item in items))


async def _submit_item(actor: Actor, deps: HttpDependencies, item: SubmitBatchItem) -> SubmitBatchAnswer:
    """What a request with this submission alone would do. Runs in a task of its own, so the trace is only its own."""
    try:
        return SubmitBatchAnswer(result=await submit_one(actor, deps, item.submission, None, item.trace))
    except RotaError as error:
        return _refusal(response_for_error(error))
    except Exception as error:  # noqa: BLE001 - logged and answered, as the handler of a single submission does
        return _refusal(response_for_defect(error))


def _refusal(answer: ProblemResponse) -> SubmitBatchAnswer:
    problem = answer.problem
    return SubmitBatchAnswer(
        problem=SubmitProblem(
            status=problem.status,
            code=problem.code,
            detail=problem.detail,
            facts=problem.facts,
            retry_after_s=float(answer.headers.get("retry-after", 0)),
        )
    )


def _continue_trace(parent: str | None) -> None:
    """Make the jobs part of the client's trace."""
    if tracing.is_enabled() and parent:
        tracing.attach(parent)


def _with_principal(submission: Submission, actor: Actor) -> Submission:
    """Set the principal to that of the key; a key cannot submit for another one."""
    own = actor.principal.name
    compensation_principal = submission.compensation.principal if submission.compensation is not None else ""
    for principal in (submission.principal, compensation_principal):
        if principal and principal != own:
            raise Forbidden(f"The principal {own} cannot submit as {principal[:64]!r}: leave principal out.")
    return msgspec.structs.replace(submission, principal=own)


def _with_idempotency_key(submission: Submission, key: str | None) -> Submission:
    if not key or submission.idempotency_key == key:
        return submission
    if submission.idempotency_key:
        raise InvalidInput("The header Idempotency-Key and idempotency_key of the body differ: send one of them.")
    return msgspec.structs.replace(submission, idempotency_key=key)


async def job_after_wait(request: ApiRequest, deps: HttpDependencies, job: str, wait_s: float) -> JobView:
    """The job when it has ended, or after so many seconds."""
    if not wait_s or request.is_head:
        return await visible_job(request.user, deps, job)
    with deps.watch.watching(parse_id(JobId, job)) as watch:
        found = await visible_job(request.user, deps, job)
        if found.state.terminal:
            return found
        request.auth.begin_wait()
        await request.run_while_connected(watch.wait(wait_s))
        return await deps.jobs.get(found.id)
