"""The reference page of the HTTP API, made from its OpenAPI document so that it cannot lag behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rota.server.http.app import CONTROLLERS
from rota.server.http.codec import JSON
from rota.server.http.openapi import ERROR_RESPONSES, document

PAGE_SCHEMA_PREFIX: Final = "Page_"
_HEAD = """\
# The HTTP API

Every route below `/api/v1`, by what it is about: who may call it, what it takes and what it answers with. This page is
made from the code by `tools.docs.http_reference`; a test compares the two. `/api/v1/openapi.json` tells programs the
same. [Call Rota by HTTP](../howto/http.md) shows calls.

* **Keys.** Every request carries `Authorization: Bearer KEY` or `X-API-Key: KEY`; without one nothing is answered, not
  even which paths there are. A role is needed *in the show* that the path names, *in every show*, or *in some show*:
  then lists hold what the key may look into, and a job of another show is not found.
* **Bodies** are JSON, or msgpack with `Content-Type: application/msgpack`; answers are msgpack for whoever accepts
  that. Fields that nobody knows are refused. Cores are in cores.
* **Lists** are pages, `{"items": [...], "next": ...}`: `next` is the value of `after` (or `before`, or `at`) for the
  next page, null is the last one.
* **Refusals** are problem documents (`application/problem+json`) with a stable `code` and one sentence in `detail`.
"""


def render_page() -> str:
    """The page as Markdown."""
    told = document(CONTROLLERS)
    operations = [
        (path.removeprefix("/api/v1"), method.upper(), one)
        for path, methods in sorted(told["paths"].items())
        for method, one in methods.items()
    ]
    tags = dict.fromkeys(tag for controller in CONTROLLERS for tag in controller.tags)
    parts = [_HEAD, *_error_table()]
    for tag in tags:
        parts += [f"## {tag}", ""]
        parts += [
            line for path, method, one in operations if tag in one["tags"] for line in _route_section(path, method, one)
        ]
    shapes = told["components"]["schemas"]
    return "\n".join([*parts, *_schema_sections(shapes)]).rstrip() + "\n"


def _error_table() -> Iterator[str]:
    yield "| status | means |"
    yield "|---|---|"
    for status, why in ERROR_RESPONSES.items():
        yield f"| {status} | {_cell(why)} |"
    yield ""


def _route_section(path: str, method: str, told: dict[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`"
    yield ""
    where = {"somewhere": "some show", "show": "the show", "everywhere": "every show"}[told["x-rota-where"]]
    yield f"{_summary(told)}*{told['x-rota-role'].capitalize()}* in {where}. {_request_and_response(told)}"
    yield ""
    given = [one for one in told.get("parameters", ()) if one["in"] != "path"]
    if given:
        yield from _parameter_table(given)


def _summary(told: dict[str, Any]) -> str:
    """Without a docstring Litestar makes one of the name, which says no more than the path does."""
    summary: str = told["summary"]
    return f"{' '.join(summary.split())} " if summary.endswith((".", ":")) else ""


def _request_and_response(told: dict[str, Any]) -> str:
    body = told.get("requestBody", {}).get("content", {})
    status, answer = next((status, one) for status, one in told["responses"].items() if status.startswith("2"))
    kinds = answer.get("content", {})
    shown = _type_text(kinds[JSON]["schema"]) if JSON in kinds else " or ".join(f"`{kind}`" for kind in kinds)
    takes = f"Takes {_body_types(body)}; answers" if body else "Answers"
    return f"{takes} {status}{f' with {shown}' if shown else ''}."


def _body_types(content: dict[str, Any]) -> str:
    if JSON in content:
        return _type_text(content[JSON]["schema"])
    return " or ".join(f"`{kind}`" for kind in content)


def _parameter_table(given: list[dict[str, Any]]) -> Iterator[str]:
    yield "| parameter | may be | meaning |"
    yield "|---|---|---|"
    for one in given:
        name = f"`{one['name']}`" + (" (header)" if one["in"] == "header" else "")
        needed = " (needed)" if one["required"] else ""
        yield f"| {name}{needed} | {_cell(_type_text(one['schema']))} | {_cell(one.get('description') or '')} |"
    yield ""


def _schema_sections(shapes: dict[str, Any]) -> Iterator[str]:
    yield "## Shapes"
    yield ""
    for name, shape in sorted(shapes.items()):
        if name.startswith(PAGE_SCHEMA_PREFIX):
            continue
        yield f"### {name}"
        yield ""
        if said := shape.get("description"):
            yield f"{' '.join(said.split())}"
            yield ""
        if fields := shape.get("properties"):
            yield from _field_table(fields, set(shape.get("required", ())))
        else:
            yield f"{_type_text(shape)}"
            yield ""


def _field_table(fields: dict[str, Any], needed: set[str]) -> Iterator[str]:
    yield "| field | is |"
    yield "|---|---|"
    for name, shape in fields.items():
        yield f"| `{name}`{' (needed)' if name in needed else ''} | {_cell(_type_text(shape))} |"
    yield ""


def _type_text(shape: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        of = name.removeprefix(PAGE_SCHEMA_PREFIX).rstrip("_") if name.startswith(PAGE_SCHEMA_PREFIX) else name
        return f"{'a page of ' if of != name else ''}[{of}](#{of.lower()})"
    if "enum" in shape:
        return ", ".join(f"`{value}`" for value in shape["enum"] if value is not None)
    for several in ("anyOf", "oneOf"):
        if several in shape:
            return " or ".join(dict.fromkeys(_type_text(one) for one in shape[several]))
    match shape.get("type"):
        case "array":
            return f"list of {_type_text(shape['items'])}" if shape.get("items") else "list"
        case "object" if isinstance(shape.get("additionalProperties"), dict):
            return f"object of {_type_text(shape['additionalProperties'])}"
        case list() as kinds:
            return " or ".join(kinds)
        case str() as kind:
            return f"{shape.get('format') or kind}{_bounds_text(shape)}"
    return "anything"


def _bounds_text(shape: dict[str, Any]) -> str:
    least, most = shape.get("minimum"), shape.get("maximum", shape.get("maxLength"))
    if least is None and most is None:
        return ""
    if "maxLength" in shape:
        return f" of at most {most} characters"
    return "".join(f" {word} {n:.16g}" for word, n in (("from", least), ("to", most)) if n is not None)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
