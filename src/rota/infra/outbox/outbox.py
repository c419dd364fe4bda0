"""Adds messages to the outbox, and manages parked ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from rota.infra.nats.messages import BusMessage
from rota.infra.postgres import Database, Transaction, query
from rota.model.errors import InvalidInput

CHANNEL: Final = "rota_outbox"
"""Notified by the statement `add`; PostgreSQL merges the notifications of one transaction."""

ADD = query(__package__, "add")
PARKED = query(__package__, "parked")
UNPARK = query(__package__, "unpark")


class ParkedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that NATS can never accept, with the reason."""

    id: int
    subject: str
    msg_id: str
    bytes: int
    created_at: datetime
    parked_at: datetime
    reason: str


async def add(transaction: Transaction, messages: Sequence[BusMessage]) -> None:
    """Publish these if and only if the transaction commits. One statement for any number of messages.

    A message with an invalid subject, id or header is rejected here, with nothing changed; only the relay detects one
    that is too large, and parks it.
    """
    for message in messages:
        if (fault := message.fault(sys.maxsize)) is not None:
            raise InvalidInput(f"A message for subject {message.subject!r} cannot be published: {fault}.")
    if messages:
        await transaction.run(
            ADD,
            [message.subject for message in messages],
            [message.msg_id for message in messages],
            [_encode_headers(message.headers) for message in messages],
            [message.data for message in messages],
        )


async def list_parked(database: Database, most: int = 100) -> list[ParkedMessage]:
    """The oldest parked messages."""
    return [ParkedMessage(**dict(row.items())) for row in await database.rows(PARKED, most)]


async def unpark(database: Database, ids: Sequence[int]) -> int:
    """Retry parked messages once the cause is fixed (a larger max_payload, a newly declared stream)."""
    return int(await database.value(UNPARK, list(ids)))


def _encode_headers(headers: Mapping[str, str]) -> str | None:
    return msgspec.json.encode(headers).decode() if headers else None
