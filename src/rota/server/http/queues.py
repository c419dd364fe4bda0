"""Queues with their exact counts, and what was given up: dead letters.

Dead letters of all shows, and of no show at all, lie in one pile. A key that is not good for every show names a job of
its own to look at that job's.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, QueryParameter

from rota.accounting.items import unknown
from rota.engine import queues
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.model.access import Actor, Role, guard
from rota.model.errors import InvalidInput
from rota.model.farm import Changed, QueueTold
from rota.model.office import Letters, Settled
from rota.queue import DeadLetter, DeadLetterFilter
from rota.queue.dead_letters import Kind
from rota.server.http.desk import Desk
from rota.server.http.pages import LIMIT, Limit, Page, page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.seen import seen
from rota.server.http.wire import Ask

QueueName = Annotated[
    str, QueryParameter(max_length=300, description="The name of a queue; no part of the path, since it holds slashes.")
]
Code = Annotated[str | None, QueryParameter(max_length=100)]
Cursor = Annotated[int, QueryParameter(ge=0, le=2**63 - 1, description="`next` of the page before.")]
IDS_IN_AUDIT = 20


class QueueRoutes(Controller):
    path = "/queues"
    tags = ("queues",)

    @get(opt=needs(Role.VIEWER, "somewhere"))
    async def find_queues(self, request: Ask, desk: AtDesk) -> Page[QueueTold]:
        """Queues with frames of shows that the key may look into; counts are exact."""
        found = await queues.told(desk.queue)
        may = request.user.may
        return Page([one for one, owner in found.values() if may(Role.VIEWER, owner.show if owner else None)])

    @post("/pause", opt=needs(Role.OPERATOR, "somewhere"), status_code=200)
    async def pause_queue(self, request: Ask, desk: AtDesk, queue: QueueName) -> Changed:
        """Nothing more of it starts; what runs goes on."""
        return await _pause(request.user, desk, queue, paused=True)

    @post("/resume", opt=needs(Role.OPERATOR, "somewhere"), status_code=200)
    async def resume_queue(self, request: Ask, desk: AtDesk, queue: QueueName) -> Changed:
        return await _pause(request.user, desk, queue, paused=False)


class DeadLetterRoutes(Controller):
    path = "/dlq"
    tags = ("dead letters",)

    @get(opt=needs(Role.VIEWER, "somewhere"))
    async def find_dead_letters(
        self,
        request: Ask,
        desk: AtDesk,
        kind: FromQuery[Kind | None] = None,
        reason: Code = None,
        queue: Annotated[str | None, QueryParameter(max_length=300)] = None,
        job: FromQuery[str | None] = None,
        after: Cursor = 0,
        limit: Limit = LIMIT,
    ) -> Page[DeadLetter]:
        """What was given up, the oldest first; without what it was called with."""
        of = (await seen(request.user, desk, job)).id if job is not None else None
        if of is None:
            guard(request.user, Role.VIEWER)
        which = DeadLetterFilter(kind=kind, reason=reason, queue=queue, job=of)
        letters = await desk.queue.dead_letters.find(which, after=after, most=limit + 1)
        found = [msgspec.structs.replace(letter, payload=None) for letter in letters]
        return page(found, limit, lambda letter: letter.id)

    @post("/retry", opt=needs(Role.OPERATOR, "somewhere"), status_code=200)
    async def retry_dead_letters(self, request: Ask, desk: AtDesk, data: JSONBody[Letters]) -> Settled:
        """Run frames and jobs among these again, as new jobs; ten thousand at once."""
        which = await _which(request.user, desk, data)
        async with desk.database.transaction() as tx:
            retried = await desk.reopener.retry_letters(which, by=request.user.name, on=tx)
            jobs = [str(one.job) for one in retried.jobs]
            await audit.append(tx, [_entry(request.user, "dlq.retry", retried.gone, jobs)])
        return Settled(retried.gone, retried.jobs)

    @post("/purge", opt=needs(Role.OPERATOR, "somewhere"), status_code=200)
    async def purge_dead_letters(self, request: Ask, desk: AtDesk, data: JSONBody[Letters]) -> Settled:
        """Forget these; ten thousand at once."""
        which = await _which(request.user, desk, data)
        async with desk.database.transaction() as tx:
            gone = await desk.queue.dead_letters.purge(which, on=tx)
            await audit.append(tx, [_entry(request.user, "dlq.purge", gone, [])])
        return Settled(gone)


async def _pause(actor: Actor, desk: Desk, name: str, *, paused: bool) -> Changed:
    found = await queues.told(desk.queue)
    may_see = {
        queue: owner for queue, (_, owner) in found.items() if actor.may(Role.VIEWER, owner.show if owner else None)
    }
    if name not in may_see:
        raise unknown("queue", name, may_see)
    owner = may_see[name]
    guard(actor, Role.OPERATOR, owner.show if owner else None)
    return Changed(name=name, changed=await queues.set_paused(desk.queue, name, actor.audited, paused=paused))


async def _which(actor: Actor, desk: Desk, given: Letters) -> DeadLetterFilter:
    if given == Letters():
        raise InvalidInput("Say which dead letters: by ids, kind, reason, queue or job.")
    if given.job is None:
        guard(actor, Role.OPERATOR)
    else:
        await seen(actor, desk, str(given.job), Role.OPERATOR)
    return DeadLetterFilter(ids=given.ids, kind=given.kind, reason=given.reason, queue=given.queue, job=given.job)


def _entry(actor: Actor, action: str, gone: list[int], jobs: list[str]) -> AuditEntry:
    detail = {"number": len(gone), "first_ids": gone[:IDS_IN_AUDIT], "jobs": jobs[:IDS_IN_AUDIT]}
    return AuditEntry(actor.audited, action, "dead_letters", detail)
