"""Access to PostgreSQL: statements, transactions and notifications over one bounded pool.

Responsibilities:
- pool: at most `pool_max` connections, none lent while busy, broken or in a transaction (see `pool`);
- reserve: up to `RESERVED_CONNECTIONS` more, opened on first use, for short statements that must not queue behind work
  (`urgent`): a lease would expire if its renewal waited for the work it covers;
- server: `statement_timeout`, `lock_timeout` and `idle_in_transaction_session_timeout`, so that a stuck or paused
  process cannot hold row locks forever; the client's timeout only covers a server that no longer answers;
- `failures`: meaning of a lost connection. A statement or COMMIT whose reply was lost has an *unknown* outcome: it is
  raised as `PostgresUnavailable` with `outcome="unknown"` and never retried here. `unknown_outcome_listeners` learn of
  it, because what was to follow the reply does not happen.

Crash cases: if this process dies inside a transaction, the server rolls it back; after COMMIT was sent, it may stand.
A cancelled caller gets its `CancelledError` immediately; the pool resets its connection in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
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

# Two, so that an urgent statement does not wait while the other connection is reset after a cancellation.
RESERVED_CONNECTIONS = 2


class Transaction:
    """Statements inside one open transaction; created by `Database.transaction`."""

    def __init__(
        self, connection: Connection, target: PostgresTarget, isolation: Isolation, *, readonly: bool = False
    ) -> None:
        self.connection = connection
        self.isolation = isolation
        self.after_commit: list[Callable[[], None]] = []
        """Callbacks after a confirmed COMMIT. They must not raise, and a crash may skip them: for hints only."""
        self._target = target
        self._readonly = readonly
        self._savepoints = 0

    async def rows(self, query: Query, *args: object) -> list[Record]:
        return await self.translate_errors(self.connection.fetch(query.text, *args))

    async def row(self, query: Query, *args: object) -> Record | None:
        return await self.translate_errors(self.connection.fetchrow(query.text, *args))

    async def value(self, query: Query, *args: object) -> Any:
        return await self.translate_errors(self.connection.fetchval(query.text, *args))

    async def run(self, query: Query, *args: object) -> int:
        return rows_affected(await self.translate_errors(self.connection.execute(query.text, *args)))

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Roll back only the body when it raises; the transaction stays usable."""
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
        """Await an operation on `connection`; see `failures`."""
        try:
            return await statement
        except failures.FAILURES as error:
            if self._readonly and isinstance(error, failures.STANDBY_ERRORS):
                raise  # a write in a transaction that must not write
            closed = self.connection.is_closed()
            lost = failures.on_transaction(error, self._target, closed=closed)
            if lost is None:
                raise
            if isinstance(error, failures.STANDBY_ERRORS):
                self.connection.terminate()
            raise lost from error


class ConnectionCheckout:
    """Returns a connection to its pool after one statement, clean or dirty depending on the error."""

    __slots__ = ("_connection", "_database", "_pool")

    def __init__(self, connection: Connection, pool: ConnectionPool, database: Database) -> None:
        self._connection = connection
        self._pool = pool
        self._database = database

    def __enter__(self) -> Connection:
        return self._connection

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self._pool.release(self._connection)
            return
        closed = self._connection.is_closed()
        lost = failures.on_statement(error, self._database.target, closed=closed)
        if isinstance(error, failures.STANDBY_ERRORS):
            self._connection.terminate()
            self._pool.release_dirty(self._connection)
        elif isinstance(error, failures.SERVER_ERRORS) and not failures.is_connection_lost(error, closed=closed):
            self._pool.release(self._connection)
        else:
            self._pool.release_dirty(self._connection)
        if lost is not None:
            if lost.facts.get("outcome") == "unknown":
                self._database.report_unknown_outcome()
            raise lost from error


class Database:
    """One database through one pool. Create it with `open`, end it with `close`."""

    def __init__(self, target: PostgresTarget) -> None:
        self.target = target
        self.unknown_outcome_listeners: list[Callable[[], None]] = []
        """Called when a statement or COMMIT lost its reply, or a COMMIT was cancelled. They must not raise."""
        self.pool = ConnectionPool(target)
        self._reserve = ConnectionPool(msgspec.structs.replace(target, pool_min=0, pool_max=RESERVED_CONNECTIONS))
        self._listener = NotificationListener(target)

    @classmethod
    async def open(cls, target: PostgresTarget) -> Self:
        """Connect, so that a wrong URL, password or database fails on start."""
        database = cls(target)
        try:
            await database.pool.open_initial()
        except BaseException:
            await database.close()
            raise
        return database

    async def close(self) -> None:
        """Wait briefly for running statements, then close every connection. Idempotent."""
        await self._listener.close()
        await self.pool.close()
        await self._reserve.close()

    async def rows(self, query: Query, *args: object, urgent: bool = False) -> list[Record]:
        """All rows. An `urgent` statement uses a reserved connection, so a busy pool does not delay it."""
        pool = self._reserve if urgent else self.pool
        with ConnectionCheckout(pool.try_acquire() or await pool.acquire(), pool, self) as connection:
            return await connection.fetch(query.text, *args)

    async def row(self, query: Query, *args: object) -> Record | None:
        with self._checkout(self.pool.try_acquire() or await self.pool.acquire()) as connection:
            return await connection.fetchrow(query.text, *args)

    async def value(self, query: Query, *args: object) -> Any:
        """The first column of the first row, or None."""
        with self._checkout(self.pool.try_acquire() or await self.pool.acquire()) as connection:
            return await connection.fetchval(query.text, *args)

    async def run(self, query: Query, *args: object) -> int:
        """The number of rows inserted, updated, deleted or selected."""
        with self._checkout(self.pool.try_acquire() or await self.pool.acquire()) as connection:
            return rows_affected(await connection.execute(query.text, *args))

    def listen(self, channel: str) -> AbstractAsyncContextManager[Notifications]:
        """Notifications on `channel`; see module `listen` for the meaning of `None`."""
        return self._listener.listen(channel)

    @asynccontextmanager
    async def transaction(
        self,
        isolation: Isolation = "read committed",
        *,
        readonly: bool = False,
        idle_s: float | None = None,
        lock_s: float | None = None,
    ) -> AsyncIterator[Transaction]:
        """COMMIT when the body ends, ROLLBACK when it raises.

        A COMMIT whose reply is lost, or which is cancelled, may have taken effect; a lost reply raises
        `PostgresUnavailable` with `outcome="unknown"`. The server closes a transaction that is idle for
        `idle_s`, at most the target's `idle_in_transaction_s`: give it when the body waits for anything but PostgreSQL.
        It fails a statement that waits for a lock for `lock_s`, where that is less than the session's own limit.
        """
        connection = await self.pool.acquire()
        transaction = Transaction(connection, self.target, isolation, readonly=readonly)
        try:
            await transaction.translate_errors(
                connection.execute(_begin(isolation, self.target, idle_s, lock_s, readonly=readonly))
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
        for callback in transaction.after_commit:
            callback()

    def _checkout(self, connection: Connection) -> ConnectionCheckout:
        return ConnectionCheckout(connection, self.pool, self)

    def report_unknown_outcome(self) -> None:
        for listener in self.unknown_outcome_listeners:
            listener()

    async def _commit(self, connection: Connection) -> None:
        try:
            command_tag = await connection.execute("COMMIT")
            failpoints.after_send("postgres.commit")
        except failures.FAILURES as error:
            unknown = failures.on_commit(error, self.target, closed=connection.is_closed())
            if unknown is None:
                raise
            if unknown.facts.get("outcome") == "unknown":
                self.report_unknown_outcome()
            raise unknown from error
        except asyncio.CancelledError:
            self.report_unknown_outcome()
            raise
        if command_tag != "COMMIT":
            # After a failed statement the server answers COMMIT with ROLLBACK, without an error.
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


def _begin(
    isolation: Isolation, target: PostgresTarget, idle_s: float | None, lock_s: float | None, *, readonly: bool
) -> str:
    statements = [f"BEGIN ISOLATION LEVEL {isolation} {'READ ONLY' if readonly else 'READ WRITE'}"]
    if idle_s is not None:
        longest_s = min(idle_s, target.idle_in_transaction_s)
        statements.append(f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds(longest_s)}")
    if lock_s is not None and lock_s < target.lock_timeout_s:
        statements.append(f"SET LOCAL lock_timeout = {milliseconds(lock_s)}")
    return "; ".join(statements)  # one round trip


def rows_affected(status: str) -> int:
    """The count at the end of a command tag: `INSERT 0 3` is 3, `SET` is 0."""
    count = status.rpartition(" ")[2]
    return int(count) if count.isdigit() else 0
