"""Work on all shows, of which one may be locked: the others do not wait for it longer than a lock timeout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from rota.model.errors import PostgresBusy

T = TypeVar("T")


async def for_each(shows: Iterable[T], work: Callable[[T], Awaitable[int]]) -> int:
    """The sum of what `work` returns. If a show was busy, its error is raised after all others are done."""
    total, busy = 0, None
    for show in shows:
        try:
            total += await work(show)
        except PostgresBusy as error:
            busy = busy or error
    if busy is not None:
        raise busy
    return total
