"""Permits that limit the agents running in this process. A permit is taken before Redis is called and released once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

UNBOUNDED_FREE: Final = 1_000_000
"""Free permits without a limit: more than any cycle takes."""


class ConcurrencyPermit:
    """One permit, held from its creation."""

    __slots__ = ("_back", "held")

    def __init__(self, back: Callable[[], None]) -> None:
        self._back = back
        self.held = True

    def release(self) -> bool:
        """Whether this call released it; later calls do nothing."""
        if not self.held:
            return False
        self.held = False
        self._back()
        return True


class PermitPool:
    """`most` of 0 or less: no limit; `on_release` is called after each release."""

    def __init__(self, most: int, on_release: Callable[[], None]) -> None:
        self.most = most
        self.held = 0
        self._on_release = on_release

    @property
    def bounded(self) -> bool:
        return self.most > 0

    @property
    def free(self) -> int:
        return max(0, self.most - self.held) if self.bounded else UNBOUNDED_FREE

    def take(self, count: int) -> list[ConcurrencyPermit]:
        """Up to `count` permits, as many as are free."""
        taken = [ConcurrencyPermit(self._release_one) for _ in range(min(count, self.free))]
        self.held += len(taken)
        return taken

    def _release_one(self) -> None:
        self.held -= 1
        self._on_release()
