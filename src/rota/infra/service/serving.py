"""Uvicorn under our lifecycle, and without its endless patience.

Uvicorn waits for ever for the rest of a request's head, so a few hundred clients that send half of one would use up our
sockets. Here a head has `HEAD_S` from the moment the connection is made, or from its first byte on a connection that
has been used before. A client that takes nothing of its answer for `STALL_S` is cut off, too, or the answer would wait
for ever. What comes after the head, a body or a long answer, is the application's business.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from rota.infra.service.lifecycle import Lifecycle

HEAD_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
ABORT_EXTENSION = "rota.cut"
"""An extension of the scope: called, it drops the connection with all that was not sent yet, for clients that do not
read. Closing would wait for them."""


class HttpProtocol(H11Protocol):
    """One connection. Between two requests uvicorn's own keep-alive limit holds."""

    _head_due: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def __init__(self, config: uvicorn.Config, *given: Any, **more: Any) -> None:
        super().__init__(config, *given, **more)
        self.app = self._run_app

    async def _run_app(self, scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"] = {**scope.get("extensions", {}), ABORT_EXTENSION: self.transport.abort}
        await self.config.loaded_app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self._start_head_timer()
        else:
            self._cancel_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_stall_timer()
        self._stalled = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_stall_timer()
        super().resume_writing()

    def _cancel_stall_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _start_head_timer(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


class UvicornServer(uvicorn.Server):
    """Uvicorn under our lifecycle: no signal handlers, no polling for the end."""

    def __init__(self, config: uvicorn.Config, life: Lifecycle) -> None:
        super().__init__(config)
        self.servers = []
        self._life = life

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._life.ready()

    async def main_loop(self) -> None:
        await self._life.until_draining()

    async def abort(self) -> None:
        """Leave nothing open when the graceful close ran out, was cancelled or never came."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        requests = set(self.server_state.tasks)
        for request in requests:
            request.cancel()
        if requests:
            await asyncio.wait(requests, timeout=1.0)
