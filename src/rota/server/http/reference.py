"""The reference page of the HTTP API, made from its OpenAPI document so that it cannot lag behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rota.server.http.app import CONTROLLERS
from rota.server.http.openapi import REFUSALS, document
from rota.server.http.wire import JSON

PAGE: Final = "Page_"
_HEAD = """\
# The HTTP API

Every route below `/api/v1`, by what it is about: who may call it, what it takes and what it answers with. This page is
made from the code by `rota.server.http.reference`; a test compares the two. `/api/v1/openapi.json` tells programs the
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


def page() -> str:
    """The page as Markdown."""
    told = document(CONTROLLERS)
    operations = [
        (path.removeprefix("/api/v1"), method.upper(), one)
        for path, methods in sorted(told["paths"].items())
        for method, one in methods.items()
    ]
    tags = dict.fromkeys(tag for controller in CONTROLLERS for tag in controller.tags)
    parts = [_HEAD, *_refusals()]
    for tag in tags:
        parts += [f"## {tag}", ""]
        parts += [line for path, method, one in operations if tag in one["tags"] for line in _route(path, method, one)]
    shapes = told["components"]["schemas"]
    return "\n".join([*parts, *_shapes(shapes)]).rstrip() + "\n"


def _refusals() -> Iterator[str]:
    yield "| status | means |"
    yield "|---|---|"
    for status, why in REFUSALS.items():
        yield f"| {status} | {_cell(why)} |"
    yield ""


def _route(path: str, method: str, told: dict[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`"
    yield ""
    where = {"somewhere": "some show", "show": "the show", "everywhere": "every show"}[told["x-rota-where"]]
    yield f"{_sentence(told)}*{told['x-rota-role'].capitalize()}* in {where}. {_exchange(told)}"
    yield ""
    given = [one for one in told.get("parameters", ()) if one["in"] != "path"]
    if given:
        yield from _parameters(given)


def _sentence(told: dict[str, Any]) -> str:
    """Without a docstring Litestar makes one of the name, which says no more than the path does."""
    summary: str = told["summary"]
    return f"{' '.join(summary.split())} " if summary.endswith((".", ":")) else ""


def _exchange(told: dict[str, Any]) -> str:
    body = told.get("requestBody", {}).get("content", {})
    status, answer = next((status, one) for status, one in told["responses"].items() if status.startswith("2"))
    kinds = answer.get("content", {})
    shown = _kind(kinds[JSON]["schema"]) if JSON in kinds else " or ".join(f"`{kind}`" for kind in kinds)
    takes = f"Takes {_taken(body)}; answers" if body else "Answers"
    return f"{takes} {status}{f' with {shown}' if shown else ''}."


def _taken(content: dict[str, Any]) -> str:
    if JSON in content:
        return _kind(content[JSON]["schema"])
    return " or ".join(f"`{kind}`" for kind in content)


def _parameters(given: list[dict[str, Any]]) -> Iterator[str]:
    yield "| parameter | may be | meaning |"
    yield "|---|---|---|"
    for one in given:
        name = f"`{one['name']}`" + (" (header)" if one["in"] == "header" else "")
        needed = " (needed)" if one["required"] else ""
        yield f"| {name}{needed} | {_cell(_kind(one['schema']))} | {_cell(one.get('description') or '')} |"
    yield ""


def _shapes(shapes: dict[str, Any]) -> Iterator[str]:
    yield "## Shapes"
    yield ""
    for name, shape in sorted(shapes.items()):
        if name.startswith(PAGE):
            continue
        yield f"### {name}"
        yield ""
        if said := shape.get("description"):
            yield f"{' '.join(said.split())}"
            yield ""
        if fields := shape.get("properties"):
            yield from _fields(fields, set(shape.get("required", ())))
        else:
            yield f"{_kind(shape)}"
            yield ""


def _fields(fields: dict[str, Any], needed: set[str]) -> Iterator[str]:
    yield "| field | is |"
    yield "|---|---|"
    for name, shape in fields.items():
        yield f"| `{name}`{' (needed)' if name in needed else ''} | {_cell(_kind(shape))} |"
    yield ""


def _kind(shape: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        of = name.removeprefix(PAGE).rstrip("_") if name.startswith(PAGE) else name
        return f"{'a page of ' if of != name else ''}[{of}](#{of.lower()})"
    if "enum" in shape:
        return ", ".join(f"`{value}`" for value in shape["enum"] if value is not None)
    for several in ("anyOf", "oneOf"):
        if several in shape:
            return " or ".join(dict.fromkeys(_kind(one) for one in shape[several]))
    match shape.get("type"):
        case "array":
            return f"list of {_kind(shape['items'])}" if shape.get("items") else "list"
        case "object" if isinstance(shape.get("additionalProperties"), dict):
            return f"object of {_kind(shape['additionalProperties'])}"
        case list() as kinds:
            return " or ".join(kinds)
        case str() as kind:
            return f"{shape.get('format') or kind}{_bounds(shape)}"
    return "anything"


def _bounds(shape: dict[str, Any]) -> str:
    least, most = shape.get("minimum"), shape.get("maximum", shape.get("maxLength"))
    if least is None and most is None:
        return ""
    if "maxLength" in shape:
        return f" of at most {most} characters"
    return "".join(f" {word} {n:.16g}" for word, n in (("from", least), ("to", most)) if n is not None)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
