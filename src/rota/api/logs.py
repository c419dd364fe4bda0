"""The streams of a frame, and their chunks with offsets, one JSON document a line. No I/O."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Stream = Literal["stdout", "stderr", "log"]
STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr", "log")


class LogBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one stream of one attempt; `data` is base64 in JSON."""

    attempt: int
    at: int
    """Offset of the first byte in the stream. Resume at `at` plus the length of `data`, and name the attempt."""
    data: bytes
    dropped: int = 0
    """Bytes right before `at` that were dropped because the log was too large."""
    lost: int = 0
    """Bytes right before `at` that are missing for another reason."""
    last: bool = False
    """The stream ends here."""
