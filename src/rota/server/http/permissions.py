"""The role that each route requires, and its scope.

somewhere   in any show: lists are restricted to those shows, and the handler checks the show of each object again
show        in the show named in the path
everywhere  in every show, for resources that belong to none
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler

from rota.model.access import Role, require_role, require_role_in_any_show
from rota.model.errors import InvalidInput
from rota.server.http.dependencies import HttpDependencies

Deps = NamedDependency[HttpDependencies]
"""The dependency annotation in handler signatures."""
RoleScope = Literal["somewhere", "show", "everywhere"]
ROLE: Final = "rota_role"
ROLE_SCOPE: Final = "rota_where"


def requires(role: Role, where: RoleScope) -> dict[str, Any]:
    """The `opt` of a route."""
    return {ROLE: role, ROLE_SCOPE: where}


async def authorize(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """A guard: runs before parameters and body are read. Only Litestar's automatic OPTIONS handlers have no role.

    Async, because Litestar runs guards that are not in a thread, for each request."""
    if ROLE not in handler.opt:
        raise MethodNotAllowedException(headers={"allow": ", ".join(_allowed_methods(connection))})
    if b"%00" in connection.scope["query_string"]:
        raise InvalidInput("A parameter contains the character NUL: remove it.")
    role: Role = handler.opt[ROLE]
    match handler.opt[ROLE_SCOPE]:
        case "somewhere":
            require_role_in_any_show(connection.user, role)
        case "show":
            require_role(connection.user, role, connection.path_params["show"])
        case _:
            require_role(connection.user, role)


def _allowed_methods(connection: ASGIConnection[Any, Any, Any, Any]) -> list[str]:
    here = connection.scope["path_template"]
    return sorted({method for route in connection.app.routes if route.path_format == here for method in route.methods})


class ApiRoute(msgspec.Struct, frozen=True):
    """A route, for OpenAPI and tests."""

    method: str
    path: str
    role: Role
    where: RoleScope
    name: str
    answer: Any
    body: Any = None


def route_table(app: Litestar) -> list[ApiRoute]:
    """Every route in the OpenAPI document."""
    found = []
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if isinstance(handler, HTTPRouteHandler) and ROLE in handler.opt and handler.resolve_include_in_schema():
                found += [_route(method, route.path_format, handler) for method in handler.http_methods]
    assert len({route.name for route in found}) == len(found), "operation ids are unique"
    return sorted(found, key=lambda each: (each.path, each.method))


def _route(method: str, path: str, handler: HTTPRouteHandler) -> ApiRoute:
    data, answer = handler.parsed_data_field, handler.parsed_fn_signature.return_type.annotation
    role, where = handler.opt[ROLE], handler.opt[ROLE_SCOPE]
    return ApiRoute(method, path, role, where, handler.handler_name, answer, data.annotation if data else None)
