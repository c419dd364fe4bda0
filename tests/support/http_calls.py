"""A call of every route there is, made from what routes say of themselves: paths, parameters and bodies are filled from
words by name, so a new route is called without being told of here, and one with a name nobody knows fails.
"""

import json

import httpx
import msgspec

from rota.model.jobs.submission import Submission
from rota.server.http import openapi
from rota.server.http.app import CONTROLLERS

LINES = "application/x-ndjson"


class Call(msgspec.Struct, frozen=True):
    method: str
    path: str
    params: dict[str, str]
    body: str | None = None
    kind: str = "application/json"

    async def by(self, client):
        headers = {"content-type": self.kind} if self.body is not None else {}
        path = self.path.removeprefix("/api/v1")
        asked = client.stream(self.method, path, params=self.params, content=self.body, headers=headers)
        async with asked as answer:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await answer.aread()
                return answer
            begins = await anext(answer.aiter_bytes())  # it has no end
            return httpx.Response(answer.status_code, content=begins)


class Caller:
    def __init__(self):
        self._told = openapi.document(CONTROLLERS)["paths"]

    def call(self, route, words, *, bare=False):
        """`bare`: without what may be left out."""
        told = self._told[route.path][route.method.lower()]
        path, params = route.path, {}
        for one in told.get("parameters", ()):
            name = one["name"]
            assert name in words or not one["required"], f"{route.path}: say what {name} is in the words of this test"
            if one["in"] == "path":
                path = path.replace(f"{{{name}}}", words[name])
            elif one["in"] == "query" and name in words and (one["required"] or not bare):
                params[name] = words[name]
        lines = LINES in told.get("requestBody", {}).get("content", {})
        if not lines and route.body is None:
            return Call(route.method, path, params)
        body = _filled(msgspec.inspect.type_info(Submission if lines else route.body), words)
        return Call(route.method, path, params, json.dumps(body), LINES if lines else "application/json")


def _has_parts(kind):
    """Whether it is something else than what a word names."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return any(_has_parts(each) for each in types)
        case msgspec.inspect.DictType() | msgspec.inspect.StructType():
            return True
    return False


def _filled(kind, words):
    """Something of this type: what it must have, and what the words name."""
    match kind:
        case msgspec.inspect.StructType(fields=fields):
            return {
                field.encode_name: words[field.name] if field.name in words else _filled(field.type, words)
                for field in fields
                if field.required or (field.name in words and not _has_parts(field.type))
            }
        case msgspec.inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case msgspec.inspect.VarTupleType(item_type=item) | msgspec.inspect.ListType(item_type=item):
            return [_filled(item, words)]
        case msgspec.inspect.StrType():
            return words["name"]
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return 1
        case msgspec.inspect.DateTimeType():
            return "2026-01-31T00:00:00Z"
        case msgspec.inspect.UnionType(types=types):
            return _filled(types[0], words)
    raise AssertionError(f"say here how a body with {kind} is filled")
