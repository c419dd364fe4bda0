"""PostgreSQL for everybody else: statements, transactions and notifications over one bounded pool.

Who keeps what:
- the pool: no more than `pool_max` connections, none lent while busy, broken or in a transaction (see `pool`);
- the reserve: up to `RESERVED` more, opened when first used, for short statements that must not queue behind work
  (`urgent`): a lease whose renewal waits for the work it covers would be lost by that work;
- the server: `statement_timeout`, `lock_timeout` and `idle_in_transaction_session_timeout`, so a forgotten or paused
  process cannot hold rows for ever; the client's own timeout only catches a server that no longer answers;
- `failures`: what a lost connection means. A statement whose reply was lost has an *unknown* outcome, and so has a
  COMMIT: it is raised as `PostgresUnavailable` with `outcome="unknown"` and never tried again here.

If we die inside a transaction, the server rolls it back; if we die after COMMIT was sent, it stands. A cancelled caller
gets its `CancelledError` at once, and its connection is mended behind its back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, Self, TypeVar

import msgspec

from rota.infra import failpoints
from rota.infra.postgres import failures
from rota.infra.postgres.driver import Connection, Record
from rota.infra.postgres.listen import NotificationListener, Notifications
from rota.infra.postgres.pool import RESET_TIMEOUT_S, ConnectionPool
from rota.infra.postgres.sql import Query
from rota.infra.postgres.target import PostgresTarget, milliseconds

Isolation = Literal["read committed", "repeatable read", "serializable"]
T = TypeVar("T")

# Two, so that one that is being mended after a cancelled statement keeps nobody waiting.
RESERVED_CONNECTIONS = 2


class Transaction:
    """Statements inside one open transaction; made by `Database.transaction`."""

    def __init__(self, connection: Connection, target: PostgresTarget, isolation: Isolation) -> None:
        self.connection = connection
        self.isolation = isolation
        self.afterwards: list[Callable[[], None]] = []
        """Called once the COMMIT was answered; whoever is called must neither fail nor be needed."""
        self._target = target
        self._savepoints = 0

    async def rows(self, query: Query, *args: object) -> list[Record]:
        return await self.translate_errors(self.connection.fetch(query.text, *args))

    async def row(self, query: Query, *args: object) -> Record | None:
        return await self.translate_errors(self.connection.fetchrow(query.text, *args))

    async def value(self, query: Query, *args: object) -> Any:
        return await self.translate_errors(self.connection.fetchval(query.text, *args))

    async def run(self, query: Query, *args: object) -> int:
        return rows_affected(await self.translate_errors(self.connection.execute(query.text, *args)))

    async def run_many(self, query: Query, many: Iterable[Sequence[object]]) -> None:
        await self.translate_errors(self.connection.executemany(query.text, many))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Undo only what happens inside when it raises; the transaction stays usable."""
        self._savepoints += 1
        name = f"s{self._savepoints}"
        await self.translate_errors(self.connection.execute(f"SAVEPOINT {name}"))
        try:
            yield
        except Exception:
            if not self.connection.is_closed():
                await self.translate_errors(self.connection.execute(f"ROLLBACK TO {name}"))
            raise
        await self.translate_errors(self.connection.execute(f"RELEASE {name}"))

    async def translate_errors(self, statement: Awaitable[T]) -> T:
        """Await something done on `connection`; a lost connection becomes `PostgresUnavailable`."""
        try:
            return await statement
        except failures.FAILURES as error:
            lost = failures.on_transaction(error, self._target, closed=self.connection.is_closed())
            if lost is None:
                raise
            raise lost from error


class ConnectionCheckout:
    """Gives a connection back after one statement; what went wrong decides in which state it goes."""

    __slots__ = ("_connection", "_pool", "_target")

    def __init__(self, connection: Connection, pool: ConnectionPool, target: PostgresTarget) -> None:
        self._connection = connection
        self._pool = pool
        self._target = target

    def __enter__(self) -> Connection:
        return self._connection

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self._pool.release(self._connection)
            return
        lost = failures.on_statement(error, self._target, closed=self._connection.is_closed())
        if lost is None and isinstance(error, failures.SERVER_ERRORS):
            self._pool.release(self._connection)
        else:
            self._pool.release_dirty(self._connection)
        if lost is not None:
            raise lost from error


class Database:
    """One database through one pool. Make it with `open`, end it with `close`."""

    def __init__(self, target: PostgresTarget) -> None:
        self.target = target
        self.pool = ConnectionPool(target)
        self._reserve = ConnectionPool(msgspec.structs.replace(target, pool_min=0, pool_max=RESERVED_CONNECTIONS))
        self._listener = NotificationListener(target)

    @classmethod
    async def open(cls, target: PostgresTarget) -> Self:
        """Connect, so that a wrong URL, password or database is known now."""
        database = cls(target)
        try:
            await database.pool.open_initial()
        except BaseException:
            await database.close()
            raise
        return database

    async def close(self) -> None:
        """Wait a moment for statements under way, then close every connection. May be called again."""
        await self._listener.close()
        await self.pool.close()
        await self._reserve.close()

    async def rows(self, query: Query, *args: object, urgent: bool = False) -> list[Record]:
        """All rows. An `urgent` statement takes a connection of the reserve, however busy the pool is."""
        pool = self._reserve if urgent else self.pool
        with ConnectionCheckout(pool.try_acquire() or await pool.acquire(), pool, self.target) as connection:
            return await connection.fetch(query.text, *args)

    async def row(self, query: Query, *args: object) -> Record | None:
        with self._checkout(self.pool.try_acquire() or await self.pool.acquire()) as connection:
            return await connection.fetchrow(query.text, *args)

    async def value(self, query: Query, *args: object) -> Any:
        """The first column of the first row, or None."""
        with self._checkout(self.pool.try_acquire() or await self.pool.acquire()) as connection:
            return await connection.fetchval(query.text, *args)

    async def run(self, query: Query, *args: object) -> int:
        """How many rows were inserted, updated, deleted or selected."""
        with self._checkout(self.pool.try_acquire() or await self.pool.acquire()) as connection:
            return rows_affected(await connection.execute(query.text, *args))

    async def run_many(self, query: Query, many: Iterable[Sequence[object]]) -> None:
        """The same statement for each tuple of arguments, all of them or none."""
        with self._checkout(self.pool.try_acquire() or await self.pool.acquire()) as connection:
            await connection.executemany(query.text, many)

    def listen(self, channel: str) -> AbstractAsyncContextManager[Notifications]:
        """Notifications on `channel`; see `listen` for what `None` among them means."""
        return self._listener.listen(channel)

    @asynccontextmanager
    async def transaction(
        self, isolation: Isolation = "read committed", *, readonly: bool = False, idle_s: float | None = None
    ) -> AsyncIterator[Transaction]:
        """COMMIT when the body ends, ROLLBACK when it raises.

        A COMMIT whose reply is lost may have happened: `PostgresUnavailable` with `outcome="unknown"`. A COMMIT that is
        cancelled may have happened, too. Who says nothing for `idle_s`, where that is less than the session's own
        limit, is cut off by the server.
        """
        connection = await self.pool.acquire()
        transaction = Transaction(connection, self.target, isolation)
        try:
            await transaction.translate_errors(
                connection.execute(_begin(isolation, self.target, idle_s, readonly=readonly))
            )
            yield transaction
            await self._commit(connection)
        except Exception:
            await self._roll_back(connection)
            raise
        except BaseException:
            self.pool.release_dirty(connection)
            raise
        self.pool.release(connection)
        for tell in transaction.afterwards:
            tell()

    def _checkout(self, connection: Connection) -> ConnectionCheckout:
        return ConnectionCheckout(connection, self.pool, self.target)

    async def _commit(self, connection: Connection) -> None:
        try:
            done = await connection.execute("COMMIT")
            failpoints.after_send("postgres.commit")
        except failures.FAILURES as error:
            unknown = failures.on_commit(error, self.target, closed=connection.is_closed())
            if unknown is None:
                raise
            raise unknown from error
        if done != "COMMIT":
            # The server answers COMMIT with ROLLBACK, and no error, when a statement had failed before.
            raise AssertionError("a statement of this transaction failed and its error was swallowed: use savepoint()")

    async def _roll_back(self, connection: Connection) -> None:
        try:
            if not connection.is_closed() and connection.is_in_transaction():
                await connection.execute("ROLLBACK", timeout=RESET_TIMEOUT_S)
                self.pool.release(connection)
            else:
                self.pool.release_dirty(connection)
        except BaseException as error:
            self.pool.release_dirty(connection)
            if not isinstance(error, failures.FAILURES):
                raise


def _begin(isolation: Isolation, target: PostgresTarget, idle_s: float | None, *, readonly: bool) -> str:
    begin = f"BEGIN ISOLATION LEVEL {isolation} {'READ ONLY' if readonly else 'READ WRITE'}"
    if idle_s is None or idle_s >= target.idle_in_transaction_s:
        return begin
    return f"{begin}; SET LOCAL idle_in_transaction_session_timeout = {milliseconds(idle_s)}"  # one round trip


def rows_affected(status: str) -> int:
    """The count at the end of a command tag: `INSERT 0 3` is 3, `SET` is 0."""
    count = status.rpartition(" ")[2]
    return int(count) if count.isdigit() else 0
