"""Ids: a UUID per thing that is a row of its own, typed by what it names.

Frames, workers and agents have no id here: a frame is its layer and number, workers and agents go by name.
Ids are version 7 (RFC 9562), so rows made together lie together in an index and sort by the time they were
made. Time and randomness are passed in; the caller takes them from its clock and the system's secure source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NewType, TypeVar
from uuid import UUID

from rota.model.errors import InvalidInput

ShowId = NewType("ShowId", UUID)
PoolId = NewType("PoolId", UUID)
FolderId = NewType("FolderId", UUID)
DeptId = NewType("DeptId", UUID)
JobId = NewType("JobId", UUID)
LayerId = NewType("LayerId", UUID)
RunId = NewType("RunId", UUID)

ENTROPY_BYTES: Final = 10
_NOW_MS_MAX: Final = 2**48 - 1
# UUID() alone also takes braces, a urn: prefix and hyphens anywhere.
_CANONICAL = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)

Id = TypeVar("Id")


def uuid7(now_ms: int, entropy: bytes) -> UUID:
    """48 bits of time in ms, then version and variant, then 74 of the 80 bits of `entropy`.

    Two ids of one millisecond are in no particular order.
    """
    return UUID(bytes=uuid7_bytes(now_ms, entropy))


def uuid7_bytes(now_ms: int, entropy: bytes) -> bytes:
    """The same as 16 bytes, for who makes many."""
    assert 0 <= now_ms <= _NOW_MS_MAX, "now_ms is milliseconds since 1970"
    assert len(entropy) == ENTROPY_BYTES, f"uuid7 needs {ENTROPY_BYTES} random bytes"
    bits = int.from_bytes(entropy, "big")
    rand_a, rand_b = bits >> 68, bits & (2**62 - 1)
    return (now_ms << 80 | 0x7 << 76 | rand_a << 64 | 0b10 << 62 | rand_b).to_bytes(16, "big")


def parse_id(kind: Callable[[UUID], Id], text: str) -> Id:
    """`parse_id(JobId, text)`: the id written as text, or a sentence that says what one looks like."""
    if not _CANONICAL.fullmatch(text):
        what = kind.__name__.removesuffix("Id").lower()
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        raise InvalidInput(f"{shown} is no {what} id; one looks like 0192f0c1-2b3a-7c4d-8e5f-60718293a4b5.")
    return kind(UUID(text))
