"""Messages to publish and the receipts for them. Pure.

A message id makes publishing idempotent: within a stream's dedup window NATS stores an id once and answers `DUPLICATE`
for repeats. An id must therefore identify one fact (`job:attempt:epoch`), not an object that may be published again: a
deliberate retry under an old id would be discarded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from rota.infra.nats.streams import subject_fault

ID_HEADER: Final = "Nats-Msg-Id"
ID_MAX: Final = 255
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_LINES = len(b"NATS/1.0\r\n\r\n")
_PER_HEADER = len(b": \r\n")


class BusMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`headers` carry the trace context; names starting with `Nats-` are reserved for the server."""

    subject: str
    data: bytes
    msg_id: str
    headers: Mapping[str, str] = {}

    def wire_headers(self) -> dict[str, str]:
        return {**self.headers, ID_HEADER: self.msg_id}

    def fault(self, max_bytes: int) -> str | None:
        """Why a server with a limit of `max_bytes` can never store this, or None.

        Checked before sending, because the server reacts to such a message by closing the connection.
        """
        if (fault := subject_fault(self.subject)) is not None:
            return fault
        if not 0 < len(self.msg_id) <= ID_MAX:
            return f"a message id has 1 to {ID_MAX} characters"
        headers = self.wire_headers()
        if (fault := _header_fault(headers)) is not None:
            return fault
        size = len(self.data) + _size_of(headers)
        return f"the message is {size} bytes and NATS accepts {max_bytes}" if size > max_bytes else None


class PublishOutcome(StrEnum):
    STORED = "stored"
    DUPLICATE = "duplicate"
    """The id was stored before; equivalent to STORED."""
    REJECTED = "rejected"
    """This message can never be stored."""
    UNSETTLED = "unsettled"
    """No acknowledgement, or a temporary failure. Outcome unknown: publish again under the same id."""


class PublishReceipt(msgspec.Struct, frozen=True):
    outcome: PublishOutcome
    stream_seq: int = 0
    reason: str = ""

    @property
    def settled(self) -> bool:
        """Whether the message is in its stream."""
        return self.outcome in (PublishOutcome.STORED, PublishOutcome.DUPLICATE)


def _header_fault(headers: Mapping[str, str]) -> str | None:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or (name != ID_HEADER and name.lower().startswith("nats-")):
            return f"{name!r} is not a valid header name"
        if not value.isprintable() or value != value.strip():
            # The client library would silently alter such a value.
            return f"the value of header {name!r} has surrounding spaces or non-printable characters"
    return None


def _size_of(headers: Mapping[str, str]) -> int:
    lines = sum(
        len(name.encode()) + len(value.encode(errors="replace")) + _PER_HEADER for name, value in headers.items()
    )
    return lines + _HEADER_LINES
