"""The API as one ASGI app, for the listener to mount."""

from __future__ import annotations

from functools import cache
from typing import Final

from litestar import Litestar, Router, get, types
from litestar.di import Provide
from litestar.exceptions import HTTPException

from rota.infra.service.listener import App, Receive, Scope, Send
from rota.model.access import Role
from rota.model.errors import RotaError
from rota.server.http import openapi, refusing
from rota.server.http.agents import AgentRoutes
from rota.server.http.approvals import ApprovalRoutes
from rota.server.http.books import DepartmentRoutes, ShowRoutes
from rota.server.http.desk import Desk
from rota.server.http.door import PREFIX
from rota.server.http.events import EventRoutes
from rota.server.http.jobs import JobRoutes
from rota.server.http.jobs_out import OutputRoutes
from rota.server.http.layers import LayerRoutes
from rota.server.http.office import KeyRoutes, LedgerRoutes, OfficeRoutes
from rota.server.http.outputs import KeptOutputRoutes
from rota.server.http.policy import PolicyRoutes
from rota.server.http.pools import PoolRoutes, TopicRoutes, WorkerRoutes
from rota.server.http.queues import DeadLetterRoutes, QueueRoutes
from rota.server.http.routes import ROLE, WHERE, let_in, needs
from rota.server.http.wire import Ask, Reply
from rota.server.http.workflows import RunRoutes, WorkflowRoutes

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
CONTROLLERS: Final = (
    JobRoutes,
    OutputRoutes,
    KeptOutputRoutes,
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
    OfficeRoutes,
)


DESK: Final = "rota.desk"


def build(desk: Desk) -> App:
    """The ASGI app that answers with `desk`. All replicas of a process share its compiled routes."""
    app = compiled()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, DESK: desk}, receive, send)  # type: ignore[arg-type]

    return answer


@cache
def compiled() -> Litestar:
    """Every route of the API, each with the role that it needs. The desk comes with each request."""
    app = Litestar(
        [Router(PREFIX, route_handlers=[*CONTROLLERS, describe], guards=[let_in])],
        dependencies={"desk": Provide(_desk_of, sync_to_thread=False)},
        exception_handlers={
            RotaError: refusing.on_error,
            HTTPException: refusing.on_http,
            Exception: refusing.on_defect,
        },
        request_class=Ask,
        response_class=Reply,
        openapi_config=None,
        request_max_body_size=BODY_BYTES_MAX,
        logging_config=None,
    )
    _check_roles(app)
    return app


def _desk_of(scope: types.Scope) -> Desk:
    desk = scope[DESK]  # type: ignore[typeddict-item]
    assert isinstance(desk, Desk)
    return desk


@get("/openapi.json", opt=needs(Role.VIEWER, "somewhere"), media_type="application/json", include_in_schema=False)
async def describe() -> bytes:
    return openapi.written(CONTROLLERS)


def _check_roles(app: Litestar) -> None:
    """Those of Litestar's own, which tell of the API itself, need only a key."""
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            ours = handler.fn.__module__.startswith(__package__ or "")
            assert not ours or handler.opt.keys() >= {ROLE, WHERE}, f"{route.path} names no role"
