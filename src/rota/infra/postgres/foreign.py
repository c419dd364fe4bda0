"""Statements on a connection that the caller has open on a driver of its own: asyncpg, psycopg 3, SQLAlchemy or Django.

What is done there happens if and only if the caller's transaction commits. The driver is found by the module of the
connection's type, so none of them has to be installed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import iscoroutinefunction
from typing import Any, Final

from rota.model.errors import InvalidInput

Rows = Iterable[Any]
"""Each indexed by the place of a column."""
AsyncFetch = Callable[[str, Sequence[object]], Awaitable[Rows]]
SyncFetch = Callable[[str, Sequence[object]], Rows]
_NUMBERED: Final = re.compile(r"\$\d+")


def async_fetch(connection: Any) -> AsyncFetch:
    """For a connection of asyncpg or psycopg (async), or an `AsyncConnection` or `AsyncSession` of SQLAlchemy."""

    async def by_asyncpg(text: str, arguments: Sequence[object]) -> Rows:
        rows: Rows = await connection.fetch(text, *arguments)
        return rows

    async def by_psycopg(text: str, arguments: Sequence[object]) -> Rows:
        async with connection.cursor(row_factory=_as_tuple) as cursor:
            await cursor.execute(*_to_positional(text, arguments))
            rows: Rows = await cursor.fetchall() if cursor.description else ()
            return rows

    async def by_sqlalchemy(text: str, arguments: Sequence[object]) -> Rows:
        under = await connection.connection() if hasattr(connection, "sync_session") else connection
        result = await under.exec_driver_sql(*_for_dialect(text, arguments, under))
        rows: Rows = result.all() if result.returns_rows else ()
        return rows

    fetch: AsyncFetch = _select_driver(
        connection, {"asyncpg": by_asyncpg, "psycopg": by_psycopg, "sqlalchemy": by_sqlalchemy}
    )
    return fetch


def sync_fetch(connection: Any) -> SyncFetch:
    """For a psycopg `Connection`, a `Connection` or `Session` of SQLAlchemy, or a connection of Django."""
    if "django" in _driver_packages(connection):
        connection.ensure_connection()
        return sync_fetch(connection.connection)

    def by_psycopg(text: str, arguments: Sequence[object]) -> Rows:
        with connection.cursor(row_factory=_as_tuple) as cursor:
            cursor.execute(*_to_positional(text, arguments))
            rows: Rows = cursor.fetchall() if cursor.description else ()
            return rows

    def by_sqlalchemy(text: str, arguments: Sequence[object]) -> Rows:
        under = connection if hasattr(connection, "exec_driver_sql") else connection.connection()
        result = under.exec_driver_sql(*_for_dialect(text, arguments, under))
        rows: Rows = result.all() if result.returns_rows else ()
        return rows

    fetch: SyncFetch = _select_driver(connection, {"psycopg": by_psycopg, "sqlalchemy": by_sqlalchemy})
    return fetch


def is_async(connection: Any) -> bool:
    """Whether its statements are awaited; no is also said of what is no connection at all."""
    roots = _driver_packages(connection)
    if "psycopg" in roots:
        return iscoroutinefunction(connection.execute)
    return "asyncpg" in roots or hasattr(connection, "sync_connection") or hasattr(connection, "sync_session")


def _driver_packages(connection: Any) -> set[str]:
    return {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}


def _as_tuple(_cursor: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Rows by place, whatever the caller has set for its own."""
    return tuple


def _select_driver(connection: Any, drivers: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    roots = _driver_packages(connection)
    for root, fetch in drivers.items():
        if root in roots:
            return fetch
    raise InvalidInput(
        f"Jobs and frames cannot be queued on a {type(connection).__name__}: give an open connection of "
        f"{' or '.join(drivers)}."
    )


def _for_dialect(text: str, arguments: Sequence[object], connection: Any) -> tuple[str, tuple[object, ...]]:
    if connection.dialect.paramstyle == "numeric_dollar":
        return text, tuple(arguments)
    return _to_positional(text, arguments)


def _to_positional(text: str, arguments: Sequence[object]) -> tuple[str, tuple[object, ...]]:
    """For drivers that count placeholders and do not name them: an argument for each. Comments may name them, too."""
    statement = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    order = [int(place[1:]) - 1 for place in _NUMBERED.findall(statement)]
    return _NUMBERED.sub("%s", statement.replace("%", "%%")), tuple(arguments[place] for place in order)
