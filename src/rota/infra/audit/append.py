"""Appends to the audit log.

Entries are appended in the transaction of the action they describe: both commit, or neither. The price is that audited
transactions commit one after another, because each link needs its predecessor: append last, and audit actions of people
and overrides of rules, not individual frames.

Entries cannot be changed or deleted (triggers refuse it), so secrets are redacted before they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
import msgspec

from rota.infra import failpoints
from rota.infra.audit.chain import AuditEntry, ChainHead
from rota.infra.postgres import Transaction, query
from rota.infra.telemetry.redaction import redact, redact_text
from rota.model.errors import InvalidInput

APPEND = query(__package__, "append")


async def append(tx: Transaction, entries: Sequence[AuditEntry]) -> ChainHead:
    """Append `entries` in order; returns the new head of the chain, valid once `tx` commits."""
    try:
        row = await tx.row(APPEND, *_columns(entries))
    except (asyncpg.DataError, UnicodeError) as error:
        raise InvalidInput(
            "An audit entry contains a character that PostgreSQL cannot store (NUL, or half of a surrogate pair):"
            " remove it from the name or the detail."
        ) from error
    assert row is not None
    failpoints.hit("audit.after_append")
    return ChainHead(row["seq"], row["hash"])


def _columns(entries: Sequence[AuditEntry]) -> tuple[list[str], ...]:
    return (
        [redact_text(entry.actor) for entry in entries],
        [redact_text(entry.action) for entry in entries],
        [redact_text(entry.target) for entry in entries],
        [msgspec.json.encode(redact(entry.detail)).decode() for entry in entries],
    )
