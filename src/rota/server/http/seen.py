"""Jobs, and what is told of them, as a key may see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final
from uuid import UUID

import msgspec
from litestar.params import PathParameter

from rota.engine.explain_told import Cause, Explained, Holder
from rota.engine.jobs import Job
from rota.model.access import Actor, Role, guard
from rota.model.errors import NotFound
from rota.model.ids import JobId, ShowId, parse_id
from rota.model.job import Submission
from rota.server.http.desk import Desk

JobPath = Annotated[str, PathParameter(description="The id of a job.")]
LOOKED_AT: Final = 1000
_NOBODY: Final = UUID(int=0)


async def seen(actor: Actor, desk: Desk, job: str, role: Role = Role.VIEWER) -> Job:
    """A job of a show that the key may not look into is not there."""
    found = await desk.jobs.get(parse_id(JobId, job))
    if not actor.may(Role.VIEWER, found.show):
        raise NotFound(f"There is no job {found.id}, or it is not kept any more.", job=str(found.id))
    guard(actor, role, found.show)
    return found


async def check_after(actor: Actor, desk: Desk, given: Sequence[Submission]) -> None:
    """Who waits for a job learns how it ends, so it must be one that they may look at."""
    named = sorted({JobId(before) for submission in given for before in submission.after})
    if actor.limited_to(Role.VIEWER) is None:
        return
    for first in range(0, len(named), LOOKED_AT):
        some = named[first : first + LOOKED_AT]
        shows = {job.id: job.show for job in await desk.jobs.many(some)}
        for before in some:
            if before not in shows or not actor.may(Role.VIEWER, shows[before]):
                raise NotFound(f"There is no job {before} to wait for, or it is not kept any more.", job=str(before))


def told_to(actor: Actor, explained: Explained) -> Explained:
    """Without the names of shows that the key may not look into, which may use what is missing."""
    if actor.limited_to(Role.VIEWER) is None:
        return explained
    layers = [msgspec.structs.replace(layer, reasons=_told(actor, layer.reasons)) for layer in explained.layers]
    return msgspec.structs.replace(explained, reasons=_told(actor, explained.reasons), layers=tuple(layers))


def _told(actor: Actor, reasons: Sequence[Cause]) -> tuple[Cause, ...]:
    return tuple(
        msgspec.structs.replace(cause, holders=tuple(_holder(actor, holder) for holder in cause.holders))
        for cause in reasons
    )


def _holder(actor: Actor, holder: Holder) -> Holder:
    if holder.kind != "show" or actor.may(Role.VIEWER, ShowId(holder.id)):
        return holder
    return msgspec.structs.replace(holder, id=_NOBODY, name="another show")
