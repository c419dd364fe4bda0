"""The API as one ASGI app, which the listener mounts."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Final

from litestar import Litestar, Router, get, types
from litestar.di import Provide
from litestar.exceptions import HTTPException

from rota.infra.service.listener import App, Receive, Scope, Send
from rota.model.access import Role
from rota.model.errors import RotaError
from rota.server.http import openapi
from rota.server.http.codec import ApiRequest, ApiResponse
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.fast_path import SubmissionFastPath
from rota.server.http.middleware import errors
from rota.server.http.middleware.authentication import PREFIX
from rota.server.http.middleware.encoded_slashes import restore_slashes
from rota.server.http.permissions import ROLE, ROLE_SCOPE, authorize, requires
from rota.server.http.routes.admin import AdminRoutes, KeyRoutes, LedgerRoutes, PrincipalRoutes
from rota.server.http.routes.agents import AgentRoutes
from rota.server.http.routes.approvals import ApprovalRoutes
from rota.server.http.routes.events import EventRoutes
from rota.server.http.routes.job_results import JobResultRoutes
from rota.server.http.routes.jobs import JobRoutes
from rota.server.http.routes.layers import LayerRoutes
from rota.server.http.routes.outputs import OutputReviewRoutes
from rota.server.http.routes.policy import PolicyRoutes
from rota.server.http.routes.pools import PoolRoutes, TopicRoutes, WorkerRoutes
from rota.server.http.routes.queues import DeadLetterRoutes, QueueRoutes
from rota.server.http.routes.shows import DepartmentRoutes, ShowRoutes
from rota.server.http.routes.workflows import RunRoutes, WorkflowRoutes

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
CONTROLLERS: Final = (
    JobRoutes,
    JobResultRoutes,
    OutputReviewRoutes,
    EventRoutes,
    LayerRoutes,
    ShowRoutes,
    DepartmentRoutes,
    PoolRoutes,
    TopicRoutes,
    WorkerRoutes,
    QueueRoutes,
    DeadLetterRoutes,
    AgentRoutes,
    WorkflowRoutes,
    RunRoutes,
    PolicyRoutes,
    ApprovalRoutes,
    LedgerRoutes,
    KeyRoutes,
    PrincipalRoutes,
    AdminRoutes,
)


DEPENDENCIES_KEY: Final = "rota.deps"


def build(deps: HttpDependencies) -> App:
    """The ASGI app over `deps`. All replicas of a process share the compiled routes."""
    app = litestar_app()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, DEPENDENCIES_KEY: deps}, receive, send)  # type: ignore[arg-type]

    return SubmissionFastPath(answer, deps, body_bytes_max=BODY_BYTES_MAX)


@cache
def litestar_app() -> Litestar:
    """Every route of the API with its required role. The dependencies come with each request, in its scope."""
    app = Litestar(
        [Router(PREFIX, route_handlers=[*CONTROLLERS, describe], guards=[authorize], middleware=[_restore_slashes])],
        dependencies={"deps": Provide(_dependencies_of, sync_to_thread=False)},
        exception_handlers={
            RotaError: errors.handle_rota_error,
            HTTPException: errors.handle_http_exception,
            Exception: errors.handle_defect,
        },
        request_class=ApiRequest,
        response_class=ApiResponse,
        openapi_config=None,
        request_max_body_size=BODY_BYTES_MAX,
        logging_config=None,
    )
    _check_roles(app)
    return app


def _restore_slashes(app: types.ASGIApp) -> types.ASGIApp:
    return restore_slashes(app)  # type: ignore[arg-type,return-value]  # plain ASGI


def _dependencies_of(scope: types.Scope) -> HttpDependencies:
    deps = scope[DEPENDENCIES_KEY]  # type: ignore[typeddict-item]
    assert isinstance(deps, HttpDependencies)
    return deps


@get("/openapi.json", opt=requires(Role.VIEWER, "somewhere"), media_type="application/json", include_in_schema=False)
async def describe() -> bytes:
    return await asyncio.to_thread(openapi.encoded_document, CONTROLLERS)  # the first time takes half a second


def _check_roles(app: Litestar) -> None:
    """Assert that each of our routes declares a role; Litestar's own routes need only a key."""
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            ours = handler.fn.__module__.startswith(__package__ or "")
            assert not ours or handler.opt.keys() >= {ROLE, ROLE_SCOPE}, f"{route.path} names no role"
