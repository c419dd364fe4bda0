"""A bounded pool of PostgreSQL connections.

asyncpg's own pool wraps each checkout in a proxy and sends RESET on every release, which doubles the cost of a small
statement. This pool lends the bare connection, and a release is one list append.

Invariants, all enforced by this module:
- at most `pool_max` connections exist, counting those being opened and those being reset;
- waiters are served in FIFO order, within `acquire_timeout_s`, and never while a connection is idle;
- the most recently released connection is lent first, so that few connections stay busy and warm;
- a lent connection is open, idle and outside a transaction: after its user was cancelled or failed, a background task
  resets or closes it before the next checkout.

Session state is not reset between checkouts, so users must leave none: only `SET LOCAL` and transaction-level advisory
locks. If this process dies, the server rolls back open transactions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack, suppress

from rota.infra.postgres.driver import Connection, close_connection, connect
from rota.infra.postgres.failures import FAILURES, stopping_error
from rota.infra.postgres.target import PostgresTarget
from rota.model.errors import PostgresUnavailable

RESET_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 5.0


class ConnectionPool:
    """Connections to one target, used through `Database`. Every `acquire` needs a `release` or `release_dirty`."""

    def __init__(self, target: PostgresTarget) -> None:
        self._target = target
        self._size = 0
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()
        self._resetting: set[asyncio.Task[None]] = set()
        # A waiter receives a connection, or None: a free slot in which to open one.
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._closing = False
        self._released = asyncio.Event()

    @property
    def size(self) -> int:
        """Connections that exist or are being opened."""
        return self._size

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def open_initial(self) -> None:
        """Open `pool_min` connections, at least one, so that a bad target fails on start."""
        with ExitStack() as opened:
            for _ in range(max(1, self._target.pool_min)):
                opened.callback(self.release, await self.acquire())

    def try_acquire(self) -> Connection | None:
        """An idle connection, if there is one; the fast path, which never yields to the event loop."""
        while self._idle and not self._closing:
            connection = self._idle.pop()
            if not connection.is_closed():
                self._lent.add(connection)
                return connection
            self._size -= 1
        return None

    async def acquire(self) -> Connection:
        """A connection for exclusive use until `release` or `release_dirty`."""
        if self._closing:
            raise stopping_error(self._target)
        connection = self.try_acquire()
        if connection is not None:
            return connection
        if self._size < self._target.pool_max:
            self._size += 1
            return await self._open()
        return await self._wait()

    def release(self, connection: Connection) -> None:
        """Return a connection whose last statement completed."""
        if connection.is_closed() or connection.is_in_transaction():
            self.release_dirty(connection)
        else:
            self._return(connection)

    def release_dirty(self, connection: Connection) -> None:
        """Return a connection that may be busy, broken or in a transaction; it is reset before anyone else gets it."""
        if connection.is_closed():
            self._discard(connection)
            return
        task = asyncio.create_task(self._reset(connection), name="postgres.reset")
        self._resetting.add(task)
        task.add_done_callback(self._resetting.discard)

    async def close(self) -> None:
        """Refuse new checkouts, wait up to `CLOSE_TIMEOUT_S` for current ones, close all connections. Idempotent."""
        self._closing = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(stopping_error(self._target))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._lent:
                    self._released.clear()
                    await self._released.wait()
        for connection in list(self._lent):
            connection.terminate()
        await asyncio.gather(*self._resetting)
        idle, self._idle = self._idle, []
        self._size -= len(idle)
        await asyncio.gather(*map(close_connection, idle))

    async def _open(self) -> Connection:
        try:
            connection = await connect(self._target)
        except BaseException:
            self._free_slot()
            raise
        if self._closing:
            connection.terminate()
            self._free_slot()
            raise stopping_error(self._target)
        self._lent.add(connection)
        return connection

    async def _wait(self) -> Connection:
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._target.acquire_timeout_s):
                granted = await waiter
        except TimeoutError:
            self._cancel_wait(waiter)
            raise self._exhausted_error() from None
        except BaseException:
            self._cancel_wait(waiter)
            raise
        if granted is not None:
            return granted
        return await self._open()

    def _cancel_wait(self, waiter: asyncio.Future[Connection | None]) -> None:
        """Leave the queue; a connection or slot received at the same moment goes to the next waiter."""
        if not waiter.done() or waiter.cancelled() or waiter.exception() is not None:
            with suppress(ValueError):
                self._waiters.remove(waiter)
        elif (granted := waiter.result()) is None:
            self._free_slot()
        else:
            self.release(granted)

    def _return(self, connection: Connection) -> None:
        self._lent.discard(connection)
        if self._closing:
            self._released.set()
        if not self._give_to_waiter(connection):
            self._idle.append(connection)

    def _discard(self, connection: Connection) -> None:
        self._lent.discard(connection)
        self._released.set()
        self._free_slot()

    def _free_slot(self) -> None:
        if not self._give_to_waiter(None):
            self._size -= 1

    def _give_to_waiter(self, granted: Connection | None) -> bool:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                if granted is not None:
                    self._lent.add(granted)
                waiter.set_result(granted)
                return True
        return False

    async def _reset(self, connection: Connection) -> None:
        """Wait for a cancelled statement to end on the server, then roll back; close the connection on no answer."""
        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                # asyncpg first waits for its pending cancel request; after the answer its reported state is correct.
                if not connection.is_in_transaction():
                    await connection.execute("SELECT 1")
                if connection.is_in_transaction():
                    await connection.execute("ROLLBACK")
        except BaseException as error:
            connection.terminate()
            self._discard(connection)
            if not isinstance(error, FAILURES):
                raise
        else:
            self._return(connection)

    def _exhausted_error(self) -> PostgresUnavailable:
        return PostgresUnavailable(
            f"All {self._target.pool_max} connections to PostgreSQL at {self._target.address} were busy for"
            f" {self._target.acquire_timeout_s:g} s: raise pool_max, or look for long transactions.",
            address=self._target.address,
            outcome="not_sent",
        )
