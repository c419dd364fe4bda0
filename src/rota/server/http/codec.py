"""Bodies and answers: JSON, or msgpack for whoever says so, in both directions; read strictly, into declared types."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final

import msgspec
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException, InternalServerException
from litestar.response.base import ASGIResponse

from rota.model.access import Actor
from rota.model.errors import InvalidInput
from rota.server.http.middleware.rate_limit import RequestSlot

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
MSGPACK_ALIASES: Final = ("application/x-msgpack", "application/vnd.msgpack")
ERROR_CHARS_MAX: Final = 300
BODY_TIMEOUT_S: Final = 30.0
BODY_BYTES_PER_S_MIN: Final = 64 * 1024
"""A body has `BODY_S`, and longer the more of it has come."""
_TOO_SLOW: Final = "The body came too slowly, so nothing was done: send it in one go, or in several requests"


class ApiRequest(Request[Actor, RequestSlot, Any]):
    """A request of somebody who was let in. Its body comes as a whole and not too slowly, or nothing is done."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        arriving, began_s, size = super().stream(), time.monotonic(), 0
        while True:
            left_s = began_s + BODY_TIMEOUT_S + size / BODY_BYTES_PER_S_MIN - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    chunk = await anext(arriving, None)
            except TimeoutError:
                raise HTTPException(status_code=408, detail=_TOO_SLOW) from None
            except InternalServerException as error:
                raise InvalidInput("The connection ended before the body did, so nothing was done.") from error
            if chunk is None:
                return
            size += len(chunk)
            yield chunk

    async def run_while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` for as long as somebody waits for the answer."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self._wait_disconnect())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

    async def _wait_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def json(self) -> Any:
        """Litestar asks for the body by this name; it is decoded once, into the type that the handler takes."""
        field = self.route_handler.parsed_data_field
        assert field is not None, "the body is asked for by handlers that take one"
        return decode_body(await self.body(), field.annotation, self.headers.get("content-type", JSON))


class ApiResponse(Response[Any]):
    """In the form that the client accepts."""

    def to_asgi_response(self, app: Litestar | None, request: Request[Any, Any, Any], **more: Any) -> ASGIResponse:
        if _wants_msgpack(request) and _is_json(more.get("media_type") or self.media_type):
            self.media_type = more["media_type"] = MSGPACK
        return super().to_asgi_response(app, request, **more)

    def render(self, content: Any, media_type: str, enc_hook: Any = None) -> bytes:
        if media_type == MSGPACK:
            return msgspec.msgpack.encode(content)
        return super().render(content, media_type, enc_hook)


def decode_body(body: bytes, kind: Any, media_type: str) -> Any:
    named = media_type.partition(";")[0].strip().lower()
    try:
        if named == JSON:
            return msgspec.json.decode(body, type=kind)
        if named == MSGPACK or named in MSGPACK_ALIASES:
            return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"The body cannot be read: {_error_text(error)}.") from error
    raise HTTPException(
        status_code=415, detail=f"Bodies of the type {named[:64]!r} are not read here: send {JSON} or {MSGPACK}"
    )


def _error_text(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = str(error)[:ERROR_CHARS_MAX].rstrip(".").replace("`", "")
    return f"{said[:1].lower()}{said[1:]}"


def _wants_msgpack(request: Request[Any, Any, Any]) -> bool:
    accepted = request.headers.get("accept", "")
    return "msgpack" in accepted


def _is_json(media_type: Any) -> bool:
    return media_type is None or str(getattr(media_type, "value", media_type)).startswith(JSON)
