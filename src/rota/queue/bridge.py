"""Queueing inside a transaction that the caller has open on a driver of its own: asyncpg, psycopg 3 or SQLAlchemy.

The statement is the one the queue itself uses, so the frames are queued if and only if that transaction commits. It
must be READ COMMITTED, the default of PostgreSQL. Until it ends, other producers take the next shard of the lane; make
the queue beforehand (`Queue.make`) so that they need not wait for a lane that is only being made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rota.infra.postgres.foreign import async_fetch, sync_fetch
from rota.queue import entries as given
from rota.queue.entries import LaneBatches, LanePosition, QueueEntry
from rota.queue.queue import ENQUEUE, ENQUEUE_DEFERRED, deferred_arguments


async def enqueue_on(connection: Any, entries: Sequence[QueueEntry], *, notify: bool = True) -> list[LanePosition]:
    """On a connection of asyncpg or psycopg (async), or an `AsyncConnection` or `AsyncSession` of SQLAlchemy."""
    fetch = async_fetch(connection)
    later, groups = _split_deferred(entries)
    if later:
        await fetch(ENQUEUE_DEFERRED.text, deferred_arguments(later))
    if not groups.entries:
        return []
    return groups.positions(_pairs(await fetch(ENQUEUE.text, groups.arguments(notify=notify))))


def enqueue_on_sync(connection: Any, entries: Sequence[QueueEntry], *, notify: bool = True) -> list[LanePosition]:
    """On a psycopg `Connection`, or a `Connection` or `Session` of SQLAlchemy."""
    fetch = sync_fetch(connection)
    later, groups = _split_deferred(entries)
    if later:
        fetch(ENQUEUE_DEFERRED.text, deferred_arguments(later))
    if not groups.entries:
        return []
    return groups.positions(_pairs(fetch(ENQUEUE.text, groups.arguments(notify=notify))))


def _split_deferred(entries: Sequence[QueueEntry]) -> tuple[list[QueueEntry], LaneBatches]:
    given.check_entries(entries)
    later = [entry for entry in entries if entry.run_at is not None]
    return later, LaneBatches.of(entry for entry in entries if entry.run_at is None)


def _pairs(rows: Iterable[Sequence[Any]]) -> list[tuple[int, int]]:
    return [(row[0], row[1]) for row in rows]
