"""Queues with exact counts, and dead letters.

Dead letters of all shows share one list. A key without the role in every show must name one of its jobs to read that
job's dead letters.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, QueryParameter

from rota.accounting.resources import unknown_name_error
from rota.api.admin import DeadLetter, DeadLetterActionResult, DeadLetterKind, DeadLetterSelector
from rota.api.pages import Page
from rota.api.resources import ChangeResult, QueueView
from rota.engine.queries import queues
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.model.access import Actor, Role, require_role
from rota.model.errors import InvalidInput
from rota.queue import DeadLetterFilter
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, paginate
from rota.server.http.permissions import Deps, requires
from rota.server.http.visibility import visible_job

QueueName = Annotated[
    str,
    QueryParameter(max_length=300, description="The name of a queue; not in the path, because names contain slashes."),
]
ReasonQuery = Annotated[str | None, QueryParameter(max_length=100)]
Cursor = Annotated[int, QueryParameter(ge=0, le=2**63 - 1, description="`next` of the previous page.")]
IDS_IN_AUDIT = 20


class QueueRoutes(Controller):
    path = "/queues"
    tags = ("queues",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_queues(self, request: ApiRequest, deps: Deps) -> Page[QueueView]:
        """List the queues of shows that the key can view, with exact counts."""
        found = await queues.queue_views(deps.queue)
        has_role = request.user.has_role
        return Page([one for one, owner in found.values() if has_role(Role.VIEWER, owner.show if owner else None)])

    @post("/pause", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def pause_queue(self, request: ApiRequest, deps: Deps, queue: QueueName) -> ChangeResult:
        """Start nothing more from a queue; running frames continue."""
        return await _set_paused(request.user, deps, queue, paused=True)

    @post("/resume", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def resume_queue(self, request: ApiRequest, deps: Deps, queue: QueueName) -> ChangeResult:
        return await _set_paused(request.user, deps, queue, paused=False)


class DeadLetterRoutes(Controller):
    path = "/dlq"
    tags = ("dead letters",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_dead_letters(
        self,
        request: ApiRequest,
        deps: Deps,
        kind: FromQuery[DeadLetterKind | None] = None,
        reason: ReasonQuery = None,
        queue: Annotated[str | None, QueryParameter(max_length=300)] = None,
        job: FromQuery[str | None] = None,
        after: Cursor = 0,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[DeadLetter]:
        """List dead letters, oldest first, without their payloads."""
        of = (await visible_job(request.user, deps, job)).id if job is not None else None
        if of is None:
            require_role(request.user, Role.VIEWER)
        selection = DeadLetterFilter(kind=kind, reason=reason, queue=queue, job=of)
        dead_letters = await deps.queue.dead_letters.find(selection, after=after, most=limit + 1)
        found = [msgspec.structs.replace(dead_letter, payload=None) for dead_letter in dead_letters]
        return paginate(found, limit, lambda dead_letter: dead_letter.id)

    @post("/retry", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def retry_dead_letters(
        self, request: ApiRequest, deps: Deps, data: JSONBody[DeadLetterSelector]
    ) -> DeadLetterActionResult:
        """Run the selected frames and jobs again as new jobs; at most ten thousand per call."""
        selection = await _dead_letter_filter(request.user, deps, data)
        async with deps.database.transaction() as tx:
            retried = await deps.reopener.retry_dead_letters(selection, by=request.user.principal.name, on=tx)
            jobs = [str(one.job) for one in retried.jobs]
            await audit.append(tx, [_audit_entry(request.user, "dlq.retry", retried.gone, jobs)])
        return DeadLetterActionResult(retried.gone, retried.jobs)

    @post("/purge", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def purge_dead_letters(
        self, request: ApiRequest, deps: Deps, data: JSONBody[DeadLetterSelector]
    ) -> DeadLetterActionResult:
        """Delete the selected dead letters; at most ten thousand per call."""
        selection = await _dead_letter_filter(request.user, deps, data)
        async with deps.database.transaction() as tx:
            removed = await deps.queue.dead_letters.purge(selection, on=tx)
            await audit.append(tx, [_audit_entry(request.user, "dlq.purge", removed, [])])
        return DeadLetterActionResult(removed)


async def _set_paused(actor: Actor, deps: HttpDependencies, name: str, *, paused: bool) -> ChangeResult:
    found = await queues.queue_views(deps.queue)
    visible = {
        queue: owner
        for queue, (_, owner) in found.items()
        if actor.has_role(Role.VIEWER, owner.show if owner else None)
    }
    if name not in visible:
        raise unknown_name_error("queue", name, visible)
    owner = visible[name]
    require_role(actor, Role.OPERATOR, owner.show if owner else None)
    return ChangeResult(name=name, changed=await queues.set_paused(deps.queue, name, actor.audited, paused=paused))


async def _dead_letter_filter(actor: Actor, deps: HttpDependencies, selector: DeadLetterSelector) -> DeadLetterFilter:
    if selector == DeadLetterSelector():
        raise InvalidInput("No dead letters are selected: send ids, kind, reason, queue or job.")
    if selector.job is None:
        require_role(actor, Role.OPERATOR)
    else:
        await visible_job(actor, deps, str(selector.job), Role.OPERATOR)
    return DeadLetterFilter(
        ids=selector.ids, kind=selector.kind, reason=selector.reason, queue=selector.queue, job=selector.job
    )


def _audit_entry(actor: Actor, action: str, removed: list[int], jobs: list[str]) -> AuditEntry:
    detail = {"number": len(removed), "first_ids": removed[:IDS_IN_AUDIT], "jobs": jobs[:IDS_IN_AUDIT]}
    return AuditEntry(actor.audited, action, "dead_letters", detail)
