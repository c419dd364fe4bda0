"""A PostgreSQL connection pool shared by tests: a connection that a test closes is reused by the next one.

All tests of a process share one event loop, so a connection keeps its prepared statements and compiled functions
between tests. `asyncpg.connect` is replaced: for a pooled database it returns a pooled connection with the same
options. A closed connection is reset (locks, listens, settings, sequences) before it is pooled. A connection that is
still open when its test ends is a leak of that test, and is terminated.
"""

import asyncio
import select

import asyncpg

_connect = asyncpg.connect
RESET = (
    "SELECT pg_advisory_unlock_all(); CLOSE ALL; UNLISTEN *; RESET SESSION AUTHORIZATION; RESET ALL; DISCARD SEQUENCES;"
    " DISCARD TEMP"
)
PARKED_MAX = 12
"""Per database, loop and options; the server has 200 connections for all test processes."""
RESET_TIMEOUT_S = 2.0
_loops = set()


def lend_in(loop):
    """Use pooled connections in this loop, which lives as long as the process."""
    _loops.add(loop)


class KeptConnection(asyncpg.Connection):
    """A connection that returns to its pool when it is closed."""

    keeper = None
    parked = False

    async def set_type_codec(self, *args, **options):
        """Cannot be reset, so the connection leaves the pool."""
        if self.keeper is not None:
            self.keeper.release(self)
        await super().set_type_codec(*args, **options)

    def is_closed(self):
        return self.parked or super().is_closed()

    async def close(self, *, timeout=None):
        if self.keeper is None or self.is_closed() or not await self.keeper.park(self):
            await super().close(timeout=timeout)


class Connections:
    """The pooled connections of one process, by URL, event loop and options."""

    def __init__(self):
        asyncpg.connect = self.connect
        self._parked = {}
        self._lent = set()
        self._kept_urls = set()

    def keep(self, url):
        """Pool the connections to this database."""
        self._kept_urls.add(url)

    async def connect(self, dsn=None, **options):
        loop = asyncio.get_running_loop()
        if dsn not in self._kept_urls or loop not in _loops or "connection_class" in options:
            return await _connect(dsn, **options)
        key = (dsn, id(loop), repr(sorted(options.items())))
        connection = self._taken(key) or await _connect(dsn, connection_class=KeptConnection, **options)
        connection.keeper, connection.key = self, key
        self._lent.add(connection)
        return connection

    def release(self, connection):
        """Remove a connection from the pool, so that closing it really closes it."""
        self._lent.discard(connection)
        connection.keeper = None

    async def park(self, connection):
        """Reset and pool a connection; False if it is busy, broken or in a transaction."""
        self._lent.discard(connection)
        connection.keeper = None
        full = len(self._parked.get(connection.key, ())) >= PARKED_MAX
        if full or connection.key[0] not in self._kept_urls or connection.is_in_transaction():
            return False
        for callbacks in ("_listeners", "_log_listeners", "_termination_listeners", "_query_loggers"):
            getattr(connection, callbacks).clear()
        try:
            await connection.execute(RESET, timeout=RESET_TIMEOUT_S)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            return False
        except BaseException:
            connection.terminate()
            raise
        connection.parked = True
        self._parked.setdefault(connection.key, []).append(connection)
        return True

    def pids(self, url):
        """Backend pids of the pooled connections of this database."""
        return [connection.get_server_pid() for connection in self._of(url)]

    def leaked(self):
        """Terminate and return the connections that the test did not close."""
        left, self._lent = [item for item in list(self._lent) if not item.is_closed()], set()
        for connection in left:
            connection.keeper = None
            self._cut(connection)
        return left

    def forget(self, url):
        """Terminate every pooled connection of this database."""
        for connection in self._of(url):
            self._cut(connection)
        self._parked = {key: kept for key, kept in self._parked.items() if key[0] != url}
        self._kept_urls.discard(url)

    def close(self):
        asyncpg.connect = _connect
        for url in list(self._kept_urls):
            self.forget(url)

    def _of(self, url):
        parked = [item for key, kept in list(self._parked.items()) if key[0] == url for item in list(kept)]
        return [item for item in parked if _alive(item)]

    def _taken(self, key):
        kept = self._parked.get(key, [])
        while kept:
            connection = kept.pop()
            connection.parked = False
            if _is_silent(connection):
                return connection
            connection.terminate()
        return None

    def _cut(self, connection):
        connection.parked = False
        connection._loop.call_soon_threadsafe(connection.terminate)  # the loop may belong to another thread


def _alive(connection):
    return not asyncpg.Connection.is_closed(connection)


def _is_silent(connection):
    """Whether the server has neither closed the connection nor sent anything, such as the reason why it ends it.

    A loop that was not running has not noticed either.
    """
    if not _alive(connection) or connection._transport.is_closing():
        return False
    readable = select.poll()
    readable.register(connection._transport.get_extra_info("socket"), select.POLLIN)
    return not readable.poll(0)
