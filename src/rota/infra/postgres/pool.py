"""A bounded pool of PostgreSQL connections.

Why not asyncpg's own: it wraps each loan in a proxy and runs a RESET round trip at each return, which doubles the cost
of a small statement. Here a loan is the bare connection and returning it is one append.

Invariants, all kept by this module:
- at most `pool_max` connections exist, counting those being opened and those being mended;
- who waits is served in order of arrival, within `acquire_timeout_s`, and never while a connection lies idle;
- the last one returned is lent first, so few connections stay busy and warm;
- what is lent out is open, outside a transaction and not busy: a returned connection that is in doubt (its user was
  cancelled or failed) is mended by a task of the pool before the next loan, or closed.

Session state is not reset between loans, so no user may leave any: `SET LOCAL` and transaction-level advisory locks
only. If this process dies, the server rolls back whatever was open.
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
    """Connections to one target. Users come through `Database`; who acquires must give back."""

    def __init__(self, target: PostgresTarget) -> None:
        self._target = target
        self._size = 0
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()
        self._mending: set[asyncio.Task[None]] = set()
        # A waiter is given a connection, or None: the right to open one in place of one that was closed.
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._closing = False
        self._returned = asyncio.Event()

    @property
    def size(self) -> int:
        """Connections that exist or are being opened."""
        return self._size

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def open_initial(self) -> None:
        """Open the first `pool_min` connections, at least one, so that a bad target is known at once."""
        with ExitStack() as opened:
            for _ in range(max(1, self._target.pool_min)):
                opened.callback(self.release, await self.acquire())

    def try_acquire(self) -> Connection | None:
        """An idle connection, if there is one: the quick way, without a turn of the event loop."""
        while self._idle and not self._closing:
            connection = self._idle.pop()
            if not connection.is_closed():
                self._lent.add(connection)
                return connection
            self._size -= 1
        return None

    async def acquire(self) -> Connection:
        """A connection to use alone until it goes back by `release` or `doubt`."""
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
        """Take back a connection whose last statement was answered."""
        if connection.is_closed() or connection.is_in_transaction():
            self.release_dirty(connection)
        else:
            self._return(connection)

    def release_dirty(self, connection: Connection) -> None:
        """Take back a connection that may be busy, broken or in a transaction; nobody gets it before it is mended."""
        if connection.is_closed():
            self._discard(connection)
            return
        task = asyncio.create_task(self._reset(connection), name="postgres.mend")
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    async def close(self) -> None:
        """Refuse new loans, give those under way `CLOSE_S` to end, close everything. May be called again."""
        self._closing = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(stopping_error(self._target))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._lent:
                    self._returned.clear()
                    await self._returned.wait()
        for connection in list(self._lent):
            connection.terminate()
        await asyncio.gather(*self._mending)
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
                gift = await waiter
        except TimeoutError:
            self._cancel_wait(waiter)
            raise self._exhausted_error() from None
        except BaseException:
            self._cancel_wait(waiter)
            raise
        if gift is not None:
            return gift
        return await self._open()

    def _cancel_wait(self, waiter: asyncio.Future[Connection | None]) -> None:
        """Step out of the queue; what was handed to us in the same moment goes to the next."""
        if not waiter.done() or waiter.cancelled() or waiter.exception() is not None:
            with suppress(ValueError):
                self._waiters.remove(waiter)
        elif (gift := waiter.result()) is None:
            self._free_slot()
        else:
            self.release(gift)

    def _return(self, connection: Connection) -> None:
        self._lent.discard(connection)
        if self._closing:
            self._returned.set()
        if not self._give_to_waiter(connection):
            self._idle.append(connection)

    def _discard(self, connection: Connection) -> None:
        self._lent.discard(connection)
        self._returned.set()
        self._free_slot()

    def _free_slot(self) -> None:
        if not self._give_to_waiter(None):
            self._size -= 1

    def _give_to_waiter(self, gift: Connection | None) -> bool:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                if gift is not None:
                    self._lent.add(gift)
                waiter.set_result(gift)
                return True
        return False

    async def _reset(self, connection: Connection) -> None:
        """Wait until a cancelled statement is over on the server and roll back; close what does not answer."""
        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                # asyncpg first waits for its pending cancel request; once answered, the state it reports is true again.
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
