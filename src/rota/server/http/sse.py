"""Server-sent events as an answer, for as long as the client reads and its key is good.

What holds, and who sees to it:
- a client that does not read is cut: nothing more than `PIECE_BYTES` is handed to its connection before that has taken
  them, and when this takes longer than `SEND_S` the connection is dropped, with what lies in its buffers;
- it ends with its key and with the server: `streams`;
- only so many at a time, of a key and of all: `pressure`.

A line every `BEAT_S` keeps those between us and the client from closing the connection; it says how far the client has
come, for one whose filter passes nothing on. If we die, the client goes on elsewhere from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from litestar import Response
from litestar.response.base import ASGIResponse

from rota.infra.service.listener import Receive, Scope, Send
from rota.infra.service.serving import ABORT_EXTENSION
from rota.model.api_key_format import key_from_headers
from rota.model.errors import RotaError
from rota.server.http.codec import ApiRequest
from rota.server.http.open_streams import OpenStream, StreamRegistry

MEDIA_TYPE: Final = "text/event-stream"
HEARTBEAT_INTERVAL_S: Final = 15.0
SEND_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 1.0
CHUNK_BYTES: Final = 64 * 1024
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class SseSource(Protocol):
    """What is streamed."""

    def preamble(self) -> bytes:
        """Sent first."""
        ...

    async def next(self, wait_s: float) -> Sequence[bytes] | None:
        """What is new, as text in parts; when nothing came in time a line that says so; None: that was all."""
        ...


class SseResponse(Response[None]):
    """What a handler answers with. What `source` raises is answered as a problem."""

    def __init__(
        self, request: ApiRequest, streams: StreamRegistry, source: AbstractAsyncContextManager[SseSource | None]
    ) -> None:
        super().__init__(None)
        self._request = request
        self._streams = streams
        self._source = source

    def to_asgi_response(self, *_given: Any, **_more: Any) -> ASGIResponse:
        return _SseAsgiResponse(self._request, self._streams, self._source)


class _SseAsgiResponse(ASGIResponse):
    __slots__ = ("_request", "_source", "_streams")

    def __init__(
        self, request: ApiRequest, streams: StreamRegistry, source: AbstractAsyncContextManager[SseSource | None]
    ) -> None:
        super().__init__()
        self._request = request
        self._streams = streams
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        asked = self._request
        key = key_from_headers(asked.headers.get("authorization"), asked.headers.get("x-api-key"))
        asked.auth.begin_wait()
        with self._streams.open(key, asked.user) as stream:
            async with self._source as source:
                await _send_head(send, 204 if source is None else 200)
                if source is not None:
                    await _send_events(stream, source, receive, send)
        try:
            async with asyncio.timeout(0 if stream.reason == "slow" else CLOSE_TIMEOUT_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            scope["extensions"][ABORT_EXTENSION]()
            await _watch_disconnect(stream, receive)


async def _send_head(send: Send, status: int) -> None:
    headers = list(HEADERS) if status == 200 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_events(stream: OpenStream, source: SseSource, receive: Receive, send: Send) -> None:
    leaving = asyncio.create_task(_watch_disconnect(stream, receive), name="stream.left")
    try:
        async with stream.cancel_on_end():
            await _send_chunks(stream, [source.preamble()], send)
            while not stream.reason and (texts := await source.next(HEARTBEAT_INTERVAL_S)) is not None:
                await _send_chunks(stream, texts, send)
    except RotaError as error:
        stream.reason = error.code  # the head is sent, so the client learns it when it comes again
    finally:
        leaving.cancel()
        await asyncio.wait([leaving])


async def _watch_disconnect(stream: OpenStream, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.end("left")


async def _send_chunks(stream: OpenStream, texts: Sequence[bytes], send: Send) -> None:
    """Piece by piece: a connection takes the next when it has room for it."""
    for piece in chunked(texts):
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            stream.reason = "slow"
            raise


def chunked(texts: Sequence[bytes]) -> Iterator[bytes]:
    """Of about the same size: small texts together, large ones cut, none of them copied as a whole."""
    small: list[bytes] = []
    size = 0
    for text in texts:
        for at in range(0, len(text), CHUNK_BYTES):
            part = text[at : at + CHUNK_BYTES]
            if size + len(part) > CHUNK_BYTES:
                yield b"".join(small)
                small, size = [], 0
            small.append(part)
            size += len(part)
    if small:
        yield b"".join(small)
