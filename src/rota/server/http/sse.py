"""Server-sent events as a response that lasts while the client reads and its key is valid.

Invariants and who enforces them:
- A slow consumer is disconnected: at most `CHUNK_BYTES` are passed to the connection before it has taken them; after
  `SEND_TIMEOUT_S` the connection is aborted, with the data in its buffers.
- A stream ends with its key and with the server: `open_streams`.
- The number of streams per key and in total is bounded: `middleware.rate_limit`.
- HEAD gets the headers and takes no stream: it would never end, since its client waits for no body.

A heartbeat every `HEARTBEAT_INTERVAL_S` keeps proxies from closing the connection. It carries the current position, for
clients whose filter matches nothing. If the server dies, the client resumes elsewhere from that position.
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
from rota.model.errors import RotaError
from rota.model.identity.api_key_format import key_from_headers
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
    """The source of a stream."""

    def preamble(self) -> bytes:
        """The bytes sent first."""
        ...

    async def next(self, wait_s: float) -> Sequence[bytes] | None:
        """New events, encoded in parts; a heartbeat line after `wait_s` without any; None at the end."""
        ...


class SseResponse(Response[None]):
    """The response of a handler. An error on entering `source` becomes a problem document."""

    def __init__(
        self, request: ApiRequest, streams: StreamRegistry, source: AbstractAsyncContextManager[SseSource | None]
    ) -> None:
        super().__init__(None)
        self._request = request
        self._streams = streams
        self._source = source

    def to_asgi_response(self, *_args: Any, **_kwargs: Any) -> ASGIResponse:
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
        request = self._request
        if request.is_head:
            async with self._source as source:
                await _send_head(send, 204 if source is None else 200)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        key = key_from_headers(request.headers.get("authorization"), request.headers.get("x-api-key"))
        request.auth.begin_wait()
        with self._streams.open(key, request.user) as stream:
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
    disconnect_watch = asyncio.create_task(_watch_disconnect(stream, receive), name="stream.left")
    try:
        async with stream.cancel_on_end():
            await _send_chunks(stream, [source.preamble()], send)
            while not stream.reason and (texts := await source.next(HEARTBEAT_INTERVAL_S)) is not None:
                await _send_chunks(stream, texts, send)
    except RotaError as error:
        stream.reason = error.code  # headers are sent: the client gets the error when it reconnects
    finally:
        disconnect_watch.cancel()
        await asyncio.wait([disconnect_watch])


async def _watch_disconnect(stream: OpenStream, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.end("left")


async def _send_chunks(stream: OpenStream, texts: Sequence[bytes], send: Send) -> None:
    """Send chunk by chunk: the connection applies back-pressure between chunks."""
    for chunk in chunked(texts):
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            stream.reason = "slow"
            raise


def chunked(texts: Sequence[bytes]) -> Iterator[bytes]:
    """Chunks of at most `CHUNK_BYTES`: joins small texts and splits large ones without copying them whole."""
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
