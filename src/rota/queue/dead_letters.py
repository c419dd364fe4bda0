"""Dead letters of all of Rota: what was given up, why, and how it can be retried.

A cause has one entry per kind, so adding it again after a lost reply changes nothing. Only frames can be requeued from
here; the owning package revives other kinds and removes the entry in the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from rota.api.admin import DeadLetter, DeadLetterKind
from rota.infra import failpoints
from rota.infra.postgres import Database, Transaction, query
from rota.model.errors import InvalidInput
from rota.queue.entries import check_count

ADD = query(__package__, "dlq_add")
FIND = query(__package__, "dlq_find")
COUNT = query(__package__, "dlq_count")
REMOVE = query(__package__, "dlq_remove")

REMOVE_MAX = 10_000


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Entries that match every field that is set."""

    ids: Sequence[int] | None = None
    kind: DeadLetterKind | None = None
    reason: str | None = None
    queue: str | None = None
    job: UUID | None = None
    before: datetime | None = None

    @property
    def matches_all(self) -> bool:
        """Whether no field is set, so that every entry matches."""
        return all(value is None for value in msgspec.structs.asdict(self).values())

    def arguments(self) -> tuple[object, ...]:
        return (self.ids, self.kind, self.reason, self.queue, self.job, self.before)


class DeadLetterQueue:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def add(self, dead_letters: Sequence[DeadLetter], on: Transaction | None = None) -> int:
        """Add entries of kinds other than `frame`, which come from the queue. Returns the number of new ones."""
        if any(dead_letter.kind == "frame" for dead_letter in dead_letters):
            raise InvalidInput(
                "Frames cannot be added to the dead letters directly: fail them, or move failed frames there."
            )
        columns = [
            [getattr(dead_letter, field) for dead_letter in dead_letters]
            for field in ("kind", "reason", "cause", "queue", "job", "payload", "error")
        ]
        failpoints.hit("dead_letters.before_add")
        return int(await (on or self.database).value(ADD, *columns))

    async def find(self, which: DeadLetterFilter, *, after: int = 0, most: int = 100) -> list[DeadLetter]:
        """Ordered by id, starting after `after`."""
        check_count("dead letters", most, REMOVE_MAX)
        rows = await self.database.rows(FIND, *which.arguments(), after, most)
        return [DeadLetter(**dict(row.items())) for row in rows]

    async def count(self, which: DeadLetterFilter) -> int:
        """The exact number of matches."""
        return int(await self.database.value(COUNT, *which.arguments()))

    async def retry(
        self, which: DeadLetterFilter, *, most: int = REMOVE_MAX, on: Transaction | None = None
    ) -> list[int]:
        """Queue frames again; they keep their attempt numbers. Returns the removed entries."""
        return await self._remove(which, most, on, again=True)

    async def purge(
        self, which: DeadLetterFilter, *, most: int = REMOVE_MAX, on: Transaction | None = None
    ) -> list[int]:
        """Delete entries; returns their ids. An empty filter is rejected."""
        if which.matches_all:
            raise InvalidInput("Purging needs a filter: select dead letters by kind, reason, queue, job or age.")
        return await self._remove(which, most, on, again=False)

    async def _remove(self, which: DeadLetterFilter, most: int, on: Transaction | None, *, again: bool) -> list[int]:
        check_count("dead letters", most, REMOVE_MAX)
        rows = await (on or self.database).rows(REMOVE, *which.arguments(), most, again)
        failpoints.after_send("dead_letters.remove")
        return sorted(row["id"] for row in rows)
