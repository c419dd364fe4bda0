"""A page of a list, as the API returns it."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class ApiPage(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    next: str | None = None
