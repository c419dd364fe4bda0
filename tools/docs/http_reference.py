"""Generates docs/reference/http.md from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rota.server.http.app import CONTROLLERS
from rota.server.http.codec import JSON
from rota.server.http.openapi import ERROR_RESPONSES, document

PAGE_SCHEMA_PREFIX: Final = "Page_"
_HEAD = """\
# The HTTP API

Every route below `/api/v1` by subject: the required role, the request and the response. `tools.docs.http_reference`
generates this page from the code; a test compares the two. `/api/v1/openapi.json` has the same content for programs.
[Call Rota by HTTP](../howto/http.md) shows examples.

* **Keys.** Every request needs `Authorization: Bearer KEY` or `X-API-Key: KEY`; without a key every path answers 401.
  The role is required *in the show* that the path names, *in every show*, or *in some show*: then lists contain only
  what the key may see, and a job of another show is not found.
* **Bodies** are JSON, or msgpack with `Content-Type: application/msgpack`; responses are msgpack if the client accepts
  it. Unknown fields are refused. Amounts of cores are in cores.
* **Lists** are pages, `{"items": [...], "next": ...}`: `next` is the value of `after` (or `before`, or `at`) for the
  next page; null marks the last one.
* **Errors** are problem documents (`application/problem+json`) with a stable `code` and one sentence in `detail`.
"""


def render_page() -> str:
    """The page as Markdown."""
    spec = document(CONTROLLERS)
    operations = [
        (path.removeprefix("/api/v1"), method.upper(), one)
        for path, methods in sorted(spec["paths"].items())
        for method, one in methods.items()
    ]
    tags = dict.fromkeys(tag for controller in CONTROLLERS for tag in controller.tags)
    parts = [_HEAD, *_error_table()]
    for tag in tags:
        parts += [f"## {tag}", ""]
        parts += [
            line for path, method, one in operations if tag in one["tags"] for line in _route_section(path, method, one)
        ]
    schemas = spec["components"]["schemas"]
    return "\n".join([*parts, *_schema_sections(schemas)]).rstrip() + "\n"


def _error_table() -> Iterator[str]:
    yield "| status | meaning |"
    yield "|---|---|"
    for status, why in ERROR_RESPONSES.items():
        yield f"| {status} | {_cell(why)} |"
    yield ""


def _route_section(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`"
    yield ""
    where = {"somewhere": "some show", "show": "the show", "everywhere": "every show"}[operation["x-rota-where"]]
    role = operation["x-rota-role"].capitalize()
    yield f"{_summary(operation)}*{role}* in {where}. {_request_and_response(operation)}"
    yield ""
    parameters = [one for one in operation.get("parameters", ()) if one["in"] != "path"]
    if parameters:
        yield from _parameter_table(parameters)


def _summary(operation: dict[str, Any]) -> str:
    """The docstring's summary. Without a docstring Litestar derives one from the function name, which is omitted."""
    summary: str = operation["summary"]
    return f"{' '.join(summary.split())} " if summary.endswith((".", ":")) else ""


def _request_and_response(operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    status, answer = next((status, one) for status, one in operation["responses"].items() if status.startswith("2"))
    kinds = answer.get("content", {})
    shown = _type_text(kinds[JSON]["schema"]) if JSON in kinds else " or ".join(f"`{kind}`" for kind in kinds)
    request = f"Request: {_body_types(body)}. " if body else ""
    return f"{request}Response: {status}{f' with {shown}' if shown else ''}."


def _body_types(content: dict[str, Any]) -> str:
    if JSON in content:
        return _type_text(content[JSON]["schema"])
    return " or ".join(f"`{kind}`" for kind in content)


def _parameter_table(parameters: list[dict[str, Any]]) -> Iterator[str]:
    yield "| parameter | type | meaning |"
    yield "|---|---|---|"
    for parameter in parameters:
        name = f"`{parameter['name']}`" + (" (header)" if parameter["in"] == "header" else "")
        needed = " (required)" if parameter["required"] else ""
        meaning = _cell(parameter.get("description") or "")
        yield f"| {name}{needed} | {_cell(_type_text(parameter['schema']))} | {meaning} |"
    yield ""


def _schema_sections(schemas: dict[str, Any]) -> Iterator[str]:
    yield "## Schemas"
    yield ""
    for name, schema in sorted(schemas.items()):
        if name.startswith(PAGE_SCHEMA_PREFIX):
            continue
        yield f"### {name}"
        yield ""
        if description := schema.get("description"):
            yield f"{' '.join(description.split())}"
            yield ""
        if fields := schema.get("properties"):
            yield from _field_table(fields, set(schema.get("required", ())))
        else:
            yield f"{_type_text(schema)}"
            yield ""


def _field_table(fields: dict[str, Any], needed: set[str]) -> Iterator[str]:
    yield "| field | type |"
    yield "|---|---|"
    for name, schema in fields.items():
        yield f"| `{name}`{' (required)' if name in needed else ''} | {_cell(_type_text(schema))} |"
    yield ""


def _type_text(schema: dict[str, Any]) -> str:
    """A short description of a schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        of = name.removeprefix(PAGE_SCHEMA_PREFIX).rstrip("_") if name.startswith(PAGE_SCHEMA_PREFIX) else name
        return f"{'a page of ' if of != name else ''}[{of}](#{of.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type_text(one) for one in schema[several]))
    match schema.get("type"):
        case "array":
            return f"list of {_type_text(schema['items'])}" if schema.get("items") else "list"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {_type_text(schema['additionalProperties'])}"
        case list() as kinds:
            return " or ".join(kinds)
        case str() as kind:
            return f"{schema.get('format') or kind}{_bounds_text(schema)}"
    return "anything"


def _bounds_text(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum", schema.get("maxLength"))
    if least is None and most is None:
        return ""
    if "maxLength" in schema:
        return f" of at most {most} characters"
    return "".join(f" {word} {n:.16g}" for word, n in (("from", least), ("to", most)) if n is not None)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
