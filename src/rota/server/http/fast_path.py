"""The fast path of `POST /jobs`: a submission that has arrived whole is answered without Litestar.

Litestar takes as much CPU for such a request as everything else together. What needs a decision of Litestar's goes to
the app, with what was read of its body: parameters, unusual headers, other content types, a body that comes in parts or
cannot be decoded. A body that is announced as too large, or that the client sends only when it is asked to, is left to
the app unread: reading would ask for it. So the fast path adds no rules: the role is checked by the same function, the
job is submitted by the handler's own (`submit_one`), and errors become the same problem documents.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, Final

import msgspec
from litestar.exceptions import HTTPException

from rota.infra.service.listener import App, Receive, Scope, Send
from rota.model.access import Actor, Role, require_role_in_any_show
from rota.model.errors import RotaError
from rota.model.jobs.submission import Submission
from rota.server.http import codec
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.middleware.authentication import PREFIX
from rota.server.http.middleware.errors import problem_for_http
from rota.server.http.problem_details import response_for_defect, send_problem
from rota.server.http.routes.jobs import KEY_CHARS_MAX, submit_one

PATH: Final = f"{PREFIX}/jobs"
_DECODERS: Final[dict[bytes, msgspec.json.Decoder[Submission] | msgspec.msgpack.Decoder[Submission]]] = {
    codec.JSON.encode(): msgspec.json.Decoder(Submission),
    codec.MSGPACK.encode(): msgspec.msgpack.Decoder(Submission),
}
_READ_HEADERS: Final = frozenset(
    {b"content-type", b"content-length", b"accept", b"idempotency-key", b"traceparent", b"expect"}
)
Message = MutableMapping[str, Any]
Headers = dict[bytes, bytes]


class SubmissionFastPath:
    """Wraps the app."""

    def __init__(self, app: App, deps: HttpDependencies, *, body_bytes_max: int) -> None:
        self._app = app
        self._deps = deps
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope, self._body_bytes_max) if scope["path"] == PATH else None
        if headers is None:
            await self._app(scope, receive, send)
            return
        actor: Actor = scope["user"]
        require_role_in_any_show(actor, Role.SUBMITTER)
        try:
            async with asyncio.timeout(codec.BODY_TIMEOUT_S):
                first = await receive()
        except TimeoutError:
            await send_problem(send, problem_for_http(HTTPException(status_code=408, detail=codec.TOO_SLOW)))
            return
        submission = self._decode(first, headers)
        if submission is None:
            await self._app(scope, _replayed(first, receive), send)
        else:
            await self._submit(actor, submission, headers, send)

    def _decode(self, message: Message, headers: Headers) -> Submission | None:
        """None: the app says what is wrong, or reads on."""
        body = message.get("body", b"")
        if message["type"] != "http.request" or message.get("more_body") or len(body) > self._body_bytes_max:
            return None
        try:
            return _DECODERS[headers[b"content-type"]].decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None

    async def _submit(self, actor: Actor, submission: Submission, headers: Headers, send: Send) -> None:
        try:
            key, parent = _text(headers, b"idempotency-key"), _text(headers, b"traceparent")
            submitted = await submit_one(actor, self._deps, submission, key, parent)
            is_msgpack = b"msgpack" in headers.get(b"accept", b"")
            body = msgspec.msgpack.encode(submitted) if is_msgpack else msgspec.json.encode(submitted)
        except RotaError:
            raise  # the authentication middleware answers it
        except Exception as error:  # noqa: BLE001 - a defect is logged, and answered without its text
            await send_problem(send, response_for_defect(error))
            return
        media_type = codec.MSGPACK if is_msgpack else codec.JSON
        response_headers = [
            (b"content-type", media_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 201, "headers": response_headers})
        await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope, body_bytes_max: int) -> Headers | None:
    """The headers of a submission that this path can answer."""
    if scope["method"] != "POST" or scope["query_string"]:
        return None
    found: Headers = {}
    for name, value in scope["headers"]:
        if name in _READ_HEADERS:
            if name in found:
                return None
            found[name] = value
    if b"expect" in found or int(found.get(b"content-length", b"0")) > body_bytes_max:
        return None
    if found.get(b"content-type") not in _DECODERS or len(found.get(b"idempotency-key", b"")) > KEY_CHARS_MAX:
        return None
    return found


def _text(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def _replayed(first: Message, receive: Receive) -> Receive:
    """What was read, and then the rest."""
    read = [first]

    async def replayed() -> Message:
        return read.pop() if read else await receive()

    return replayed
