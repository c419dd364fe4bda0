"""Enqueueing inside an open transaction of the caller's driver: asyncpg, psycopg 3 or SQLAlchemy.

It runs the statement of `Queue.enqueue`, so the frames are queued if and only if that transaction commits. The
transaction must be READ COMMITTED, the default of PostgreSQL. Until it ends, other producers use the next shard of the
lane; create the queue beforehand (`Queue.ensure_queue`) so that they need not wait for an uncommitted lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rota.infra.postgres.foreign import async_fetch, sync_fetch
from rota.queue import entries as queue_entries
from rota.queue.entries import LaneBatches, LanePosition, QueueEntry
from rota.queue.queue import ENQUEUE, ENQUEUE_DEFERRED, deferred_arguments


async def enqueue_on(connection: Any, entries: Sequence[QueueEntry], *, notify: bool = True) -> list[LanePosition]:
    """On a connection of asyncpg or psycopg (async), or an `AsyncConnection` or `AsyncSession` of SQLAlchemy."""
    fetch = async_fetch(connection)
    deferred, groups = _split_deferred(entries)
    if deferred:
        await fetch(ENQUEUE_DEFERRED.text, deferred_arguments(deferred))
    if not groups.entries:
        return []
    return groups.positions(_pairs(await fetch(ENQUEUE.text, groups.arguments(notify=notify))))


def enqueue_on_sync(connection: Any, entries: Sequence[QueueEntry], *, notify: bool = True) -> list[LanePosition]:
    """On a psycopg `Connection`, or a `Connection` or `Session` of SQLAlchemy."""
    fetch = sync_fetch(connection)
    deferred, groups = _split_deferred(entries)
    if deferred:
        fetch(ENQUEUE_DEFERRED.text, deferred_arguments(deferred))
    if not groups.entries:
        return []
    return groups.positions(_pairs(fetch(ENQUEUE.text, groups.arguments(notify=notify))))


def _split_deferred(entries: Sequence[QueueEntry]) -> tuple[list[QueueEntry], LaneBatches]:
    queue_entries.check_entries(entries)
    deferred = [entry for entry in entries if entry.run_at is not None]
    return deferred, LaneBatches.of(entry for entry in entries if entry.run_at is None)


def _pairs(rows: Iterable[Sequence[Any]]) -> list[tuple[int, int]]:
    return [(row[0], row[1]) for row in rows]
