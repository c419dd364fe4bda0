"""Pointers: location and identity of a value. No I/O.

    pg:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08:4

A pointer identifies the value by its SHA-256 and length: equal values have equal pointers, and readers can verify the
content.
"""

from __future__ import annotations

import re
from enum import StrEnum
from hashlib import sha256
from typing import Final

import msgspec

from rota.model.errors import BlobCorrupted, InvalidInput

_POINTER: Final = re.compile(r"(pg|file):([0-9a-f]{64}):(0|[1-9][0-9]{0,12})", re.ASCII)


class BlobLocation(StrEnum):
    POSTGRES = "pg"
    FILE = "file"


class BlobPointer(msgspec.Struct, frozen=True):
    where: BlobLocation
    sha256: bytes
    size: int

    def __str__(self) -> str:
        return f"{self.where.value}:{self.sha256.hex()}:{self.size}"

    @classmethod
    def parse(cls, text: str) -> BlobPointer:
        found = _POINTER.fullmatch(text)
        if found is None:
            raise InvalidInput(f"{text[:40]!r} is not a pointer of this store.")
        return cls(BlobLocation(found[1]), bytes.fromhex(found[2]), int(found[3]))

    def verify(self, data: bytes) -> bytes:
        """`data`, if it matches this pointer."""
        digest = BlobDigest(self)
        digest.update(data)
        digest.verify()
        return data


class BlobDigest:
    """Verifies a value that is read in parts."""

    def __init__(self, pointer: BlobPointer) -> None:
        self._pointer = pointer
        self._sha256 = sha256()
        self._size = 0

    def update(self, part: bytes) -> None:
        self._sha256.update(part)
        self._size += len(part)

    def verify(self) -> None:
        """Raises BlobCorrupted unless the parts are the whole value."""
        pointer = self._pointer
        if self._size != pointer.size or self._sha256.digest() != pointer.sha256:
            raise BlobCorrupted(
                f"The value stored under {pointer} is not what was written: restore it, or submit the job again.",
                pointer=str(pointer),
            )


def pointer_to(data: bytes, where: BlobLocation) -> BlobPointer:
    return BlobPointer(where, sha256(data).digest(), len(data))
