"""Queues with their exact counts, and what was given up: dead letters.

Dead letters of all shows, and of no show at all, lie in one pile. A key that is not good for every show names a job of
its own to look at that job's.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, QueryParameter

from rota.accounting.resources import unknown_name_error
from rota.api.admin import DeadLetterActionResult, DeadLetterSelector
from rota.api.resources import ChangeResult, QueueView
from rota.engine.queries import queues
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.model.access import Actor, Role, require_role
from rota.model.errors import InvalidInput
from rota.queue import DeadLetter, DeadLetterFilter
from rota.queue.dead_letters import DeadLetterKind
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, Page, paginate
from rota.server.http.permissions import Deps, requires
from rota.server.http.visibility import visible_job

QueueName = Annotated[
    str, QueryParameter(max_length=300, description="The name of a queue; no part of the path, since it holds slashes.")
]
ReasonQuery = Annotated[str | None, QueryParameter(max_length=100)]
Cursor = Annotated[int, QueryParameter(ge=0, le=2**63 - 1, description="`next` of the page before.")]
IDS_IN_AUDIT = 20


class QueueRoutes(Controller):
    path = "/queues"
    tags = ("queues",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_queues(self, request: ApiRequest, desk: Deps) -> Page[QueueView]:
        """Queues with frames of shows that the key may look into; counts are exact."""
        found = await queues.queue_views(desk.queue)
        may = request.user.has_role
        return Page([one for one, owner in found.values() if may(Role.VIEWER, owner.show if owner else None)])

    @post("/pause", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def pause_queue(self, request: ApiRequest, desk: Deps, queue: QueueName) -> ChangeResult:
        """Nothing more of it starts; what runs goes on."""
        return await _set_paused(request.user, desk, queue, paused=True)

    @post("/resume", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def resume_queue(self, request: ApiRequest, desk: Deps, queue: QueueName) -> ChangeResult:
        return await _set_paused(request.user, desk, queue, paused=False)


class DeadLetterRoutes(Controller):
    path = "/dlq"
    tags = ("dead letters",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_dead_letters(
        self,
        request: ApiRequest,
        desk: Deps,
        kind: FromQuery[DeadLetterKind | None] = None,
        reason: ReasonQuery = None,
        queue: Annotated[str | None, QueryParameter(max_length=300)] = None,
        job: FromQuery[str | None] = None,
        after: Cursor = 0,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[DeadLetter]:
        """What was given up, the oldest first; without what it was called with."""
        of = (await visible_job(request.user, desk, job)).id if job is not None else None
        if of is None:
            require_role(request.user, Role.VIEWER)
        which = DeadLetterFilter(kind=kind, reason=reason, queue=queue, job=of)
        letters = await desk.queue.dead_letters.find(which, after=after, most=limit + 1)
        found = [msgspec.structs.replace(letter, payload=None) for letter in letters]
        return paginate(found, limit, lambda letter: letter.id)

    @post("/retry", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def retry_dead_letters(
        self, request: ApiRequest, desk: Deps, data: JSONBody[DeadLetterSelector]
    ) -> DeadLetterActionResult:
        """Run frames and jobs among these again, as new jobs; ten thousand at once."""
        which = await _dead_letter_filter(request.user, desk, data)
        async with desk.database.transaction() as tx:
            retried = await desk.reopener.retry_dead_letters(which, by=request.user.name, on=tx)
            jobs = [str(one.job) for one in retried.jobs]
            await audit.append(tx, [_audit_entry(request.user, "dlq.retry", retried.gone, jobs)])
        return DeadLetterActionResult(retried.gone, retried.jobs)

    @post("/purge", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def purge_dead_letters(
        self, request: ApiRequest, desk: Deps, data: JSONBody[DeadLetterSelector]
    ) -> DeadLetterActionResult:
        """Forget these; ten thousand at once."""
        which = await _dead_letter_filter(request.user, desk, data)
        async with desk.database.transaction() as tx:
            gone = await desk.queue.dead_letters.purge(which, on=tx)
            await audit.append(tx, [_audit_entry(request.user, "dlq.purge", gone, [])])
        return DeadLetterActionResult(gone)


async def _set_paused(actor: Actor, desk: HttpDependencies, name: str, *, paused: bool) -> ChangeResult:
    found = await queues.queue_views(desk.queue)
    may_see = {
        queue: owner
        for queue, (_, owner) in found.items()
        if actor.has_role(Role.VIEWER, owner.show if owner else None)
    }
    if name not in may_see:
        raise unknown_name_error("queue", name, may_see)
    owner = may_see[name]
    require_role(actor, Role.OPERATOR, owner.show if owner else None)
    return ChangeResult(name=name, changed=await queues.set_paused(desk.queue, name, actor.audited, paused=paused))


async def _dead_letter_filter(actor: Actor, desk: HttpDependencies, given: DeadLetterSelector) -> DeadLetterFilter:
    if given == DeadLetterSelector():
        raise InvalidInput("Say which dead letters: by ids, kind, reason, queue or job.")
    if given.job is None:
        require_role(actor, Role.OPERATOR)
    else:
        await visible_job(actor, desk, str(given.job), Role.OPERATOR)
    return DeadLetterFilter(ids=given.ids, kind=given.kind, reason=given.reason, queue=given.queue, job=given.job)


def _audit_entry(actor: Actor, action: str, gone: list[int], jobs: list[str]) -> AuditEntry:
    detail = {"number": len(gone), "first_ids": gone[:IDS_IN_AUDIT], "jobs": jobs[:IDS_IN_AUDIT]}
    return AuditEntry(actor.audited, action, "dead_letters", detail)
