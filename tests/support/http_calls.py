"""Builds a call of any route from its OpenAPI description: paths, parameters and bodies are filled from values by name.

A new route is covered without changes here; an unknown parameter name fails.
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
        request = client.stream(self.method, path, params=self.params, content=self.body, headers=headers)
        async with request as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                await response.aread()
                return response
            first_bytes = await anext(response.aiter_bytes())  # the stream is endless
            return httpx.Response(response.status_code, content=first_bytes)


class Caller:
    def __init__(self):
        self._told = openapi.document(CONTROLLERS)["paths"]

    def call(self, route, values, *, bare=False):
        """`bare`: without optional parameters."""
        told = self._told[route.path][route.method.lower()]
        path, params = route.path, {}
        for parameter in told.get("parameters", ()):
            name = parameter["name"]
            assert name in values or not parameter["required"], f"{route.path}: add a value for {name} to the test"
            if parameter["in"] == "path":
                path = path.replace(f"{{{name}}}", values[name])
            elif parameter["in"] == "query" and name in values and (parameter["required"] or not bare):
                params[name] = values[name]
        lines = LINES in told.get("requestBody", {}).get("content", {})
        if not lines and route.body is None:
            return Call(route.method, path, params)
        body = _filled(msgspec.inspect.type_info(Submission if lines else route.body), values)
        return Call(route.method, path, params, json.dumps(body), LINES if lines else "application/json")


def _has_parts(kind):
    """Whether the type is composite, so that no single value fills it."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return any(_has_parts(each) for each in types)
        case msgspec.inspect.DictType() | msgspec.inspect.StructType():
            return True
    return False


def _filled(kind, values):
    """A value of this type: its required fields, and those with a value of that name."""
    match kind:
        case msgspec.inspect.StructType(fields=fields):
            return {
                field.encode_name: values[field.name] if field.name in values else _filled(field.type, values)
                for field in fields
                if field.required or (field.name in values and not _has_parts(field.type))
            }
        case msgspec.inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case msgspec.inspect.VarTupleType(item_type=item) | msgspec.inspect.ListType(item_type=item):
            return [_filled(item, values)]
        case msgspec.inspect.StrType():
            return values["name"]
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return 1
        case msgspec.inspect.DateTimeType():
            return "2026-01-31T00:00:00Z"
        case msgspec.inspect.UnionType(types=types):
            return _filled(types[0], values)
    raise AssertionError(f"add a case for {kind}")
