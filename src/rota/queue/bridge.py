"""Queueing inside a transaction that the caller has open on a driver of its own: asyncpg, psycopg 3 or SQLAlchemy.

The statement is the one the queue itself uses, so the frames are queued if and only if that transaction commits. It
must be READ COMMITTED, the default of PostgreSQL. Until it ends, other producers take the next shard of the lane; make
the queue beforehand (`Queue.make`) so that they need not wait for a lane that is only being made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rota.model.errors import InvalidInput
from rota.queue import entries as given
from rota.queue.entries import Entry, Groups, Placed
from rota.queue.room import ENQUEUE, ENQUEUE_LATER, later_arguments

_NUMBERED: Final = re.compile(r"\$\d+")


async def enqueue_on(connection: Any, entries: Sequence[Entry], *, notify: bool = True) -> list[Placed]:
    """On a connection of asyncpg or psycopg (async), or an `AsyncConnection` or `AsyncSession` of SQLAlchemy."""
    fetch = _async_fetch(connection)
    later, groups = _parted(entries)
    if later:
        await fetch(ENQUEUE_LATER.text, later_arguments(later))
    if not groups.entries:
        return []
    return groups.placed(_pairs(await fetch(ENQUEUE.text, groups.arguments(notify=notify))))


def enqueue_on_sync(connection: Any, entries: Sequence[Entry], *, notify: bool = True) -> list[Placed]:
    """On a psycopg `Connection`, or a `Connection` or `Session` of SQLAlchemy."""
    fetch = _sync_fetch(connection)
    later, groups = _parted(entries)
    if later:
        fetch(ENQUEUE_LATER.text, later_arguments(later))
    if not groups.entries:
        return []
    return groups.placed(_pairs(fetch(ENQUEUE.text, groups.arguments(notify=notify))))


def _parted(entries: Sequence[Entry]) -> tuple[list[Entry], Groups]:
    given.check(entries)
    later = [entry for entry in entries if entry.run_at is not None]
    return later, Groups.of(entry for entry in entries if entry.run_at is None)


def _async_fetch(connection: Any) -> Callable[[str, tuple[object, ...]], Any]:
    async def by_asyncpg(text: str, arguments: tuple[object, ...]) -> Iterable[Sequence[Any]]:
        rows: Iterable[Sequence[Any]] = await connection.fetch(text, *arguments)
        return rows

    async def by_psycopg(text: str, arguments: tuple[object, ...]) -> Iterable[Sequence[Any]]:
        cursor = await connection.execute(_in_order(text), arguments)
        rows: Iterable[Sequence[Any]] = await cursor.fetchall()
        return rows

    async def by_sqlalchemy(text: str, arguments: tuple[object, ...]) -> Iterable[Sequence[Any]]:
        under = await connection.connection() if hasattr(connection, "sync_session") else connection
        result = await under.exec_driver_sql(_for_dialect(text, under), arguments)
        rows: Iterable[Sequence[Any]] = result.all()
        return rows

    return _chosen(connection, {"asyncpg": by_asyncpg, "psycopg": by_psycopg, "sqlalchemy": by_sqlalchemy})


def _sync_fetch(connection: Any) -> Callable[[str, tuple[object, ...]], Any]:
    def by_psycopg(text: str, arguments: tuple[object, ...]) -> Iterable[Sequence[Any]]:
        rows: Iterable[Sequence[Any]] = connection.execute(_in_order(text), arguments).fetchall()
        return rows

    def by_sqlalchemy(text: str, arguments: tuple[object, ...]) -> Iterable[Sequence[Any]]:
        under = connection if hasattr(connection, "exec_driver_sql") else connection.connection()
        rows: Iterable[Sequence[Any]] = under.exec_driver_sql(_for_dialect(text, under), arguments).all()
        return rows

    return _chosen(connection, {"psycopg": by_psycopg, "sqlalchemy": by_sqlalchemy})


def _chosen(connection: Any, drivers: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    roots = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    for root, fetch in drivers.items():
        if root in roots:
            return fetch
    raise InvalidInput(
        f"Frames cannot be queued on a {type(connection).__name__}: give an open connection of {' or '.join(drivers)}."
    )


def _pairs(rows: Iterable[Sequence[Any]]) -> list[tuple[int, int]]:
    return [(row[0], row[1]) for row in rows]


def _for_dialect(text: str, connection: Any) -> str:
    return text if connection.dialect.paramstyle == "numeric_dollar" else _in_order(text)


def _in_order(text: str) -> str:
    """Each argument is used once and in its order, so that numbers can be left out."""
    return _NUMBERED.sub("%s", text.replace("%", "%%"))
