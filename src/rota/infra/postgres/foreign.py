"""Statements on the caller's own open connection: asyncpg, psycopg 3, SQLAlchemy or Django.

They take effect if and only if the caller's transaction commits. The driver is identified by the module of the
connection's type, so none of them needs to be installed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, Final

from rota.model.errors import InvalidInput

Rows = Iterable[Any]
"""Rows, each indexed by column position."""
AsyncFetch = Callable[[str, Sequence[object]], Awaitable[Rows]]
SyncFetch = Callable[[str, Sequence[object]], Rows]
_NUMBERED: Final = re.compile(r"\$\d+")


def async_fetch(connection: Any) -> AsyncFetch:
    """For an async connection of asyncpg or psycopg, or an `AsyncConnection` or `AsyncSession` of SQLAlchemy."""

    async def by_asyncpg(text: str, arguments: Sequence[object]) -> Rows:
        rows: Rows = await connection.fetch(text, *arguments)
        return rows

    async def by_psycopg(text: str, arguments: Sequence[object]) -> Rows:
        async with connection.cursor(row_factory=_as_tuple) as cursor:
            await cursor.execute(*_to_positional(text, arguments))
            rows: Rows = await cursor.fetchall() if cursor.description else ()
            return rows

    async def by_sqlalchemy(text: str, arguments: Sequence[object]) -> Rows:
        driver_connection = await connection.connection() if hasattr(connection, "sync_session") else connection
        result = await driver_connection.exec_driver_sql(*_for_dialect(text, arguments, driver_connection))
        rows: Rows = result.all() if result.returns_rows else ()
        return rows

    fetch: AsyncFetch = _select_driver(
        connection, {"asyncpg": by_asyncpg, "psycopg": by_psycopg, "sqlalchemy": by_sqlalchemy}
    )
    return fetch


def sync_fetch(connection: Any) -> SyncFetch:
    """For a psycopg `Connection`, a `Connection` or `Session` of SQLAlchemy, or a Django connection."""
    if "django" in _driver_packages(connection):
        connection.ensure_connection()
        return sync_fetch(connection.connection)

    def by_psycopg(text: str, arguments: Sequence[object]) -> Rows:
        with connection.cursor(row_factory=_as_tuple) as cursor:
            cursor.execute(*_to_positional(text, arguments))
            rows: Rows = cursor.fetchall() if cursor.description else ()
            return rows

    def by_sqlalchemy(text: str, arguments: Sequence[object]) -> Rows:
        driver_connection = connection if hasattr(connection, "exec_driver_sql") else connection.connection()
        result = driver_connection.exec_driver_sql(*_for_dialect(text, arguments, driver_connection))
        rows: Rows = result.all() if result.returns_rows else ()
        return rows

    fetch: SyncFetch = _select_driver(connection, {"psycopg": by_psycopg, "sqlalchemy": by_sqlalchemy})
    return fetch


def is_async(connection: Any) -> bool:
    """Whether its statements are awaited; False for objects that are not connections."""
    roots = _driver_packages(connection)
    if "psycopg" in roots:
        return iscoroutinefunction(connection.execute)
    return "asyncpg" in roots or hasattr(connection, "sync_connection") or hasattr(connection, "sync_session")


def _driver_packages(connection: Any) -> set[str]:
    return {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}


def _as_tuple(_cursor: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Rows as tuples, whatever row factory the caller has set."""
    return tuple


def _select_driver(connection: Any, drivers: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    roots = _driver_packages(connection)
    for root, fetch in drivers.items():
        if root in roots:
            return fetch
    raise InvalidInput(
        f"Jobs and frames cannot be queued on a {type(connection).__name__}: pass an open connection of "
        f"{' or '.join(drivers)}."
    )


def _for_dialect(text: str, arguments: Sequence[object], connection: Any) -> tuple[str, tuple[object, ...]]:
    if connection.dialect.paramstyle == "numeric_dollar":
        return text, tuple(arguments)
    return _to_positional(text, arguments)


def _to_positional(text: str, arguments: Sequence[object]) -> tuple[str, tuple[object, ...]]:
    """For drivers with positional placeholders: one argument each."""
    statement, order = _positional(text)
    return statement, tuple([arguments[position] for position in order])


@lru_cache(maxsize=512)
def _positional(text: str) -> tuple[str, tuple[int, ...]]:
    """The statement without comments, which may contain `$1`; and the argument of each placeholder."""
    statement = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    order = tuple(int(position[1:]) - 1 for position in _NUMBERED.findall(statement))
    return _NUMBERED.sub("%s", statement.replace("%", "%%")), order
