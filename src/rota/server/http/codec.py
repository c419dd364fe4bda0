"""Request and response bodies: JSON, or msgpack by content type; decoded strictly into declared types."""

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
from rota.server.http.middleware.authentication import HEAD_KEY
from rota.server.http.middleware.rate_limit import RequestSlot

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
MSGPACK_ALIASES: Final = ("application/x-msgpack", "application/vnd.msgpack")
ERROR_CHARS_MAX: Final = 300
BODY_TIMEOUT_S: Final = 30.0
BODY_BYTES_PER_S_MIN: Final = 64 * 1024
"""A body may take `BODY_TIMEOUT_S`, plus the time at this rate for the bytes received."""
TOO_SLOW: Final = "The body arrived too slowly, so nothing was done: send it without pauses, or in several requests"


class ApiRequest(Request[Actor, RequestSlot, Any]):
    """An authenticated request. A truncated or too slow body raises before the handler runs."""

    @property
    def is_head(self) -> bool:
        """Whether only the headers are sent: a handler then neither waits nor opens a stream."""
        return bool(self.scope.get(HEAD_KEY))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        chunks, began_s, size = super().stream(), time.monotonic(), 0
        while True:
            remaining_s = began_s + BODY_TIMEOUT_S + size / BODY_BYTES_PER_S_MIN - time.monotonic()
            try:
                async with asyncio.timeout(remaining_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise HTTPException(status_code=408, detail=TOO_SLOW) from None
            except InternalServerException as error:
                raise InvalidInput(
                    "The connection closed before the body was complete, so nothing was done."
                ) from error
            if chunk is None:
                return
            size += len(chunk)
            yield chunk

    async def run_while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it is done or the client disconnects."""
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
        """Litestar reads the body through this method; decode it once, into the type that the handler takes."""
        field = self.route_handler.parsed_data_field
        assert field is not None, "only handlers with a body parameter read the body"
        return decode_body(await self.body(), field.annotation, self.headers.get("content-type", JSON))


class ApiResponse(Response[Any]):
    """A response in the format that the client accepts."""

    def to_asgi_response(self, app: Litestar | None, request: Request[Any, Any, Any], **more: Any) -> ASGIResponse:
        if _wants_msgpack(request) and _is_json(more.get("media_type") or self.media_type):
            self.media_type = more["media_type"] = MSGPACK
        return super().to_asgi_response(app, request, **more)

    def render(self, content: Any, media_type: str, enc_hook: Any = None) -> bytes:
        if media_type == MSGPACK:
            return msgspec.msgpack.encode(content)
        return super().render(content, media_type, enc_hook)


def decode_body(body: bytes, kind: Any, media_type: str) -> Any:
    content_type = media_type.partition(";")[0].strip().lower()
    try:
        if content_type == JSON:
            return msgspec.json.decode(body, type=kind)
        if content_type == MSGPACK or content_type in MSGPACK_ALIASES:
            return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"The body cannot be read: {_error_text(error)}.") from error
    raise HTTPException(
        status_code=415, detail=f"The content type {content_type[:64]!r} is not supported: send {JSON} or {MSGPACK}"
    )


def _error_text(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error)[:ERROR_CHARS_MAX].rstrip(".").replace("`", "")
    return f"{text[:1].lower()}{text[1:]}"


def _wants_msgpack(request: Request[Any, Any, Any]) -> bool:
    accepted = request.headers.get("accept", "")
    return "msgpack" in accepted


def _is_json(media_type: Any) -> bool:
    return media_type is None or str(getattr(media_type, "value", media_type)).startswith(JSON)
