"""Percent-encoded slashes in a path: `/jobs/ID/layers/a%2Fb` names the layer `a/b`.

The HTTP server decodes the path before it is split into segments, which would turn one segment into two, or
`/shows/%2F` into `/shows`. `keep_encoded_slashes` splits first and puts a stand-in into the segment;
`restore_slashes` puts the slash back into the path parameters, after routing. The stand-in is a lone surrogate, which
no decoded path contains.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from rota.infra.service.listener import App, Receive, Scope, Send

STAND_IN: Final = "\udc2f"


def keep_encoded_slashes(scope: Scope) -> str:
    """The decoded path, with a stand-in for each slash that was percent-encoded."""
    raw: bytes = scope.get("raw_path") or b""
    path: str = scope["path"]
    if b"%2f" not in raw.lower():
        return path
    return "/".join(unquote(segment).replace("/", STAND_IN) for segment in raw.decode("ascii").split("/"))


def restore_slashes(app: App) -> App:
    """Middleware of the routes: path parameters as the client meant them."""

    async def restored(scope: Scope, receive: Receive, send: Send) -> None:
        if STAND_IN in scope["path"]:
            scope["path"] = scope["path"].replace(STAND_IN, "/")
            scope["path_params"] = {name: _restore(value) for name, value in scope["path_params"].items()}
        await app(scope, receive, send)

    return restored


def _restore(value: object) -> object:
    return value.replace(STAND_IN, "/") if isinstance(value, str) else value
