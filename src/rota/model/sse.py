"""Server-sent events as text: formatting, and a line-by-line parser. No I/O.

A block without data is not an event, but its id counts: a client that reconnects resumes after it.
"""

from __future__ import annotations

from typing import Final

import msgspec

LINE_MAX: Final = 1 << 20


class SseEvent(msgspec.Struct, frozen=True):
    """A parsed event."""

    kind: str
    data: str
    id: str


def format_event(event_id: str, kind: str, data: bytes) -> bytes:
    """`data` must be a single line."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), kind.encode(), data)


class SseParser:
    """Parses lines without their terminators; keeps the last event id for reconnecting."""

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self.retry_ms: int | None = None
        """Delay before reconnecting, as requested by the server."""
        self._kind = ""
        self._data: list[str] = []

    def feed(self, line: str) -> SseEvent | None:
        """The event that this line completes, or None."""
        if not line:
            return self._take_event()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "id" if "\0" not in value:
                self.last_id = value
            case "event":
                self._kind = value
            case "data":
                self._data.append(value[:LINE_MAX])
            case "retry" if value.isascii() and value.isdigit():
                self.retry_ms = int(value)
        return None

    def _take_event(self) -> SseEvent | None:
        kind, data = self._kind, self._data
        self._kind, self._data = "", []
        return SseEvent(kind or "message", "\n".join(data), self.last_id) if data else None
