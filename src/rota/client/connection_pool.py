"""Keep-alive connections to one endpoint. The cost of a request does not depend on how many are under way.

A request takes the connection that was used last, opens one while there are fewer than `connections_max`, or waits in
line. Who returns a connection hands it, or the right to open one, to the first in line, so none is overtaken.

| while | happens | then |
|---|---|---|
| in line | the caller is cancelled | it passes on what it was just handed |
| connecting | failure, timeout, cancellation | the right to connect passes to the first in line |
| a response is awaited | failure, timeout, cancellation | the connection is closed: the next request must not get it |
| anything | the pool is closed | its connections end, and so do their requests, with an unknown outcome |
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec

from rota.client.connection import HttpConnection, HttpResponse, PoolTimeout
from rota.client.connector import Connector

CLOSE_TIMEOUT_S: Final = 1.0


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    connections_max: int
    idle_max: int
    keepalive_s: float
    """Idle connections are not used again after this."""
    connect_timeout_s: float
    line_timeout_s: float
    """To get a connection."""


class ConnectionPool:
    """Belongs to the event loop it is created on."""

    def __init__(self, connector: Connector, limits: PoolLimits) -> None:
        self._connector = connector
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._taken = 0
        """Connections that exist or are being opened."""
        self._line: deque[asyncio.Future[HttpConnection | None]] = deque()
        """Each gets a connection, or None: the right to open one."""
        self._is_closed = False

    async def request(
        self, head: bytes, body: bytes | None, *, read_timeout_s: float, timeout_s: float
    ) -> HttpResponse:
        """Raises RequestError, or TimeoutError after `timeout_s`."""
        deadline_s = self._loop.time() + timeout_s
        connection = await self._acquire()
        try:
            return await connection.request(head, body, read_timeout_s=read_timeout_s, deadline_s=deadline_s)
        finally:
            self._release(connection)

    async def close(self) -> None:
        self._is_closed = True
        self._idle.clear()
        closing = [connection.closed for connection in self._all]
        for connection in list(self._all):
            connection.abort()
        if closing:  # a loop that ends right after this would leave them open
            await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)

    async def _acquire(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if self._is_fresh(connection):
                return connection
            self._drop(connection)
        if self._taken < self._limits.connections_max:
            self._taken += 1
            return await self._open()
        connection_or_right = await self._stand_in_line()
        return connection_or_right if connection_or_right is not None else await self._open()

    async def _stand_in_line(self) -> HttpConnection | None:
        turn: asyncio.Future[HttpConnection | None] = self._loop.create_future()
        self._line.append(turn)
        try:
            async with asyncio.timeout(self._limits.line_timeout_s):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._pass_on(turn.result())
            if isinstance(error, TimeoutError):
                raise PoolTimeout from error
            raise

    async def _open(self) -> HttpConnection:
        """The caller has the right to open one; it is passed on if this fails."""
        try:
            _, connection = await self._connector.connect(HttpConnection, self._limits.connect_timeout_s)
        except BaseException:
            self._pass_on(None)
            raise
        self._all.add(connection)
        connection.closed.add_done_callback(lambda _closed: self._all.discard(connection))
        if self._is_closed:
            connection.abort()
        return connection

    def _release(self, connection: HttpConnection) -> None:
        connection.idle_since_s = self._loop.time()
        if not connection.is_closed and not self._is_closed and (self._has_line() or self._has_room()):
            self._pass_on(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: HttpConnection) -> None:
        connection.abort()
        self._pass_on(None)

    def _pass_on(self, connection_or_right: HttpConnection | None) -> None:
        """To the first in line; without a line a connection becomes idle, and a right ends."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(connection_or_right)
                return
        if connection_or_right is None:
            self._taken -= 1
        else:
            self._idle.append(connection_or_right)

    def _has_line(self) -> bool:
        return any(not turn.done() for turn in self._line)

    def _has_room(self) -> bool:
        return len(self._idle) < self._limits.idle_max

    def _is_fresh(self, connection: HttpConnection) -> bool:
        is_young = self._loop.time() - connection.idle_since_s < self._limits.keepalive_s
        return is_young and connection.is_reusable()
