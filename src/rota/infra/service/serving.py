"""Uvicorn under Rota's lifecycle, with limits for slow clients and for heads without end.

Uvicorn waits forever for the rest of a request's head, so a few hundred clients that send half of one would exhaust the
sockets. Here a head must arrive within `HEAD_TIMEOUT_S` of the connection, or of its first byte on a reused connection,
and has at most `HEAD_BYTES_MAX`: the parser takes any number. The same holds for trailers and chunk extensions, which
are ignored: they must not become headers of a request that is being answered. A client that reads nothing of its
response for `STALL_TIMEOUT_S` is disconnected as well. The application bounds what follows the head: a body or a long
response.

The end of a request must be as clear to us as to a proxy in front of us, or a client could hide a request in a body
(request smuggling). The parser takes what follows a request with `Upgrade`, or CONNECT, for another protocol, its body
too; we switch to none. Such a request is refused if it has a body; otherwise it is the last of its connection.

What is refused gets a 400, unless that would stand in place of another response: responses to earlier requests are sent
first, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rota.infra.service.lifecycle import Lifecycle

HEAD_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
HEAD_BYTES_MAX = 64 * 1024
"""Of a head, and between two parts of a body. Counted in whole reads; a read that ends one of these counts as none."""
PIPELINED_MAX = 16
"""Up to this many requests in line are read on from, because only reads show a disconnect."""
ABORT_EXTENSION = "rota.cut"
"""ASGI scope extension: a function that aborts the connection and drops unsent data, for clients that do not read.
Closing would wait for them."""
_FRAMING_HEADERS: Final = frozenset({b"host", b"content-length", b"transfer-encoding"})
_INVALID: Final = "The request is not valid HTTP."
_TOO_LARGE: Final = f"The head or a trailer of the request is too large: send at most {HEAD_BYTES_MAX} bytes."


class _AmbiguousRequest(Exception):
    """Another server could find another host or another end of this request."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. Between two requests uvicorn's own keep-alive limit applies."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the last one that was read."""
    _framing_bytes = 0
    """Received since the last head, part of a body or end of a request."""
    _is_in_body = False
    _is_input_ended = False
    """What the client sends from now on is dropped."""

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.app = self._run_app

    async def _run_app(self, scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"] = {**scope.get("extensions", {}), ABORT_EXTENSION: self.transport.abort}
        await self.config.loaded_app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_input_ended or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._framing_bytes += len(data)  # the callbacks set it to 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # `on_headers_complete` has ended the input
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(str(cause) if isinstance(cause, _AmbiguousRequest) else _INVALID)
        if self._framing_bytes > HEAD_BYTES_MAX:
            self._refuse(_TOO_LARGE)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self._start_head_timer()
        else:
            self._cancel_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        is_upgrade = self.parser.should_upgrade()
        _check_framing(self.headers, self.parser.get_http_version(), is_upgrade=is_upgrade)
        was_reading = not self.flow.read_paused
        super().on_headers_complete()
        if self.pipeline and was_reading and len(self.pipeline) <= PIPELINED_MAX:
            self.flow.resume_reading()
        if is_upgrade:
            self.cycle.keep_alive = False
            self._is_input_ended = True
        self._is_in_body = True
        self._framing_bytes = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._framing_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_body = False
        self._framing_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, reason: str) -> None:
        """Answer 400 and close the connection; after the responses to earlier requests it is closed without one."""
        if self._is_input_ended:
            return
        self._is_input_ended = True
        self.logger.warning(reason)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or (cycle.response_complete and not self._is_in_body):
            self.send_400_response(reason)
        elif not self._is_in_body:
            cycle.keep_alive = False
        elif cycle is self._running:
            self._end_response(cycle)
            if cycle.response_started:
                self.transport.close()
            else:
                self.send_400_response(reason)
        else:
            assert self._running is not None, "requests wait for a running one"
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
            self.cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_stall_timer()
        if self._running is not None:
            self._end_response(self._running)
        super().connection_lost(exc)

    @staticmethod
    def _end_response(cycle: RequestResponseCycle) -> None:
        """Let the app know that nobody reads what it sends from now on. Uvicorn tells only the last request."""
        cycle.disconnected = True
        cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_stall_timer()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_stall_timer()
        super().resume_writing()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _check_framing(headers: list[tuple[bytes, bytes]], http_version: str, *, is_upgrade: bool) -> None:
    """Raises _AmbiguousRequest. The parser has refused what is wrong with Content-Length."""
    hosts, length, encodings = 0, b"0", []
    for name, value in headers:
        if name in _FRAMING_HEADERS:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                length = value
            else:
                encodings.append(value)
    if http_version not in ("1.0", "1.1"):
        raise _AmbiguousRequest("This version of HTTP is not supported: send HTTP/1.1.")
    if hosts != 1 and (hosts or http_version == "1.1"):
        raise _AmbiguousRequest("The request has no Host header or several: send one.")
    if encodings and (http_version == "1.0" or len(encodings) > 1 or encodings[0].strip().lower() != b"chunked"):
        raise _AmbiguousRequest("This Transfer-Encoding is not supported: send `chunked`, by HTTP/1.1, or a length.")
    if is_upgrade and (encodings or length.strip() != b"0"):
        raise _AmbiguousRequest("This server switches to no other protocol: send the body without Upgrade or CONNECT.")


class UvicornServer(uvicorn.Server):
    """Uvicorn under Rota's lifecycle: no signal handlers, no polling for the end."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle) -> None:
        super().__init__(config)
        self.servers = []
        self._lifecycle = lifecycle

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._lifecycle.ready()

    async def main_loop(self) -> None:
        await self._lifecycle.until_draining()

    async def abort(self) -> None:
        """Close everything when the graceful close timed out, was cancelled or never ran."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        requests = set(self.server_state.tasks)
        for request in requests:
            request.cancel()
        if requests:
            await asyncio.wait(requests, timeout=1.0)
