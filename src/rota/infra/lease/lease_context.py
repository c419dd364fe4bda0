"""Runs work under a lease and stops it before the lease expires.

While the body runs, a task renews the lease every third of its TTL, and twice as often after a failed renewal. Leases
of one TTL are renewed at the same moments, so that a process needs one statement for all of them. The lease counts as
lost when PostgreSQL refuses a renewal, after `ATTEMPTS_MAX` failed renewals in a row (before it expires, so that the
body has time to stop), or when the time since the *start* of the last successful renewal exceeds the TTL on the local
monotonic clock. PostgreSQL measures from a moment after that start, so this process never
overestimates.

Losing the lease cancels the body and raises `LeaseLost` in place of the cancellation, like `asyncio.timeout`; other
cancellations pass through unchanged. A paused or blocked process detects the loss when it resumes, at the latest when
the body ends; its writes before that are refused by the fence.

A separate task releases the lease: cancellation does not interrupt it, and `RELEASE_TIMEOUT_S` bounds it. A caller that
is cancelled while it acquires waits for the answer, within the same time, and releases what it was granted. If this
process dies before, or PostgreSQL is unavailable, the lease expires after its TTL.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING

import structlog

from rota.infra.lease.grant import LEASES_LOST, Lease, LeaseAcquireResult
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
EARLY = 0.01
"""Part of a period: a timer that went off so early does not go off again at once."""
UNREACHABLE_ERRORS = (PostgresUnavailable, *FAILURES)


class LeaseContext:
    """One attempt to work under a lease; created by `Leases.hold`, entered once."""

    def __init__(self, leases: Leases, name: str, *, kind: str, ttl_s: float, wait_s: float, release: bool) -> None:
        self._leases = leases
        self._clock = leases.clock
        self._name = name
        self._kind = kind
        self._ttl_s = ttl_s
        self._wait_s = wait_s
        self._release = release
        self._holder = leases.new_holder()
        self._request: asyncio.Task[LeaseAcquireResult] | None = None
        self._requested_at = 0.0
        self._valid_until = 0.0
        self._lost: str | None = None
        self._cause: Exception | None = None

    @property
    def valid_until(self) -> float:
        """On the local monotonic clock: PostgreSQL grants the lease to no other holder before this."""
        return self._valid_until

    async def __aenter__(self) -> Lease:
        task = asyncio.current_task()
        assert task is not None
        try:
            self._lease = await self._acquire()
        except asyncio.CancelledError:
            await _run_shielded(self._abandon())
            raise
        self._task = task
        self._cancelling = task.cancelling()
        self._renewal = asyncio.create_task(self._renew_loop(), name="lease.renew")
        return self._lease

    async def __aexit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # No _abort_as_lost from here on: whether this object cancelled the task is now final.
        self._renewal.cancel()
        if self._lost is not None:
            self._task.uncancel()
        elif self._clock.monotonic() >= self._valid_until:
            self._record_lost("it expired")
        cancelled = await _run_shielded(self._finish())
        by_others = self._task.cancelling() > self._cancelling
        if cancelled is not None and (by_others or self._lost is None):
            raise cancelled
        stopped_by_us = isinstance(error, asyncio.CancelledError) and not by_others
        if self._lost is not None and (error is None or stopped_by_us):
            raise LeaseLost(
                f"The {self._kind} lease {self._name} was lost during work ({self._lost}): the work was stopped, and"
                " the new holder continues it.",
                lease=self._name,
                fence=self._lease.fence,
            ) from self._cause

    async def _acquire(self) -> Lease:
        lease, _ = await self._try_acquire(waiting=self._wait_s > 0)
        if lease is None and self._wait_s > 0:
            async with self._leases.database.listen(CHANNEL) as notifications:
                lease = await self._wait(notifications)
        if lease is None:
            raise LeaseHeld(
                f"The {self._kind} lease {self._name} is held by another process: try again later.", lease=self._name
            )
        return lease

    async def _wait(self, notifications: Notifications) -> Lease | None:
        deadline = self._clock.monotonic() + self._wait_s
        while True:
            lease, left_s = await self._try_acquire(waiting=True)
            remaining_s = deadline - self._clock.monotonic()
            if lease is not None or remaining_s <= 0:
                return lease
            # Until shortly after expiry, or sooner: the notification of a release may be lost. Jitter spreads waiters.
            pause_s = min(left_s, POLL_MAX_S) + POLL_MIN_S * random.random()  # noqa: S311 - not a secret
            await self._wait_for_release(notifications, min(pause_s, remaining_s))

    async def _wait_for_release(self, notifications: Notifications, pause_s: float) -> None:
        """Wait for a release of this lease, for at most `pause_s`."""
        until = self._clock.monotonic() + pause_s
        while await notifications.next(until - self._clock.monotonic()) not in (None, self._name):
            pass

    async def _try_acquire(self, *, waiting: bool) -> tuple[Lease | None, float]:
        """The lease, or the remaining seconds of its holder. A retry after a lost reply finds the same grant."""
        for attempt_number in range(1, ATTEMPTS_MAX + 1):
            self._requested_at = self._clock.monotonic()
            try:
                attempt = await self._send_request(waiting=waiting)
            except UNREACHABLE_ERRORS:
                if attempt_number == ATTEMPTS_MAX:
                    raise
                await self._clock.sleep(POLL_MIN_S * random.random())  # noqa: S311 - not a secret
            else:
                self._valid_until = self._requested_at + self._ttl_s
                return (attempt.granted[0], 0.0) if attempt.granted else (None, attempt.left_s.get(self._name, 0.0))
        raise AssertionError("unreachable")

    async def _send_request(self, *, waiting: bool) -> LeaseAcquireResult:
        """In a task that survives a cancellation of the caller: PostgreSQL may have granted the lease already."""
        acquire = self._leases.acquire(
            [self._name], kind=self._kind, ttl_s=self._ttl_s, holder=self._holder, waiting=waiting
        )
        self._request = asyncio.create_task(acquire, name="lease.acquire")
        await asyncio.wait([self._request])
        return self._request.result()

    async def _abandon(self) -> None:
        """Release what the last request was granted, for a caller that was cancelled before it could use it."""
        if self._request is None:
            return
        await asyncio.wait([self._request], timeout=RELEASE_TIMEOUT_S)
        if self._request.cancel():  # no answer
            await asyncio.wait([self._request])
        answered = not self._request.cancelled() and self._request.exception() is None
        if answered and (granted := self._request.result().granted):
            self._lease = granted[0]
            await self._release_lease()

    async def _renew_loop(self) -> None:
        failures = 0
        try:
            while self._lost is None:
                await self._clock.sleep(max(0.0, self._renewal_at(failures) - self._clock.monotonic()))
                failures = await self._renew(failures)
        except Exception as error:  # noqa: BLE001 - becomes the cause of LeaseLost
            self._cause = error
            self._abort_as_lost(f"renewing it failed with {type(error).__name__}")

    def _renewal_at(self, failures: int) -> float:
        if failures:
            return self._requested_at + self._ttl_s / 6
        period_s = self._ttl_s / 3
        return (math.floor(self._requested_at / period_s + EARLY) + 1) * period_s

    async def _renew(self, failures: int) -> int:
        """Try once; returns the number of consecutive failures."""
        self._requested_at = self._clock.monotonic()
        if self._requested_at >= self._valid_until:
            self._abort_as_lost("it expired")
            return failures
        try:
            async with asyncio.timeout(self._ttl_s / 6):
                held = await self._leases.renew_together(self._lease, self._ttl_s / 6)
        except UNREACHABLE_ERRORS as error:
            log.warning("lease_renewal_failed", lease=self._name, strike=failures + 1, error=type(error).__name__)
            if failures + 1 == ATTEMPTS_MAX:
                self._abort_as_lost(f"{ATTEMPTS_MAX} renewals failed in a row")
            return failures + 1
        if held:
            self._valid_until = self._requested_at + self._ttl_s
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
        await asyncio.wait([self._renewal])
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
                self._record_lost("it was no longer held at its release")


async def _run_shielded(work: Coroutine[None, None, None]) -> asyncio.CancelledError | None:
    """Complete `work` despite cancellation; returns the last cancellation received."""
    task = asyncio.create_task(work, name="lease.end")
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    return cancelled
