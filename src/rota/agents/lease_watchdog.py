"""Bodies on the loop end with the lease, also when the loop itself could not see to that in time.

A process that was paused wakes up past its lease: whatever was due meanwhile is ready to go on, and the keeper of the
lease is one among many. So `leashed` looks at the clock before every step of a body: past the lease there is none.
Tasks that a body has made are its own; they end when it cancels them.

A body that blocks the loop, with a call that never yields, keeps everything from happening, renewals included.
`LoopGuard`, a thread, ends the process then, before somebody else may run its agents; a loop that still answers is left
to end its bodies by itself.
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
"""How long after the lease the loop is asked whether it lives."""
PROBE_TIMEOUT_S: Final = 1.0
"""And how long it may take; both together are less than whoever takes over waits."""
POLL_INTERVAL_S: Final = 0.25
LOG_TIMEOUT_S: Final = 0.2
STUCK_EXIT_STATUS: Final = 70


class CancelOnLeaseExpiry:
    """`await leashed(body(), over)`: once `over()` holds, the next step is a cancellation, and the rest is cleaning."""

    def __init__(self, work: Awaitable[object], over: Callable[[], bool]) -> None:
        self._work = work
        self._over = over

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._work.__await__()
        cut = False
        error: BaseException | None = None
        while True:
            if not cut and error is None and self._over():
                cut, error = True, asyncio.CancelledError()
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
            except BaseException as given:  # noqa: BLE001 - it is the body's, as without us
                error = given


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
    log.critical("agents_block_the_loop", remedy="a body makes calls that block: make it a plain function")


class EventLoopWatchdog(threading.Thread):
    """`lease_until` and `busy` are asked from this thread; `abandon` ends the process."""

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
                # In a thread of its own: that nobody reads our log may be what blocks the loop.
                telling = threading.Thread(target=_log_blocked_loop, daemon=True)
                telling.start()
                telling.join(LOG_TIMEOUT_S)
                self._abandon(STUCK_EXIT_STATUS)
                return

    def _remaining_s(self) -> float:
        return self._lease_until() + PROBE_DELAY_S - self._clock.monotonic()

    def _loop_responds(self) -> bool:
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # it is closed: nothing runs on it any more
            return True
        return answered.wait(PROBE_TIMEOUT_S)
