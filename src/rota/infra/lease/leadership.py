"""Being the one replica that does a thing.

`Leadership` campaigns for a lease and runs `lead` while it has it. Losing the lease, or PostgreSQL, cancels `lead`;
then it campaigns again. `lead` is given the lease and guards its writes with it: for a moment two replicas may believe
that they lead, but only one of them can write. When `lead` returns or fails, the lease is given back, so that another
replica may do better; a failure is raised to whoever supervises us.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog

from rota.infra.lease.grant import Lease
from rota.infra.lease.leases import Leases
from rota.infra.postgres.failures import LOST
from rota.model.errors import LeaseHeld, LeaseLost, PostgresUnavailable, StaleFence

log = structlog.get_logger(__name__)

CAMPAIGN_S = 30.0


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
        pause_s: float = 1.0,
    ) -> None:
        self._leases = leases
        self._name = name
        self._lead = lead
        self._kind = kind
        self._ttl_s = ttl_s
        self._pause_s = pause_s
        self._task: asyncio.Task[None] | None = None
        self.elected = asyncio.Event()
        self.deposed = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Whether we believe so; only a guarded write knows."""
        return self.elected.is_set()

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self.run(), name=f"lead.{self._kind}")

    async def stop(self) -> None:
        """Stop leading or campaigning, so that the next may lead at once. Raises what `lead` failed with."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def run(self) -> None:
        """Campaign and lead until cancelled, or until `lead` fails."""
        while True:
            try:
                await self._term()
            except LeaseHeld:
                continue
            except (LeaseLost, StaleFence) as error:
                log.warning("leader_deposed", lease=self._name, code=error.code)
            except (PostgresUnavailable, *LOST) as error:
                log.warning("leader_campaign_failed", lease=self._name, error=type(error).__name__)
            await self._leases.clock.sleep(self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - keeps no secret

    async def _term(self) -> None:
        hold = self._leases.hold(self._name, kind=self._kind, ttl_s=self._ttl_s, wait_s=CAMPAIGN_S)
        async with hold as lease:
            self.deposed.clear()
            self.elected.set()
            log.info("leader_elected", lease=self._name, fence=lease.fence)
            try:
                await self._lead(lease)
            finally:
                self.elected.clear()
                self.deposed.set()
