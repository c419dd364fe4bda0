"""The parts of an output: its value, and files that are read in chunks, as often as needed. Reading may block.

A file is never in memory as a whole: it is searched in chunks, and its redacted form is produced in chunks from the
original. `OutputContent` holds everything, for messages and small outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from rota.model.policy.outputs import REDACTION_MARKER, merge_spans

CHUNK_BYTES: Final = 1024 * 1024

FileChunks = Callable[[], Iterator[bytes]]
"""Reads a file from its start, in chunks of any size."""


class OutputFile(NamedTuple):
    name: str
    chunks: FileChunks


class OutputParts(NamedTuple):
    value: bytes | None = None
    files: tuple[OutputFile, ...] = ()

    def content(self) -> OutputContent:
        return OutputContent(self.value, tuple((file.name, b"".join(file.chunks())) for file in self.files))

    def replaced_by_marker(self) -> OutputParts:
        value = None if self.value is None else msgspec.msgpack.encode(REDACTION_MARKER)
        return OutputParts(value, tuple(bytes_file(file.name, REDACTION_MARKER.encode()) for file in self.files))


class OutputContent(msgspec.Struct, frozen=True):
    """A whole output: the return value, and the artifacts by name."""

    value: bytes | None = None
    artifacts: tuple[tuple[str, bytes], ...] = ()

    def parts(self) -> OutputParts:
        return OutputParts(self.value, tuple(bytes_file(name, data) for name, data in self.artifacts))


def bytes_file(name: str, data: bytes) -> OutputFile:
    return OutputFile(name, partial(_slices, data))


def _slices(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), CHUNK_BYTES):
        yield data[at : at + CHUNK_BYTES]


def windows(chunks: Iterator[bytes], size: int) -> Iterator[tuple[bytes, bool]]:
    """The chunks joined to at least `size` bytes each, with whether it is the last; at least one."""
    gathered: list[bytes] = []
    length = 0
    for chunk in chunks:
        if length >= size:
            yield b"".join(gathered), False
            gathered, length = [], 0
        gathered.append(chunk)
        length += len(chunk)
    yield b"".join(gathered), True


def redacted_chunks(chunks: FileChunks, spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """The file with the marker in place of the spans, which are offsets in bytes."""
    remaining = iter(merge_spans(list(spans)))
    span = next(remaining, None)
    at = skip_to = 0
    for chunk in chunks():
        position = max(0, min(len(chunk), skip_to - at))
        while span is not None and span[0] < at + len(chunk):
            yield chunk[position : span[0] - at] + REDACTION_MARKER.encode()
            skip_to = span[1]
            position = min(len(chunk), skip_to - at)
            span = next(remaining, None)
        yield chunk[position:]
        at += len(chunk)
