"""Checking the audit trail, entry by entry, in one snapshot.

Whoever may write to the database can also recompute a whole chain and its head. Against that helps only a point of the
chain kept elsewhere: `verify` returns the head for safekeeping, and takes one back as `anchor`.

Entries are read in pieces of at most `CHUNK` entries and `PIECE_BYTES` bytes, a larger entry alone, so that memory does
not grow with the trail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from rota.infra.audit.chain import (
    START,
    Head,
    Problem,
    Row,
    problem_at_end,
    problem_between,
    problem_with_anchor,
)
from rota.infra.postgres import Database, Record, Transaction, query

HEAD = query(__package__, "head")
LINK_AT = query(__package__, "link_at")
ROWS_BETWEEN = query(__package__, "rows_between")
SIZES_AFTER = query(__package__, "sizes_after")

CHUNK = 1000
PIECE_BYTES = 4 * 1024 * 1024


class Report(msgspec.Struct, frozen=True):
    """`head` is the last entry that was found good; print it and keep it elsewhere."""

    checked: int
    head: Head
    problem: Problem | None

    @property
    def ok(self) -> bool:
        return self.problem is None


async def verify(database: Database, from_seq: int = 1, anchor: Head | None = None) -> Report:
    """Recompute every entry from `from_seq` on and name the first that is wrong.

    `anchor` is a head that an earlier run returned: the chain must still pass through it, so a cut or rewritten chain
    is found even if its head was replaced as well. Entries before `from_seq` are taken as they are.
    """
    async with database.transaction("repeatable read", readonly=True) as tx:
        last, problem = await _begin(tx, from_seq)
        checked = 0
        if problem is None:
            async for row in _rows(tx, last.seq):
                problem = problem_between(last, row)
                if problem is not None:
                    break
                last = Head(row.seq, row.hash)
                checked += 1
        if problem is None:
            problem = problem_at_end(last, await _stored_head(tx))
        if problem is None and anchor is not None and anchor != START:
            problem = problem_with_anchor(anchor, await tx.value(LINK_AT, anchor.seq))
        return Report(checked, last, problem)


async def _begin(tx: Transaction, from_seq: int) -> tuple[Head, Problem | None]:
    if from_seq <= 1:
        return START, None
    link = await tx.value(LINK_AT, from_seq - 1)
    if link is None:
        return START, Problem(from_seq - 1, "gap", f"Entry {from_seq - 1} of the audit trail is missing.")
    return Head(from_seq - 1, link), None


async def _stored_head(tx: Transaction) -> Head:
    row = await tx.row(HEAD)
    return Head(row["seq"], row["hash"]) if row is not None else Head(-1, b"")


async def _rows(tx: Transaction, after: int) -> AsyncIterator[Row]:
    while sizes := await tx.rows(SIZES_AFTER, after, CHUNK):
        for last in _ends_of_pieces(sizes):
            for row in await tx.rows(ROWS_BETWEEN, after, last):
                yield Row(*row)
            after = last


def _ends_of_pieces(sizes: Sequence[Record]) -> Iterator[int]:
    """The last number of each piece that is read at once."""
    held = 0
    for row, following in zip(sizes, [*sizes[1:], None], strict=True):
        held += row["bytes"]
        if following is None or held + following["bytes"] > PIECE_BYTES:
            yield row["seq"]
            held = 0
