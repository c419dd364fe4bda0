"""A show may be locked, such as by a change in an open transaction: the other shows do not wait for it.

Bookings and ends wait for a lock for half a second at most (`SET lock_timeout` of their SQL functions). Where that was
too short, `LockedShows` lets one attempt at a time through, with growing pauses, and the frames of the show wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import structlog

from rota.infra.clock import Clock
from rota.model.backoff import Backoff
from rota.model.errors import PostgresBusy
from rota.model.ids import ShowId

log = structlog.get_logger(__name__)
LOCK_WAIT_S: Final = 0.5
"""For transactions that end frames; `SET lock_timeout` in the SQL functions is the same."""
RECENT_S: Final = 1.0
ATTEMPT_BACKOFF: Final = Backoff(first_s=0.5, longest_s=2.0)

T = TypeVar("T")


class LockedShows:
    """Shows whose last booking or end in this process met a lock. One instance for all who book or end frames."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[ShowId, int] = {}
        self._until_s: dict[ShowId, float] = {}
        self._trying: set[ShowId] = set()

    def __bool__(self) -> bool:
        return bool(self._failures)

    def __contains__(self, show: ShowId) -> bool:
        """Whether an attempt has met a lock lately; without further attempts the lock may be gone."""
        return self._clock.monotonic() < self._until_s.get(show, float("-inf")) + RECENT_S

    def blocks(self, show: ShowId) -> bool:
        """Whether not to try now: the pause after the last attempt is not over, or another attempt is under way."""
        return show in self._trying or self._clock.monotonic() < self._until_s.get(show, float("-inf"))

    @contextmanager
    def attempt(self, show: ShowId) -> Iterator[None]:
        """Around a transaction of one show: records whether it met a lock."""
        known = show in self._failures
        if known:
            self._trying.add(show)
        try:
            yield
        except PostgresBusy as busy:
            self._record_failure(show, busy)
            raise
        else:
            self._failures.pop(show, None)
            self._until_s.pop(show, None)
        finally:
            if known:
                self._trying.discard(show)

    def _record_failure(self, show: ShowId, busy: PostgresBusy) -> None:
        failures = self._failures[show] = self._failures.get(show, 0) + 1
        self._until_s[show] = self._clock.monotonic() + ATTEMPT_BACKOFF.pause_s(failures, 0.5)
        if failures == 1:
            log.warning("show_locked", show=str(show), reason=busy.sentence, remedy="see pg_blocking_pids")


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
