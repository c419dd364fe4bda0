"""Stops agent bodies when the lease expires, even if the event loop was paused or blocked.

A process that was paused resumes past its lease: everything that became due is runnable, and the lease keeper is only
one task among many. So `CancelOnLeaseExpiry` checks the clock before every step of a body: past the lease there is
none. Tasks that a body created are its own; they end when it cancels them.

A body that blocks the loop, with a call that never yields, also blocks renewals. `EventLoopWatchdog`, a thread, then
exits the process before another member may run its agents; a loop that still responds stops its bodies itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

import structlog

from rota.infra.clock import Clock

log = structlog.get_logger(__name__)

PROBE_DELAY_S: Final = 0.5
"""How long after lease expiry the loop is probed."""
PROBE_TIMEOUT_S: Final = 1.0
"""How long the loop may take to respond; together with the delay it is less than the takeover grace."""
POLL_INTERVAL_S: Final = 0.25
LOG_TIMEOUT_S: Final = 0.2
STUCK_EXIT_STATUS: Final = 70


class CancelOnLeaseExpiry:
    """`await CancelOnLeaseExpiry(body(), expired)`: once `expired()` is true, the next step raises CancelledError."""

    def __init__(self, work: Awaitable[object], expired: Callable[[], bool]) -> None:
        self._work = work
        self._expired = expired

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._work.__await__()
        cancelled = False
        error: BaseException | None = None
        while True:
            if not cancelled and error is None and self._expired():
                cancelled, error = True, asyncio.CancelledError()
            try:
                waits = next(steps) if error is None else _throw(steps, error)
            except StopIteration as done:
                return done.value
            error = None
            try:
                yield waits
            except GeneratorExit:
                _close(steps)
                raise
            except BaseException as raised:  # noqa: BLE001 - forwarded to the body
                error = raised


def _throw(steps: Any, error: BaseException) -> Any:
    throw = getattr(steps, "throw", None)
    if throw is None:
        raise error
    return throw(error)


def _close(steps: Any) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def _log_blocked_loop() -> None:
    log.critical(
        "agents_event_loop_blocked", remedy="an agent body makes blocking calls: declare it as a plain function"
    )


class EventLoopWatchdog(threading.Thread):
    """`lease_until` and `busy` are called from this thread; `abandon` exits the process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        lease_until: Callable[[], float],
        busy: Callable[[], bool],
        abandon: Callable[[int], object],
    ) -> None:
        super().__init__(name="agents guard", daemon=True)
        self._loop = loop
        self._clock = clock
        self._lease_until = lease_until
        self._busy = busy
        self._abandon = abandon
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(max(POLL_INTERVAL_S, self._remaining_s())):
            if self._remaining_s() <= 0 and self._busy() and not self._loop_responds():
                # In a separate thread: a log pipe that is not read may be what blocks the loop.
                logging_thread = threading.Thread(target=_log_blocked_loop, daemon=True)
                logging_thread.start()
                logging_thread.join(LOG_TIMEOUT_S)
                self._abandon(STUCK_EXIT_STATUS)
                return

    def _remaining_s(self) -> float:
        return self._lease_until() + PROBE_DELAY_S - self._clock.monotonic()

    def _loop_responds(self) -> bool:
        responded = threading.Event()
        try:
            self._loop.call_soon_threadsafe(responded.set)
        except RuntimeError:  # the loop is closed: nothing runs on it
            return True
        return responded.wait(PROBE_TIMEOUT_S)
