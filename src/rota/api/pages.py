"""Pages of lists: `{"items": [...], "next": cursor}`. No I/O."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    next: str | None = None
