"""Which jobs, and which parts of their explanations, a key can see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final
from uuid import UUID

import msgspec
from litestar.params import PathParameter

from rota.api.explanation import Cause, Holder, JobExplanation
from rota.api.jobs import JobView
from rota.model.access import Actor, Role, require_role
from rota.model.errors import NotFound
from rota.model.ids import JobId, ShowId, parse_id
from rota.model.jobs.submission import Submission
from rota.server.http.dependencies import HttpDependencies

JobPath = Annotated[str, PathParameter(description="The id of a job.")]
LOOKUP_BATCH_MAX: Final = 1000
_HIDDEN_ID: Final = UUID(int=0)


async def visible_job(actor: Actor, deps: HttpDependencies, job: str, role: Role = Role.VIEWER) -> JobView:
    """The job, with `role` checked. Raises NotFound for a show that the key cannot view."""
    found = await deps.jobs.get(parse_id(JobId, job))
    if not actor.has_role(Role.VIEWER, found.show):
        raise NotFound(f"There is no job {found.id}, or it is not kept any more.", job=str(found.id))
    require_role(actor, role, found.show)
    return found


async def check_dependencies_visible(actor: Actor, deps: HttpDependencies, submissions: Sequence[Submission]) -> None:
    """Depending on a job reveals how it ends, so the key must be able to view it."""
    dependencies = sorted({JobId(before) for submission in submissions for before in submission.after})
    if actor.shows_with_role(Role.VIEWER) is None:
        return
    for first in range(0, len(dependencies), LOOKUP_BATCH_MAX):
        batch = dependencies[first : first + LOOKUP_BATCH_MAX]
        shows = {job.id: job.show for job in await deps.jobs.get_many(batch)}
        for before in batch:
            if before not in shows or not actor.has_role(Role.VIEWER, shows[before]):
                raise NotFound(f"There is no job {before} to wait for, or it is not kept any more.", job=str(before))


def redact_explanation(actor: Actor, explained: JobExplanation) -> JobExplanation:
    """Hide the names of shows that the key cannot view; they may hold the missing resources."""
    if actor.shows_with_role(Role.VIEWER) is None:
        return explained
    layers = [
        msgspec.structs.replace(layer, reasons=_redact_causes(actor, layer.reasons)) for layer in explained.layers
    ]
    return msgspec.structs.replace(explained, reasons=_redact_causes(actor, explained.reasons), layers=tuple(layers))


def _redact_causes(actor: Actor, reasons: Sequence[Cause]) -> tuple[Cause, ...]:
    return tuple(
        msgspec.structs.replace(cause, holders=tuple(_redact_holder(actor, holder) for holder in cause.holders))
        for cause in reasons
    )


def _redact_holder(actor: Actor, holder: Holder) -> Holder:
    if holder.kind != "show" or actor.has_role(Role.VIEWER, ShowId(holder.id)):
        return holder
    return msgspec.structs.replace(holder, id=_HIDDEN_ID, name="another show")
