"""Outputs that the policy holds, keeps back or has redacted: looking at them, letting them out."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Response, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter

from rota.engine.outputs_desk import TOKEN_LAST, Decider, OutputState
from rota.model.access import Actor, Role, guard
from rota.model.output import OutputChanged, OutputDecision, OutputLine, OutputTold
from rota.server.http.desk import Desk
from rota.server.http.jobs_out import BYTES
from rota.server.http.pages import LIMIT, Limit, Page, page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.seen import seen
from rota.server.http.wire import Ask

OutputPath = Annotated[int, PathParameter(ge=0, le=TOKEN_LAST, description="The id of an output.")]
After = Annotated[int | None, QueryParameter(ge=0, le=TOKEN_LAST, description="`next` of the page before.")]
Part = Annotated[str, QueryParameter(max_length=300, description="`value`, or `artifact:NAME`.")]


class KeptOutputRoutes(Controller):
    path = "/outputs"
    tags = ("kept outputs",)

    @get(opt=needs(Role.VIEWER, "somewhere"))
    async def find_outputs(
        self,
        request: Ask,
        desk: AtDesk,
        kept: Annotated[OutputState | None, QueryParameter(description="Those in this state.")] = None,
        job: FromQuery[str | None] = None,
        after: After = None,
        limit: Limit = LIMIT,
    ) -> Page[OutputLine]:
        """Those that are held, quarantined, redacted or were released, the newest first; nothing of what they hold."""
        of = (await seen(request.user, desk, job)).id if job is not None else None
        shows = request.user.limited_to(Role.VIEWER)
        found = await desk.outputs.page(shows=shows, state=kept, job=of, after=after, most=limit + 1)
        return page(found, limit, lambda line: line.id)

    @get("/{output:int}", opt=needs(Role.VIEWER, "somewhere"))
    async def get_output(self, request: Ask, desk: AtDesk, output: OutputPath) -> OutputTold:
        """Every check of it, with what was found where; nothing of what it holds."""
        return await _told(request.user, desk, output, Role.VIEWER)

    @post("/{output:int}/reveal", opt=needs(Role.OPERATOR, "somewhere"), status_code=200, media_type=BYTES)
    async def reveal_output(
        self, request: Ask, desk: AtDesk, output: OutputPath, part: Part = "value"
    ) -> Response[bytes]:
        """What the frame left, as it left it, for whoever decides about it. That it was read is in the audit trail."""
        await _told(request.user, desk, output, Role.OPERATOR)
        data = await desk.outputs.content(output, _decider(request.user), part)
        return Response(data, media_type=BYTES)

    @post("/{output:int}/release", opt=needs(Role.OPERATOR, "somewhere"), status_code=200)
    async def release_output(
        self, request: Ask, desk: AtDesk, output: OutputPath, data: JSONBody[OutputDecision]
    ) -> OutputChanged:
        """Let it be read as the frame left it. Nothing runs again."""
        await _told(request.user, desk, output, Role.OPERATOR)
        return await desk.outputs.release(output, _decider(request.user), data.reason)

    @post("/{output:int}/redact", opt=needs(Role.OPERATOR, "somewhere"), status_code=200)
    async def redact_output(
        self, request: Ask, desk: AtDesk, output: OutputPath, data: JSONBody[OutputDecision]
    ) -> OutputChanged:
        """Let it be read without what scanners find in it, or without any of it."""
        await _told(request.user, desk, output, Role.OPERATOR)
        return await desk.outputs.redact(output, _decider(request.user), data.reason, whole=data.whole)


async def _told(actor: Actor, desk: Desk, output: int, role: Role) -> OutputTold:
    """An output of a show that the key may not look into is not there."""
    told = await desk.outputs.get(output)
    if not actor.may(Role.VIEWER, told.line.show):
        raise desk.outputs.unknown(output)
    guard(actor, role, told.line.show)
    return told


def _decider(actor: Actor) -> Decider:
    return Decider(actor.audited, (actor.name,))
