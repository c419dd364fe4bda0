"""Verifies the audit log, entry by entry, in one snapshot.

A writer of the database can recompute a whole chain and its head. Only a chain position stored elsewhere protects
against that: `verify` returns the head for safekeeping and accepts one as `anchor`.

Entries are read in chunks of at most `CHUNK_ROWS` entries and `CHUNK_BYTES` bytes, a larger entry alone, so that memory
does not grow with the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from rota.infra.audit.chain import CHAIN_START, ChainHead, ChainProblem, ChainRow, check_anchor, check_head, check_link
from rota.infra.postgres import Database, Record, Transaction, query

HEAD = query(__package__, "head")
LINK_AT = query(__package__, "link_at")
ROWS_BETWEEN = query(__package__, "rows_between")
SIZES_AFTER = query(__package__, "sizes_after")

CHUNK_ROWS = 1000
CHUNK_BYTES = 4 * 1024 * 1024


class VerificationReport(msgspec.Struct, frozen=True):
    """`head` is the last valid entry; print it and store it elsewhere."""

    checked: int
    head: ChainHead
    problem: ChainProblem | None

    @property
    def ok(self) -> bool:
        return self.problem is None


async def verify(database: Database, from_seq: int = 1, anchor: ChainHead | None = None) -> VerificationReport:
    """Recompute every entry from `from_seq` on and report the first fault.

    `anchor` is a head returned by an earlier run: the chain must still contain it, so a truncated or rewritten chain is
    detected even if its head was replaced as well. Entries before `from_seq` are not checked.
    """
    async with database.transaction("repeatable read", readonly=True) as tx:
        last, problem = await _starting_head(tx, from_seq)
        checked = 0
        if problem is None:
            async for row in _rows(tx, last.seq):
                problem = check_link(last, row)
                if problem is not None:
                    break
                last = ChainHead(row.seq, row.hash)
                checked += 1
        if problem is None:
            problem = check_head(last, await _stored_head(tx))
        if problem is None and anchor is not None and anchor != CHAIN_START:
            problem = check_anchor(anchor, await tx.value(LINK_AT, anchor.seq))
        return VerificationReport(checked, last, problem)


async def _starting_head(tx: Transaction, from_seq: int) -> tuple[ChainHead, ChainProblem | None]:
    if from_seq <= 1:
        return CHAIN_START, None
    link = await tx.value(LINK_AT, from_seq - 1)
    if link is None:
        return CHAIN_START, ChainProblem(from_seq - 1, "gap", f"Entry {from_seq - 1} of the audit trail is missing.")
    return ChainHead(from_seq - 1, link), None


async def _stored_head(tx: Transaction) -> ChainHead:
    row = await tx.row(HEAD)
    return ChainHead(row["seq"], row["hash"]) if row is not None else ChainHead(-1, b"")


async def _rows(tx: Transaction, after: int) -> AsyncIterator[ChainRow]:
    while sizes := await tx.rows(SIZES_AFTER, after, CHUNK_ROWS):
        for last in _chunk_ends(sizes):
            for row in await tx.rows(ROWS_BETWEEN, after, last):
                yield ChainRow(*row)
            after = last


def _chunk_ends(sizes: Sequence[Record]) -> Iterator[int]:
    """The last sequence number of each chunk."""
    size = 0
    for row, successor in zip(sizes, [*sizes[1:], None], strict=True):
        size += row["bytes"]
        if successor is None or size + successor["bytes"] > CHUNK_BYTES:
            yield row["seq"]
            size = 0
