"""Outputs that the policy holds, quarantines or redacts: read, reveal, release and redact."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter
from litestar.response import Stream

from rota.api.pages import Page
from rota.engine.outputs.review import TOKEN_MAX, OutputReviewer, ReviewState
from rota.model.access import Actor, Role, require_role
from rota.model.policy.outputs import OutputReviewRequest, OutputReviewResult, OutputSummary, OutputView
from rota.server.http.blob_stream import OCTET_STREAM, stream_blob, stream_bytes
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, paginate
from rota.server.http.permissions import Deps, requires
from rota.server.http.visibility import visible_job

OutputPath = Annotated[int, PathParameter(ge=0, le=TOKEN_MAX, description="The id of an output.")]
After = Annotated[int | None, QueryParameter(ge=0, le=TOKEN_MAX, description="`next` of the previous page.")]
PartQuery = Annotated[str, QueryParameter(max_length=300, description="`value`, or `artifact:NAME`.")]


class OutputReviewRoutes(Controller):
    path = "/outputs"
    tags = ("output review",)

    @get(opt=requires(Role.VIEWER, "somewhere"))
    async def find_outputs(
        self,
        request: ApiRequest,
        deps: Deps,
        kept: Annotated[ReviewState | None, QueryParameter(description="Only outputs in this state.")] = None,
        job: FromQuery[str | None] = None,
        after: After = None,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[OutputSummary]:
        """List held, quarantined, redacted and released outputs, newest first, without their content."""
        of = (await visible_job(request.user, deps, job)).id if job is not None else None
        shows = request.user.shows_with_role(Role.VIEWER)
        found = await deps.outputs.page(shows=shows, state=kept, job=of, after=after, most=limit + 1)
        return paginate(found, limit, lambda line: line.id)

    @get("/{output:int}", opt=requires(Role.VIEWER, "somewhere"))
    async def get_output(self, request: ApiRequest, deps: Deps, output: OutputPath) -> OutputView:
        """Show every check of an output and the locations of its findings, without the content."""
        return await _visible_output(request.user, deps, output, Role.VIEWER)

    @post("/{output:int}/reveal", opt=requires(Role.OPERATOR, "somewhere"), status_code=200, media_type=OCTET_STREAM)
    async def reveal_output(
        self, request: ApiRequest, deps: Deps, output: OutputPath, part: PartQuery = "value"
    ) -> Stream:
        """Read the original output, for the reviewer. The audit log records the access."""
        await _visible_output(request.user, deps, output, Role.OPERATOR)
        content = await deps.outputs.locate_content(output, request.user.audited, part)
        return stream_bytes(content) if isinstance(content, bytes) else await stream_blob(request, deps.store, content)

    @post("/{output:int}/release", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def release_output(
        self, request: ApiRequest, deps: Deps, output: OutputPath, data: JSONBody[OutputReviewRequest]
    ) -> OutputReviewResult:
        """Make the original output readable. Nothing runs again."""
        await _visible_output(request.user, deps, output, Role.OPERATOR)
        return await deps.outputs.release(output, _decider(request.user), data.reason)

    @post("/{output:int}/redact", opt=requires(Role.OPERATOR, "somewhere"), status_code=200)
    async def redact_output(
        self, request: ApiRequest, deps: Deps, output: OutputPath, data: JSONBody[OutputReviewRequest]
    ) -> OutputReviewResult:
        """Make the output readable without the scanners' findings, or with its whole content removed."""
        await _visible_output(request.user, deps, output, Role.OPERATOR)
        return await deps.outputs.redact(output, _decider(request.user), data.reason, whole=data.whole)


async def _visible_output(actor: Actor, deps: HttpDependencies, output: int, role: Role) -> OutputView:
    """Raises not found for an output of a show that the key cannot view."""
    view = await deps.outputs.get(output)
    if not actor.has_role(Role.VIEWER, view.line.show):
        raise deps.outputs.not_found(output)
    require_role(actor, role, view.line.show)
    return view


def _decider(actor: Actor) -> OutputReviewer:
    return OutputReviewer(actor.audited, actor.principal)
