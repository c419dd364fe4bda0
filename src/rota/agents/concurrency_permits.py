"""How many agents run here at once. A permit is taken before Redis is asked, and given back once, by who is first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

UNBOUNDED_FREE: Final = 1_000_000
"""Free places where there is no limit: more than any cycle takes."""


class ConcurrencyPermit:
    """One place, held from its making on."""

    __slots__ = ("_back", "held")

    def __init__(self, back: Callable[[], None]) -> None:
        self._back = back
        self.held = True

    def release(self) -> bool:
        """Whether this call gave it back; all but the first do nothing."""
        if not self.held:
            return False
        self.held = False
        self._back()
        return True


class PermitPool:
    """`most` of 0 or less sets no limit; `freed` is called after each release."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self.freed: Callable[[], None] = _ignore_release

    @property
    def bounded(self) -> bool:
        return self.most > 0

    @property
    def free(self) -> int:
        return max(0, self.most - self.held) if self.bounded else UNBOUNDED_FREE

    def take(self, wanted: int) -> list[ConcurrencyPermit]:
        """As many as are free, up to `wanted`."""
        taken = [ConcurrencyPermit(self._release_one) for _ in range(min(wanted, self.free))]
        self.held += len(taken)
        return taken

    def _release_one(self) -> None:
        self.held -= 1
        self.freed()


def _ignore_release() -> None:
    return None
