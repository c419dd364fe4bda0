"""The OpenAPI document: paths and parameters from the handlers, schemas of bodies and responses from msgspec.

Adds the error responses of every route, msgpack beside JSON, line-by-line bodies, and the role of each route.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any, Final, get_origin

import msgspec
from litestar import Controller, Litestar, Response, Router
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme

from rota.model.events import Event
from rota.model.jobs.submission import Submission
from rota.server.http.codec import JSON, MSGPACK, ApiRequest
from rota.server.http.middleware.authentication import PREFIX
from rota.server.http.permissions import route_table
from rota.server.http.problem_details import MEDIA_TYPE, ProblemDetails
from rota.server.http.sse import MEDIA_TYPE as STREAM
from rota.server.http.sse import SseResponse

REF_TEMPLATE: Final = "#/components/schemas/{name}"
NDJSON: Final = "application/x-ndjson"
_NDJSON_SCHEMA: Final = {"type": "string", "description": "One Submission as JSON per line."}
BULK_ROUTES: Final = ("submit_jobs", "submit_jobs_once")
LINKS: Final = {
    "submit_job": ("job", "/job"),
    "create_show": ("show", "/name"),
    "create_pool": ("pool", "/name"),
    "create_department": ("dept", "/name"),
    "create_key": ("key", "/key/id"),
}
"""For each creating route: the path parameter that names the new object, and where its response holds the name."""
ERROR_RESPONSES: Final = {
    "400": "The request is invalid; nothing was changed.",
    "401": "The API key is missing or invalid.",
    "403": "The key lacks the required role.",
    "404": "The object does not exist, or the key cannot view it.",
    "405": "The path does not support this method; Allow lists those it supports.",
    "408": "The body arrived too slowly; nothing was changed.",
    "409": "The current state does not allow it.",
    "413": "The request is too large.",
    "415": "The content type is not supported.",
    "429": "Too many requests; Retry-After says when to try again.",
    "503": "A backend does not answer; the same call may succeed later.",
}


def document(routes: tuple[type[Controller], ...]) -> dict[str, Any]:
    """Built from a separate app: Litestar's own OpenAPI routes would serve pages with scripts from other hosts."""
    app = Litestar(
        [Router(PREFIX, route_handlers=routes)],
        dependencies={"deps": Provide(lambda: None, sync_to_thread=False)},
        request_class=ApiRequest,
        openapi_config=_config(),
        logging_config=None,
    )
    schema = app.openapi_schema.to_schema()
    schemas: dict[str, Any] = {}
    schema["components"]["schemas"] = schemas
    for route in route_table(app):
        operation = schema["paths"][route.path][route.method.lower()]
        operation |= {"x-rota-role": route.role.value, "x-rota-where": route.where}
        operation["summary"] = operation.pop("description", operation["summary"])
        operation["operationId"] = route.name
        if route.answer is SseResponse:
            _set_event_stream(operation, schemas)
        else:
            _set_response(operation, _schema(route.answer, schemas))
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": _content(_schema(route.body, schemas))}
        if route.name in BULK_ROUTES:
            content = {NDJSON: {"schema": _NDJSON_SCHEMA}, MSGPACK: {"schema": _schema(list[Submission], schemas)}}
            operation["requestBody"] = {"required": True, "content": content}
        _add_error_responses(operation, _schema(ProblemDetails, schemas))
    _add_links(schema["paths"])
    return schema


@lru_cache(maxsize=1)
def encoded_document(routes: tuple[type[Controller], ...]) -> bytes:
    return msgspec.json.encode(document(routes), order="deterministic")


def _config() -> OpenAPIConfig:
    key = SecurityScheme(type="http", scheme="bearer", description="A key created with `rota keys create`.")
    header = SecurityScheme(type="apiKey", name="X-API-Key", security_scheme_in="header", description="The same key.")
    return OpenAPIConfig(
        title="Rota",
        version=version("rota"),
        summary="A distributed job scheduler that keeps exact accounts.",
        components=Components(security_schemes={"key": key, "header": header}),
        security=[{"key": []}, {"header": []}],
        use_handler_docstrings=True,
    )


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any] | None:
    """The schema by msgspec; Litestar's own does not support structs encoded as arrays."""
    if kind is None or kind is bytes or issubclass(get_origin(kind) or kind, Response):
        return None
    [schema], components = msgspec.json.schema_components([kind], ref_template=REF_TEMPLATE)
    schemas |= {name: _with_sorted_defaults(component) for name, component in components.items()}
    return schema


def _with_sorted_defaults(component: dict[str, Any]) -> dict[str, Any]:
    """The default of a set is a list in hash order, which differs between replicas."""
    for value in component.get("properties", {}).values():
        default = value.get("default")
        if isinstance(default, list) and all(isinstance(each, str) for each in default):
            value["default"] = sorted(default)
    return component


def _content(schema: dict[str, Any] | None) -> dict[str, Any]:
    return {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}


def _set_response(operation: dict[str, Any], schema: dict[str, Any] | None) -> None:
    for status, answer in operation["responses"].items():
        if status.startswith("2") and schema is not None:
            answer["content"] = _content(schema)


def _set_event_stream(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """A stream of JSON Events; 204 for a client that reconnects after the last event of a job."""
    _schema(Event, schemas)
    event_schema = {
        "type": "object",
        "description": "Server-sent events; the data of each is an Event as JSON.",
        "properties": {part: {"type": "string"} for part in ("id", "event", "data")},
    }
    operation["responses"]["200"]["content"] = {STREAM: {"schema": event_schema}}
    operation["responses"]["204"] = {"description": "No further events."}


def _add_links(paths: dict[str, Any]) -> None:
    """Link each creating route to every route on the created object."""
    operations = {each["operationId"]: each for path in paths.values() for each in path.values()}
    for name, (parameter, pointer) in LINKS.items():
        operations[name]["responses"]["201"]["links"] = {
            to: {"operationId": to, "parameters": {parameter: f"$response.body#{pointer}"}}
            for to, each in operations.items()
            if [one["name"] for one in each.get("parameters", ()) if one["in"] == "path"] == [parameter]
        }


def _add_error_responses(operation: dict[str, Any], schema: dict[str, Any] | None) -> None:
    for status, why in ERROR_RESPONSES.items():
        operation["responses"][status] = {"description": why, "content": {MEDIA_TYPE: {"schema": schema}}}
