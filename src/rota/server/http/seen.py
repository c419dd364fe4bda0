"""Jobs as a key may see them."""

from __future__ import annotations

from typing import Annotated

from litestar.params import PathParameter

from rota.engine.jobs import Job
from rota.model.access import Actor, Role, guard
from rota.model.errors import NotFound
from rota.model.ids import JobId, parse_id
from rota.server.http.desk import Desk

JobPath = Annotated[str, PathParameter(description="The id of a job.")]


async def seen(actor: Actor, desk: Desk, job: str, role: Role = Role.VIEWER) -> Job:
    """A job of a show that the key may not look into is not there."""
    found = await desk.jobs.get(parse_id(JobId, job))
    if not actor.may(Role.VIEWER, found.show):
        raise NotFound(f"There is no job {found.id}, or it is not kept any more.", job=str(found.id))
    guard(actor, role, found.show)
    return found
