"""Outputs that the policy holds, keeps back or has redacted: looking at them, letting them out."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Response, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter

from rota.engine.outputs.review import TOKEN_MAX, OutputReviewer, ReviewState
from rota.model.access import Actor, Role, require_role
from rota.model.policy.outputs import OutputReviewRequest, OutputReviewResult, OutputSummary, OutputView
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, Page, paginate
from rota.server.http.permissions import Deps, requires
from rota.server.http.routes.job_results import OCTET_STREAM
from rota.server.http.visibility import visible_job

OutputPath = Annotated[int, PathParameter(ge=0, le=TOKEN_MAX, description="The id of an output.")]
After = Annotated[int | None, QueryParameter(ge=0, le=TOKEN_MAX, description="`next` of the page before.")]
PartQuery = Annotated[str, QueryParameter(max_length=300, description="`value`, or `artifact:NAME`.")]


class OutputReviewRoutes(Controller):
    path = "/outputs"
    tags = ("kept outputs",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_outputs(
        self,
        request: ApiRequest,
        desk: Deps,
        kept: Annotated[ReviewState | None, QueryParameter(description="Those in this state.")] = None,
        job: FromQuery[str | None] = None,
        after: After = None,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[OutputSummary]:
        """Those that are held, quarantined, redacted or were released, the newest first; nothing of what they hold."""
        of = (await visible_job(request.user, desk, job)).id if job is not None else None
        shows = request.user.shows_with_role(Role.VIEWER)
        found = await desk.outputs.page(shows=shows, state=kept, job=of, after=after, most=limit + 1)
        return paginate(found, limit, lambda line: line.id)

    @get("/{output:int}", opt=requires(Role.VIEWER, "somewhere"))
    async def get_output(self, request: ApiRequest, desk: Deps, output: OutputPath) -> OutputView:
        """Every check of it, with what was found where; nothing of what it holds."""
        return await _visible_output(request.user, desk, output, Role.VIEWER)

    @post("/{output:int}/reveal", opt=requires(Role.OPERATOR, "somewhere"), status_code=200, media_type=OCTET_STREAM)
    async def reveal_output(
        self, request: ApiRequest, desk: Deps, output: OutputPath, part: PartQuery = "value"
    ) -> Response[bytes]:
        """What the frame left, as it left it, for whoever decides about it. That it was read is in the audit trail."""
        await _visible_output(request.user, desk, output, Role.OPERATOR)
        data = await desk.outputs.content(output, _decider(request.user), part)
        return Response(data, media_type=OCTET_STREAM)

    @post("/{output:int}/release", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def release_output(
        self, request: ApiRequest, desk: Deps, output: OutputPath, data: JSONBody[OutputReviewRequest]
    ) -> OutputReviewResult:
        """Let it be read as the frame left it. Nothing runs again."""
        await _visible_output(request.user, desk, output, Role.OPERATOR)
        return await desk.outputs.release(output, _decider(request.user), data.reason)

    @post("/{output:int}/redact", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def redact_output(
        self, request: ApiRequest, desk: Deps, output: OutputPath, data: JSONBody[OutputReviewRequest]
    ) -> OutputReviewResult:
        """Let it be read without what scanners find in it, or without any of it."""
        await _visible_output(request.user, desk, output, Role.OPERATOR)
        return await desk.outputs.redact(output, _decider(request.user), data.reason, whole=data.whole)


async def _visible_output(actor: Actor, desk: HttpDependencies, output: int, role: Role) -> OutputView:
    """An output of a show that the key may not look into is not there."""
    told = await desk.outputs.get(output)
    if not actor.has_role(Role.VIEWER, told.line.show):
        raise desk.outputs.not_found(output)
    require_role(actor, role, told.line.show)
    return told


def _decider(actor: Actor) -> OutputReviewer:
    return OutputReviewer(actor.audited, (actor.name,))
