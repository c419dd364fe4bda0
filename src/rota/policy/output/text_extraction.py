"""Extracts the texts of an output for the scanners, with the location of each.

A value is split into its strings, keys, blobs and long integers (which may be ids or card numbers). They are joined
into one text in which a key precedes its value, as in `password=...`, so that a pattern sees both; everything else is
separated by NUL. Hits are mapped back to the fragments they lie in. Files are not extracted: they are searched as they
are, in windows.

Redaction replaces parts of fragments and rebuilds the value in the same traversal order. A value that cannot be decoded
is one fragment, and any hit redacts all of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from rota.model.policy.outputs import REDACTION_MARKER, merge_spans

LONG_NUMBER: Final = 10**8
"""Integers from here on may identify a person."""
_UTF8_CONTINUATION: Final = 0xC0, 0x80

ValuePath = tuple[Any, ...]
"""The path of a fragment: that of its parent, and the key or index in it; empty at the top."""


class OutputFragment(NamedTuple):
    path: ValuePath
    data: bytes
    is_text: bool = True
    is_key: bool = False

    def align_span(self, begin: int, end: int) -> tuple[int, int]:
        """Byte offsets extended to whole characters."""
        while self.is_text and begin > 0 and self.data[begin] & _UTF8_CONTINUATION[0] == _UTF8_CONTINUATION[1]:
            begin -= 1
        while self.is_text and end < len(self.data) and self.data[end] & _UTF8_CONTINUATION[0] == _UTF8_CONTINUATION[1]:
            end += 1
        return begin, end

    def reported_span(self, begin: int, end: int) -> tuple[int, int]:
        """Offset and length for reports: in characters for text, else in bytes."""
        if not self.is_text:
            return begin, end - begin
        offset = len(self.data[:begin].decode(errors="replace"))
        return offset, len(self.data[begin:end].decode(errors="replace"))

    def redact_spans(self, spans: Sequence[tuple[int, int]]) -> bytes:
        redacted, at = b"", 0
        for begin, end in merge_spans([self.align_span(*span) for span in spans]):
            redacted += self.data[at:begin] + REDACTION_MARKER.encode()
            at = end
        return redacted + self.data[at:]


class ScanTarget:
    """One text to scan: a value or an error text."""

    def __init__(self, name: str, fragments: Sequence[OutputFragment]) -> None:
        self.name = name
        self.fragments = fragments
        self._begins: list[int] = []
        self.text = self._join_fragments()

    def _join_fragments(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        for fragment in self.fragments:
            self._begins.append(size)
            parts += (fragment.data, b"=" if fragment.is_key else b"\0")
            size += len(fragment.data) + 1
        return b"".join(parts)

    def spans(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The fragment parts in that range: (fragment index, begin, end)."""
        found = []
        at = max(0, bisect_right(self._begins, begin) - 1)
        while at < len(self._begins) and self._begins[at] < end:
            first = self._begins[at]
            inside = max(begin - first, 0), min(end - first, len(self.fragments[at].data))
            if inside[0] < inside[1]:
                found.append((at, *inside))
            at += 1
        return found


class OutputValue(ScanTarget):
    """A return value, as msgpack."""

    def __init__(self, data: bytes) -> None:
        self._whole = False
        self._value: Any = None
        fragments: list[OutputFragment] = []
        try:
            self._value = msgspec.msgpack.decode(data)
            _walk(self._value, (), fragments.append)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            self._whole, fragments = True, [OutputFragment((), data, is_text=False)]
        super().__init__("value", fragments)

    def redact(self, spans: Sequence[tuple[int, int, int]]) -> bytes:
        """The value without these parts; the marker alone if there are none or it cannot be decoded."""
        if self._whole or not spans:
            return msgspec.msgpack.encode(REDACTION_MARKER)
        return msgspec.msgpack.encode(_walk(self._value, (), _redactor(_group_spans(spans))))


class OutputStream:
    """A file that is searched in windows: hits are offsets in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fragments = (OutputFragment((), b"", is_text=False),)

    def spans(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        return [(0, begin, end)]


class OutputBlob(ScanTarget):
    """A text in memory, such as an error."""

    def __init__(self, name: str, data: bytes, *, is_text: bool = False) -> None:
        super().__init__(name, [OutputFragment((), data, is_text=is_text)])

    def redact(self, spans: Sequence[tuple[int, int, int]]) -> bytes:
        [fragment] = self.fragments
        return fragment.redact_spans([(begin, end) for _, begin, end in spans]) if spans else REDACTION_MARKER.encode()


def _group_spans(spans: Sequence[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for at, begin, end in spans:
        found.setdefault(at, []).append((begin, end))
    return found


def _redactor(spans: dict[int, list[tuple[int, int]]]) -> Callable[[OutputFragment], bytes | None]:
    at = -1

    def replace(fragment: OutputFragment) -> bytes | None:
        nonlocal at
        at += 1
        return fragment.redact_spans(spans[at]) if at in spans else None

    return replace


def _walk(value: Any, path: ValuePath, visit: Callable[[OutputFragment], bytes | None]) -> Any:
    """Call `visit` for every fragment in a fixed order and rebuild the value from its results (None: unchanged)."""
    if isinstance(value, dict):
        return _walk_mapping(value, path, visit)
    if isinstance(value, list | tuple):
        return type(value)([_walk(each, (path, at), visit) for at, each in enumerate(value)])
    if isinstance(value, str):
        replacement = visit(OutputFragment(path, value.encode()))
        return value if replacement is None else replacement.decode(errors="replace")
    if isinstance(value, bytes | bytearray):
        replacement = visit(OutputFragment(path, bytes(value), is_text=False))
        return value if replacement is None else replacement
    if isinstance(value, msgspec.msgpack.Ext):
        return value if visit(OutputFragment(path, bytes(value.data), is_text=False)) is None else REDACTION_MARKER
    if _is_long_number(value):
        return value if visit(OutputFragment(path, str(int(value)).encode())) is None else REDACTION_MARKER
    return value


def _is_long_number(value: Any) -> bool:
    """Includes floats with integer values: other languages encode integers so."""
    return (
        isinstance(value, int | float) and abs(value) >= LONG_NUMBER and (isinstance(value, int) or value.is_integer())
    )


def _walk_mapping(
    value: dict[Any, Any], path: ValuePath, visit: Callable[[OutputFragment], bytes | None]
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for index, (key, item) in enumerate(value.items()):
        name = key
        if isinstance(key, str | bytes):
            replacement = visit(
                OutputFragment((path, index), key.encode() if isinstance(key, str) else key, is_key=True)
            )
            name = key if replacement is None else f"{REDACTION_MARKER} {index}"
        elif _is_long_number(key):
            replacement = visit(OutputFragment((path, index), str(int(key)).encode(), is_key=True))
            name = key if replacement is None else f"{REDACTION_MARKER} {index}"
        elif isinstance(key, tuple):
            name = key if _walk(key, (path, index), visit) == key else f"{REDACTION_MARKER} {index}"
        found[name] = _walk(item, (path, key if isinstance(key, str) else index), visit)
    return found


def format_path(path: ValuePath, is_clean: Callable[[str], bool]) -> str:
    """A path such as `.user.emails[2]`; a name that is not `is_clean` becomes `*`."""
    parts: list[str] = []
    while path:
        path, step = path
        parts.append(f"[{step}]" if isinstance(step, int) else f".{step}" if is_clean(step) else ".*")
    return "".join(reversed(parts))
