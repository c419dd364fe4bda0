"""Being the one replica that does a thing.

`Leadership` campaigns for a lease and runs `lead` while it has it. Losing the lease, or PostgreSQL, cancels `lead`;
then it campaigns again. `lead` is given the lease and guards its writes with it: for a moment two replicas may believe
that they lead, but only one of them can write. When `lead` returns or fails, the lease is given back, so that another
replica may do better; a failure is raised to whoever supervises us. A service leads by `serve`.

A campaign fails for reasons of the server, whatever they are, and goes on. `lead` fails for reasons of its own: only
the loss of *this* lease and of PostgreSQL are ends of a term.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import structlog

from rota.infra.lease.grant import Lease
from rota.infra.lease.leases import Leases
from rota.infra.postgres.failures import FAILURES
from rota.infra.service.lifecycle import Lifecycle
from rota.model.backoff import Backoff
from rota.model.errors import LeaseHeld, LeaseLost, PostgresUnavailable, RotaError, StaleFence

log = structlog.get_logger(__name__)

CAMPAIGN_TIMEOUT_S = 30.0
CAMPAIGN_BACKOFF = Backoff(first_s=1.0, longest_s=10.0)


class Leadership:
    """One candidate for one lease. `elected` and `deposed` are set by turns, for whoever waits for the change."""

    def __init__(
        self,
        leases: Leases,
        name: str,
        lead: Callable[[Lease], Awaitable[None]],
        *,
        kind: str,
        ttl_s: float = 10.0,
        pauses: Backoff = CAMPAIGN_BACKOFF,
    ) -> None:
        self._leases = leases
        self._name = name
        self._lead = lead
        self._kind = kind
        self._ttl_s = ttl_s
        self._pauses = pauses
        self._task: asyncio.Task[None] | None = None
        self.elected = asyncio.Event()
        self.deposed = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Whether we believe so; only a guarded write knows."""
        return self.elected.is_set()

    async def start(self) -> None:
        """`run` in a task of its own. A failure of `lead` is logged at once, and raised by `stop`."""
        if self._task is None:
            self._task = asyncio.create_task(self.run(), name=f"lead.{self._kind}")
            self._task.add_done_callback(self._log_failure)

    async def stop(self) -> None:
        """Stop leading or campaigning, so that the next may lead at once. Raises what `lead` failed with."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def serve(self, life: Lifecycle) -> None:
        """`run` until `life` drains; whoever serves says when it is ready.

        What `lead` fails with is raised, so that the service is started again.
        """
        leading = asyncio.create_task(self.run(), name=f"lead.{self._kind}")
        draining = asyncio.create_task(life.until_draining(), name=f"lead.{self._kind}.draining")
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
                log.warning("leader_lost_postgres", lease=self._name, outcome=error.facts.get("outcome"))
            await self._pause(1)

    async def _term(self) -> None:
        async with AsyncExitStack() as term:
            lease = await self._campaign(term)
            self.deposed.clear()
            self.elected.set()
            log.info("leader_elected", lease=self._name, fence=lease.fence)
            try:
                await self._lead(lease)
            finally:
                self.elected.clear()
                self.deposed.set()

    async def _campaign(self, term: AsyncExitStack) -> Lease:
        """Wait for the lease, through whatever happens to the server; it is held until `term` ends."""
        failed = 0
        while True:
            hold = self._leases.hold(self._name, kind=self._kind, ttl_s=self._ttl_s, wait_s=CAMPAIGN_TIMEOUT_S)
            try:
                return await term.enter_async_context(hold)
            except LeaseHeld:
                failed = 0
            except (RotaError, *FAILURES) as error:
                failed += 1
                log.warning("leader_campaign_failed", lease=self._name, error=type(error).__name__)
                await self._pause(failed)

    async def _pause(self, streak: int) -> None:
        chance = random.random()  # noqa: S311 - spreads replicas, keeps no secret
        await self._leases.clock.sleep(self._pauses.pause_s(streak, chance))

    def _is_own_lease(self, error: LeaseLost | StaleFence) -> bool:
        """Whether it speaks of the lease we lead by, and not of one that `lead` uses."""
        match error:
            case LeaseLost():
                return error.facts.get("lease") == self._name
            case StaleFence():
                stale = error.facts.get("leases")
                return isinstance(stale, list) and self._name in stale

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("leader_failed", lease=self._name, error=type(error).__name__)
