"""Cuts lists into pages. Get the next page with `?after=cursor`; null marks the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeVar

from litestar.params import QueryParameter

from rota.api.pages import Page

T = TypeVar("T")

LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 1000

Limit = Annotated[int, QueryParameter(ge=1, le=LIMIT_MAX, description="Maximum number of items per page.")]


def paginate(items: Sequence[T], limit: int, cursor: Callable[[T], object]) -> Page[T]:
    """The caller fetched up to `limit` + 1 items: the extra one shows that there is a next page."""
    shown = list(items[:limit])
    return Page(shown, str(cursor(shown[-1])) if len(items) > limit else None)
