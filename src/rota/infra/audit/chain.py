"""The hash chain, computed without a database: the hash of a row, and the faults between two rows.

`rota.audit_hash` hashes the same bytes in SQL. The duplication is deliberate: `verify` trusts neither the rows nor the
functions of the database it checks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, Self

import msgspec

from rota.model.errors import InvalidInput

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

ProblemKind = Literal["changed", "gap", "forked", "wrong_head", "cut", "rewritten"]


class AuditEntry(msgspec.Struct, frozen=True):
    """One action: actor, action, target and details. Secrets are redacted."""

    actor: str
    action: str
    target: str
    detail: Mapping[str, object] = {}


class ChainHead(msgspec.Struct, frozen=True):
    """A position in the chain. Stored outside the database it proves that nothing up to it was changed or removed."""

    seq: int
    hash: bytes

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        seq, _, digest = text.strip().partition(":")
        try:
            head = cls(int(seq), bytes.fromhex(digest))
        except ValueError:
            head = cls(-1, b"")
        if head.seq < 0 or len(head.hash) != hashlib.sha256().digest_size:
            raise InvalidInput(
                f"{text.strip()!r} is not a position in the audit trail: give SEQ:HASH as printed by"
                " `rota audit verify`."
            )
        return head


CHAIN_START = ChainHead(0, bytes(32))


class ChainRow(msgspec.Struct, frozen=True):
    """A row of `rota.audit`; `detail` is its JSON as PostgreSQL writes it."""

    seq: int
    at: datetime
    actor: str
    action: str
    target: str
    detail: str
    prev_hash: bytes
    hash: bytes


class ChainProblem(msgspec.Struct, frozen=True):
    """The first fault, and its position."""

    seq: int
    why: ProblemKind
    sentence: str


def row_hash(row: ChainRow) -> bytes:
    """The hash that an unmodified `row` has."""
    fields = (
        row.prev_hash,
        struct.pack(">q", row.seq),
        struct.pack(">q", (row.at - EPOCH) // MICROSECOND),
        row.actor.encode(),
        row.action.encode(),
        row.target.encode(),
        row.detail.encode(),
    )
    return hashlib.sha256(b"".join(struct.pack(">q", len(field)) + field for field in fields)).digest()


def check_link(last: ChainHead, row: ChainRow) -> ChainProblem | None:
    """The fault of `row` as the successor of `last`."""
    if row.seq != last.seq + 1:
        return ChainProblem(last.seq + 1, "gap", f"Entry {last.seq + 1} of the audit trail is missing: it was removed.")
    if row_hash(row) != row.hash:
        return ChainProblem(
            row.seq, "changed", f"Entry {row.seq} of the audit trail does not match its hash: it was changed."
        )
    if row.prev_hash != last.hash:
        return ChainProblem(
            row.seq,
            "forked",
            f"Entry {row.seq} of the audit trail does not follow entry {last.seq}: one of them was replaced.",
        )
    return None


def check_head(last: ChainHead, head: ChainHead) -> ChainProblem | None:
    """The fault when the rows end at `last` and the writers recorded `head`."""
    if last == head:
        return None
    return ChainProblem(
        last.seq,
        "wrong_head",
        f"The audit trail ends at entry {last.seq}, but its recorded head is {head.seq}: its end was replaced.",
    )


def check_anchor(anchor: ChainHead, stored: bytes | None) -> ChainProblem | None:
    """The fault when the entry recorded in `anchor` has the hash `stored`."""
    if stored is None:
        return ChainProblem(
            anchor.seq, "cut", f"Entry {anchor.seq}, which the anchor records, is missing: the audit trail was cut."
        )
    if stored != anchor.hash:
        return ChainProblem(
            anchor.seq,
            "rewritten",
            f"Entry {anchor.seq} does not match the anchor: the audit trail was rewritten up to it.",
        )
    return None
