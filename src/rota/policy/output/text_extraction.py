"""What is in an output, as scanners see it: every text in it, one after the other, with the way back to its place.

A value is taken apart into its strings, keys, blobs and long whole numbers (an id or a card may be one). These are laid
out as one text, in which a key stands before what it names as in `password=...`, so a pattern sees both; everything
else is parted by NUL. A file is one piece. What is found is cut back to the pieces it lies in.

Redacting replaces parts of pieces and puts the value together again: the same walk, in the same order. What cannot be
taken apart is one piece, and when something is found in it all of it goes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from rota.model.policy.outputs import REDACTION_MARKER, SCANNED_BYTES_MAX, merge_spans

LONG_NUMBER: Final = 10**8
"""A whole number from here on may be somebody's."""
_UTF8_CONTINUATION: Final = 0xC0, 0x80

ValuePath = tuple[Any, ...]
"""A piece's place: its parent's, and the key or number there; empty at the top."""


class OutputFragment(NamedTuple):
    path: ValuePath
    data: bytes
    is_text: bool = True
    is_key: bool = False

    def align_span(self, begin: int, end: int) -> tuple[int, int]:
        """The same part of it in whole characters, as places of bytes."""
        while self.is_text and begin > 0 and self.data[begin] & _UTF8_CONTINUATION[0] == _UTF8_CONTINUATION[1]:
            begin -= 1
        while self.is_text and end < len(self.data) and self.data[end] & _UTF8_CONTINUATION[0] == _UTF8_CONTINUATION[1]:
            end += 1
        return begin, end

    def reported_span(self, begin: int, end: int) -> tuple[int, int]:
        """Offset and length as they are told: in characters of a text, in bytes of anything else."""
        if not self.is_text:
            return begin, end - begin
        offset = len(self.data[:begin].decode(errors="replace"))
        return offset, len(self.data[begin:end].decode(errors="replace"))

    def redact_spans(self, spans: Sequence[tuple[int, int]]) -> bytes:
        kept, at = b"", 0
        for begin, end in merge_spans([self.align_span(*span) for span in spans]):
            kept += self.data[at:begin] + REDACTION_MARKER.encode()
            at = end
        return kept + self.data[at:]


class ScanTarget:
    """One text to be scanned: a value, a file, or what an error says."""

    def __init__(self, name: str, pieces: Sequence[OutputFragment], most: int = SCANNED_BYTES_MAX) -> None:
        self.name = name
        self.pieces = pieces
        self.truncated = False
        self._begins: list[int] = []
        self.text = self._join_fragments(most)

    def _join_fragments(self, most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        for piece in self.pieces:
            if size + len(piece.data) > most:
                self.truncated = True
                self._begins.append(size)
                parts.append(piece.data[: max(0, most - size)])
                break
            self._begins.append(size)
            parts += (piece.data, b"=" if piece.is_key else b"\0")
            size += len(piece.data) + 1
        return b"".join(parts)

    def spans(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Which parts of which pieces lie there: number of the piece, and where in it."""
        found = []
        at = max(0, bisect_right(self._begins, begin) - 1)
        while at < len(self._begins) and self._begins[at] < end:
            first = self._begins[at]
            inside = max(begin - first, 0), min(end - first, len(self.pieces[at].data))
            if inside[0] < inside[1]:
                found.append((at, *inside))
            at += 1
        return found


class OutputValue(ScanTarget):
    """What a frame returned, as msgpack."""

    def __init__(self, data: bytes) -> None:
        self._whole = False
        self._value: Any = None
        pieces: list[OutputFragment] = []
        try:
            self._value = msgspec.msgpack.decode(data)
            _walk(self._value, (), pieces.append)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            self._whole, pieces = True, [OutputFragment((), data, is_text=False)]
        super().__init__("value", pieces)

    def redact(self, spans: Sequence[tuple[int, int, int]]) -> bytes:
        """The value without these parts; all of it when there are none, or it cannot be taken apart."""
        if self._whole or not spans:
            return msgspec.msgpack.encode(REDACTION_MARKER)
        return msgspec.msgpack.encode(_walk(self._value, (), _redactor(_group_spans(spans))))


class OutputBlob(ScanTarget):
    """A file, or a text."""

    def __init__(self, name: str, data: bytes, *, is_text: bool = False) -> None:
        super().__init__(name, [OutputFragment((), data, is_text=is_text)])

    def redact(self, spans: Sequence[tuple[int, int, int]]) -> bytes:
        [piece] = self.pieces
        return piece.redact_spans([(begin, end) for _, begin, end in spans]) if spans else REDACTION_MARKER.encode()


def _group_spans(spans: Sequence[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for at, begin, end in spans:
        found.setdefault(at, []).append((begin, end))
    return found


def _redactor(spans: dict[int, list[tuple[int, int]]]) -> Callable[[OutputFragment], bytes | None]:
    at = -1

    def replace(piece: OutputFragment) -> bytes | None:
        nonlocal at
        at += 1
        return piece.redact_spans(spans[at]) if at in spans else None

    return replace


def _walk(value: Any, path: ValuePath, visit: Callable[[OutputFragment], bytes | None]) -> Any:
    """Show every piece to `visit`, in one order, and put together what it says instead of them (None: as it was)."""
    if isinstance(value, dict):
        return _walk_mapping(value, path, visit)
    if isinstance(value, list | tuple):
        return type(value)([_walk(each, (path, at), visit) for at, each in enumerate(value)])
    if isinstance(value, str):
        said = visit(OutputFragment(path, value.encode()))
        return value if said is None else said.decode(errors="replace")
    if isinstance(value, bytes | bytearray):
        said = visit(OutputFragment(path, bytes(value), is_text=False))
        return value if said is None else said
    if isinstance(value, msgspec.msgpack.Ext):
        return value if visit(OutputFragment(path, bytes(value.data), is_text=False)) is None else REDACTION_MARKER
    if _is_long_number(value):
        return value if visit(OutputFragment(path, str(int(value)).encode())) is None else REDACTION_MARKER
    return value


def _is_long_number(value: Any) -> bool:
    """Other languages write whole numbers as floats, too."""
    return (
        isinstance(value, int | float) and abs(value) >= LONG_NUMBER and (isinstance(value, int) or value.is_integer())
    )


def _walk_mapping(
    value: dict[Any, Any], path: ValuePath, visit: Callable[[OutputFragment], bytes | None]
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for place, (key, held) in enumerate(value.items()):
        name = key
        if isinstance(key, str | bytes):
            said = visit(OutputFragment((path, place), key.encode() if isinstance(key, str) else key, is_key=True))
            name = key if said is None else f"{REDACTION_MARKER} {place}"
        elif _is_long_number(key):
            said = visit(OutputFragment((path, place), str(int(key)).encode(), is_key=True))
            name = key if said is None else f"{REDACTION_MARKER} {place}"
        elif isinstance(key, tuple):
            name = key if _walk(key, (path, place), visit) == key else f"{REDACTION_MARKER} {place}"
        found[name] = _walk(held, (path, key if isinstance(key, str) else place), visit)
    return found


def format_path(path: ValuePath, is_clean: Callable[[str], bool]) -> str:
    """`.user.emails[2]`; a name that is no plain word, or that a scanner knows, is told as `*`."""
    words: list[str] = []
    while path:
        path, step = path
        words.append(f"[{step}]" if isinstance(step, int) else f".{step}" if is_clean(step) else ".*")
    return "".join(reversed(words))
