"""Typed ids: one NewType over UUID for each kind of row.

Frames, workers and agents have no id type: a frame is identified by its layer and number, workers and agents by name.
Ids are UUID version 7 (RFC 9562), so rows created together are adjacent in an index and sort by creation time. The
caller passes the time and the random bytes, the latter from the system's secure source.
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

    Ids of the same millisecond have no defined order.
    """
    return UUID(bytes=uuid7_bytes(now_ms, entropy))


def uuid7_bytes(now_ms: int, entropy: bytes) -> bytes:
    """`uuid7` as 16 bytes, without constructing a UUID object."""
    assert 0 <= now_ms <= _NOW_MS_MAX, "now_ms is milliseconds since 1970"
    assert len(entropy) == ENTROPY_BYTES, f"uuid7 needs {ENTROPY_BYTES} random bytes"
    bits = int.from_bytes(entropy, "big")
    rand_a, rand_b = bits >> 68, bits & (2**62 - 1)
    return (now_ms << 80 | 0x7 << 76 | rand_a << 64 | 0b10 << 62 | rand_b).to_bytes(16, "big")


def parse_id(kind: Callable[[UUID], Id], text: str) -> Id:
    """Parse a canonical id, such as `parse_id(JobId, text)`; raises InvalidInput for anything else."""
    if not _CANONICAL.fullmatch(text):
        what = kind.__name__.removesuffix("Id").lower()
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        raise InvalidInput(f"{shown} is not a valid {what} id: use one like 0192f0c1-2b3a-7c4d-8e5f-60718293a4b5.")
    return kind(UUID(text))
