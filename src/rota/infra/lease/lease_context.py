"""Work under one lease, ended before the lease is.

While the body runs, a task renews the lease every third of its time, and twice as often once a renewal has failed. The
lease counts as lost when PostgreSQL refuses a renewal, after `STRIKES` failed ones in a row (which is before it runs
out, so the body has time to stop), or when the time since the *start* of the last good renewal exceeds the ttl by our
monotonic clock. PostgreSQL counts from some moment after that start, so we never believe longer than it does.

Losing it cancels the body and raises `LeaseLost` in place of the cancellation, the way `asyncio.timeout` does it: a
cancellation by anybody else stays one. A paused or blocked process notices when it runs again, at the latest when the
body ends; what it writes before that is refused by the fence.

The lease is given back by a task of its own, which no cancellation interrupts and `RELEASE_S` bounds. If we die before
that, or PostgreSQL is away, the lease is free when its time is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING

import structlog

from rota.infra.lease.grant import LEASES_LOST, Lease
from rota.infra.postgres import Notifications
from rota.infra.postgres.failures import FAILURES
from rota.model.errors import LeaseHeld, LeaseLost, PostgresUnavailable, RotaError

if TYPE_CHECKING:
    from rota.infra.lease.leases import Leases

log = structlog.get_logger(__name__)

CHANNEL = "rota_lease"
ATTEMPTS_MAX = 3
POLL_MIN_S = 0.05
POLL_MAX_S = 1.0
RELEASE_TIMEOUT_S = 2.0
UNREACHABLE_ERRORS = (PostgresUnavailable, *FAILURES)


class LeaseContext:
    """One try to work under a lease; made by `Leases.hold`, entered once."""

    def __init__(self, leases: Leases, name: str, *, kind: str, ttl_s: float, wait_s: float, release: bool) -> None:
        self._leases = leases
        self._clock = leases.clock
        self._name = name
        self._kind = kind
        self._ttl_s = ttl_s
        self._wait_s = wait_s
        self._release = release
        self._holder = leases.new_holder()
        self._asked_at = 0.0
        self._believed_until = 0.0
        self._lost: str | None = None
        self._cause: Exception | None = None

    @property
    def valid_until(self) -> float:
        """By our monotonic clock: PostgreSQL grants it to nobody else before this."""
        return self._believed_until

    async def __aenter__(self) -> Lease:
        task = asyncio.current_task()
        assert task is not None
        self._lease = await self._acquire()
        self._task = task
        self._cancelling = task.cancelling()
        self._keeper = asyncio.create_task(self._renew_loop(), name="lease.keep")
        return self._lease

    async def __aexit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # Nobody can call _lose from here on, so whether the task was cancelled by us is settled.
        self._keeper.cancel()
        if self._lost is not None:
            self._task.uncancel()
        elif self._clock.monotonic() >= self._believed_until:
            self._record_lost("it ran out")
        cancelled = await _run_shielded(self._finish())
        by_others = self._task.cancelling() > self._cancelling
        if cancelled is not None and (by_others or self._lost is None):
            raise cancelled
        stopped_by_us = isinstance(error, asyncio.CancelledError) and not by_others
        if self._lost is not None and (error is None or stopped_by_us):
            raise LeaseLost(
                f"The {self._kind} lease {self._name} was lost while work was under way ({self._lost}): the work was"
                " stopped, and whoever holds the lease now goes on with it.",
                lease=self._name,
                fence=self._lease.fence,
            ) from self._cause

    async def _acquire(self) -> Lease:
        lease, _ = await self._try_acquire(waiting=self._wait_s > 0)
        if lease is None and self._wait_s > 0:
            async with self._leases.database.listen(CHANNEL) as wakes:
                lease = await self._wait(wakes)
        if lease is None:
            raise LeaseHeld(
                f"The {self._kind} lease {self._name} is held by somebody else: try again later.", lease=self._name
            )
        return lease

    async def _wait(self, wakes: Notifications) -> Lease | None:
        deadline = self._clock.monotonic() + self._wait_s
        while True:
            lease, left_s = await self._try_acquire(waiting=True)
            patience_s = deadline - self._clock.monotonic()
            if lease is not None or patience_s <= 0:
                return lease
            # Just after it would run out, or sooner: it may be renewed, or released unheard. Spread over the waiters.
            pause_s = min(left_s, POLL_MAX_S) + POLL_MIN_S * random.random()  # noqa: S311 - keeps no secret
            await self._wait_for_release(wakes, min(pause_s, patience_s))

    async def _wait_for_release(self, wakes: Notifications, pause_s: float) -> None:
        """Wait for a release of this lease, or `pause_s`."""
        until = self._clock.monotonic() + pause_s
        while await wakes.next(until - self._clock.monotonic()) not in (None, self._name):
            pass

    async def _try_acquire(self, *, waiting: bool) -> tuple[Lease | None, float]:
        """The lease, or how long somebody else holds it. A lost reply is no matter: the grant is found again."""
        for strike in range(1, ATTEMPTS_MAX + 1):
            self._asked_at = self._clock.monotonic()
            try:
                attempt = await self._leases.acquire(
                    [self._name], kind=self._kind, ttl_s=self._ttl_s, holder=self._holder, waiting=waiting
                )
            except UNREACHABLE_ERRORS:
                if strike == ATTEMPTS_MAX:
                    raise
                await self._clock.sleep(POLL_MIN_S * random.random())  # noqa: S311 - keeps no secret
            else:
                self._believed_until = self._asked_at + self._ttl_s
                return (attempt.granted[0], 0.0) if attempt.granted else (None, attempt.left_s.get(self._name, 0.0))
        raise AssertionError("unreachable")

    async def _renew_loop(self) -> None:
        strikes = 0
        try:
            while self._lost is None:
                period_s = self._ttl_s / (6 if strikes else 3)
                await self._clock.sleep(max(0.0, self._asked_at + period_s - self._clock.monotonic()))
                strikes = await self._renew(strikes)
        except Exception as error:  # noqa: BLE001 - whoever holds the lease is told, with this as the cause
            self._cause = error
            self._abort_as_lost(f"renewing it failed with {type(error).__name__}")

    async def _renew(self, strikes: int) -> int:
        """Try once; returns how many tries have failed in a row."""
        self._asked_at = self._clock.monotonic()
        if self._asked_at >= self._believed_until:
            self._abort_as_lost("it ran out")
            return strikes
        try:
            async with asyncio.timeout(self._ttl_s / 6):
                held = await self._leases.renew([self._lease])
        except UNREACHABLE_ERRORS as error:
            log.warning("lease_renewal_failed", lease=self._name, strike=strikes + 1, error=type(error).__name__)
            if strikes + 1 == ATTEMPTS_MAX:
                self._abort_as_lost(f"{ATTEMPTS_MAX} renewals failed in a row")
            return strikes + 1
        if self._name in held:
            self._believed_until = self._asked_at + self._ttl_s
        else:
            self._abort_as_lost("PostgreSQL refused to renew it")
        return 0

    def _abort_as_lost(self, reason: str) -> None:
        self._record_lost(reason)
        self._task.cancel()

    def _record_lost(self, reason: str) -> None:
        self._lost = reason
        LEASES_LOST.labels(self._kind).inc()
        log.warning("lease_lost", lease=self._name, fence=self._lease.fence, reason=reason)

    async def _finish(self) -> None:
        await asyncio.wait([self._keeper])
        if self._release and self._lost is None:
            await self._release_lease()

    async def _release_lease(self) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                ours = await self._leases.release([self._lease])
        except (RotaError, *FAILURES) as error:
            log.warning("lease_release_failed", lease=self._name, error=type(error).__name__, free_in_s=self._ttl_s)
        else:
            if self._name not in ours:
                self._record_lost("it was not ours any more when it was given back")


async def _run_shielded(work: Coroutine[None, None, None]) -> asyncio.CancelledError | None:
    """Do `work`, whatever cancels us meanwhile; returns the last such cancellation."""
    task = asyncio.create_task(work, name="lease.end")
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    return cancelled
