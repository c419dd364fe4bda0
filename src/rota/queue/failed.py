"""Frames that failed for good: kept for the retention, until they are retried, moved to the dead letters or discarded.

Each of the three removes the row it acts on, so of two concurrent calls one succeeds and the other finds nothing: a
frame cannot be both retried and moved. Counts change in the same statement, by the removed rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from uuid import UUID

import msgspec

from rota.infra import failpoints
from rota.infra.postgres import Database, Query, Transaction, query
from rota.model.errors import InvalidInput
from rota.queue.entries import check_count

FIND = query(__package__, "failed_find")
COUNT = query(__package__, "failed_count")
RETRY = query(__package__, "failed_retry")
MOVE_TO_DEAD_LETTERS = query(__package__, "failed_bury")
DISCARD = query(__package__, "failed_discard")
EXPIRE = query(__package__, "failed_expire")

REMOVE_MAX = 10_000


class FailedFrame(msgspec.Struct, frozen=True):
    token: int
    queue: str
    job: UUID
    layer: UUID
    frame: int
    attempt: int
    payload: bytes | None
    reason: str
    error: str | None
    failed_at: datetime


class FailedFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Failed frames that match every field that is set."""

    tokens: Sequence[int] | None = None
    reason: str | None = None
    queue: str | None = None
    job: UUID | None = None
    before: datetime | None = None

    @property
    def matches_all(self) -> bool:
        return all(value is None for value in msgspec.structs.asdict(self).values())

    def arguments(self) -> tuple[object, ...]:
        return (self.tokens, self.reason, self.queue, self.job, self.before)


class FailedFrames:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def find(self, which: FailedFilter, *, after: int = -1, most: int = 100) -> list[FailedFrame]:
        """Ordered by token, starting after `after`."""
        check_count("failed frames", most, REMOVE_MAX)
        rows = await self.database.rows(FIND, *which.arguments(), after, most)
        return [FailedFrame(**dict(row.items())) for row in rows]

    async def count(self, which: FailedFilter) -> int:
        """The exact number of matches."""
        return int(await self.database.value(COUNT, *which.arguments()))

    async def retry(self, which: FailedFilter, *, most: int = REMOVE_MAX, on: Transaction | None = None) -> list[int]:
        """Queue them again; they keep their attempt numbers. Explicit tokens must all be failed frames."""
        if which.tokens is None:
            return await self._remove(RETRY, which, most, on)
        async with self._all_or_nothing(on) as tx:
            retried = await self._remove(RETRY, which, most, tx)
            missing = sorted(set(which.tokens).difference(retried))
            if missing:
                raise InvalidInput(
                    f"The frame with token {missing[0]} is not a failed frame, so nothing was retried: list the"
                    " failed frames, and name only those.",
                    tokens=missing[:100],
                )
        return retried

    @asynccontextmanager
    async def _all_or_nothing(self, on: Transaction | None) -> AsyncIterator[Transaction]:
        if on is None:
            async with self.database.transaction() as tx:
                yield tx
        else:
            async with on.savepoint():
                yield on

    async def move_to_dead_letters(
        self, which: FailedFilter, *, most: int = REMOVE_MAX, on: Transaction | None = None
    ) -> list[int]:
        return await self._remove(MOVE_TO_DEAD_LETTERS, which, most, on)

    async def discard(self, which: FailedFilter, *, most: int = REMOVE_MAX, on: Transaction | None = None) -> list[int]:
        """Delete them: they are no longer counted as failed, as if they had never been queued."""
        if which.matches_all:
            raise InvalidInput("Discarding needs a filter: select failed frames by reason, queue, job or age.")
        return await self._remove(DISCARD, which, most, on)

    async def expire(self, after_s: float, *, most: int = REMOVE_MAX, on: Transaction | None = None) -> list[int]:
        """Delete frames that failed longer ago, by the clock of PostgreSQL; the rollup keeps counting them."""
        rows = await (on or self.database).rows(EXPIRE, after_s, most)
        failpoints.after_send("failed.expire")
        return sorted(row["token"] for row in rows)

    async def _remove(self, how: Query, which: FailedFilter, most: int, on: Transaction | None) -> list[int]:
        check_count("failed frames", most, REMOVE_MAX)
        rows = await (on or self.database).rows(how, *which.arguments(), most)
        failpoints.after_send("failed.remove")
        return sorted(row["token"] for row in rows)
