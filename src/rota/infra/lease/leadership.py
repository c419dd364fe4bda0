"""Leader election: one replica at a time runs a task.

`Leadership` campaigns for a lease and runs `lead` while it holds it. Losing the lease, or PostgreSQL, cancels `lead`,
and the campaign starts again. `lead` receives the lease and guards its writes with it: two replicas may briefly both
believe that they lead, but only one of them can write. When `lead` returns or fails, the lease is released, so that
another replica may take over; a failure is raised to the supervisor. A service uses `serve`.

A campaign survives any server error. `lead` fails for its own reasons: only the loss of *this* lease or of PostgreSQL
ends a term normally.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import structlog

from rota.infra.asyncio_cancel import cancellable
from rota.infra.lease.grant import Lease
from rota.infra.lease.leases import Leases
from rota.infra.postgres.failures import FAILURES
from rota.infra.service.lifecycle import Lifecycle
from rota.model.backoff import Backoff
from rota.model.errors import LeaseHeld, LeaseLost, PostgresUnavailable, RotaError, StaleFence

log = structlog.get_logger(__name__)

CAMPAIGN_TIMEOUT_S = 30.0
CAMPAIGN_BACKOFF = Backoff(first_s=1.0, longest_s=3.0)
"""Short, because what leaders repair waits until PostgreSQL has elected one."""


class Leadership:
    """One candidate for one lease. `elected` is set while it leads."""

    def __init__(
        self,
        leases: Leases,
        name: str,
        lead: Callable[[Lease], Awaitable[None]],
        *,
        kind: str,
        ttl_s: float = 4.0,
        pauses: Backoff = CAMPAIGN_BACKOFF,
    ) -> None:
        self._leases = leases
        self._name = name
        self._lead = lead
        self._kind = kind
        self._ttl_s = ttl_s
        self._pauses = pauses
        self.elected = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Whether this replica believes to be the leader; only a guarded write is proof."""
        return self.elected.is_set()

    async def serve(self, lifecycle: Lifecycle) -> None:
        """`run` until draining starts; the caller reports readiness.

        A failure of `lead` is raised, so that the service is restarted.
        """
        leading = asyncio.create_task(self.run(), name=f"lead.{self._kind}")
        draining = asyncio.create_task(lifecycle.until_draining(), name=f"lead.{self._kind}.draining")
        try:
            await asyncio.wait({leading, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leading.cancel()
            draining.cancel()
            await asyncio.wait({leading, draining})
        if not leading.cancelled():
            leading.result()

    async def run(self) -> None:
        """Campaign and lead until cancelled, or until `lead` fails."""
        while True:
            try:
                await self._term()
            except (LeaseLost, StaleFence) as error:
                if not self._is_own_lease(error):
                    raise
                log.warning("leader_deposed", lease=self._name, code=error.code)
            except PostgresUnavailable as error:
                log.warning("leader_postgres_unavailable", lease=self._name, outcome=error.facts.get("outcome"))
            await self._pause(1)

    async def _term(self) -> None:
        async with AsyncExitStack() as term:
            lease = await self._campaign(term)
            self.elected.set()
            log.info("leader_elected", lease=self._name, fence=lease.fence)
            try:
                with cancellable():  # if `lead` fails while it is cancelled, `run` must not campaign again
                    await self._lead(lease)
            finally:
                self.elected.clear()

    async def _campaign(self, term: AsyncExitStack) -> Lease:
        """Wait for the lease, across server failures; it is held until `term` ends."""
        failures = 0
        while True:
            hold = self._leases.hold(self._name, kind=self._kind, ttl_s=self._ttl_s, wait_s=CAMPAIGN_TIMEOUT_S)
            try:
                return await term.enter_async_context(hold)
            except LeaseHeld:
                failures = 0
            except (RotaError, *FAILURES) as error:
                failures += 1
                log.warning("leader_campaign_failed", lease=self._name, error=type(error).__name__)
                await self._pause(failures)

    async def _pause(self, attempt: int) -> None:
        jitter = random.random()  # noqa: S311 - jitter, not a secret
        await self._leases.clock.sleep(self._pauses.pause_s(attempt, jitter))

    def _is_own_lease(self, error: LeaseLost | StaleFence) -> bool:
        """Whether the error concerns the leader lease, and not one used by `lead`."""
        match error:
            case LeaseLost():
                return error.facts.get("lease") == self._name
            case StaleFence():
                stale = error.facts.get("leases")
                return isinstance(stale, list) and self._name in stale
