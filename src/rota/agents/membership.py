"""Membership of a process among those that run agents: one lease, from joining to leaving.

A heartbeat renews it, every run in PostgreSQL names it, and losing it cancels all runs. A body that ignores even that
takes the process down (`abandon`), because another member runs its agent from then on. After a lost lease the process
joins again, as a new member.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rota.agents.lease_watchdog import EventLoopWatchdog
from rota.agents.repository import MEMBER_LEASE_PREFIX
from rota.infra.clock import Clock, SystemClock
from rota.infra.lease import LeaseContext, Leases

LEASE_S: Final = 10.0


class AgentMembership:
    """Members of one `crowd` share agents; by default those that declare the same agents."""

    def __init__(
        self,
        leases: Leases,
        *,
        clock: Clock | None = None,
        crowd: str = "",
        lease_s: float = LEASE_S,
        abandon: Callable[[int], object] = os._exit,
    ) -> None:
        self.leases = leases
        self.clock = clock or SystemClock()
        self.abandon = abandon
        self._crowd = crowd
        self._lease_s = lease_s
        self._hold: LeaseContext | None = None

    def join(self, agents_crowd: str) -> LeaseContext:
        """The lease of a new member, to be entered; `agents_crowd` is the crowd of the declared agents."""
        crowd = self._crowd or agents_crowd
        name = f"{MEMBER_LEASE_PREFIX}{crowd}:{self.leases.owner}:{secrets.token_hex(4)}"
        self._hold = self.leases.hold(name, kind="agents", ttl_s=self._lease_s)
        return self._hold

    def lease_until(self) -> float:
        """Until when no other member runs our agents, by the monotonic clock of this machine."""
        return self._hold.valid_until if self._hold is not None else 0.0

    @contextmanager
    def watched_loop(self, busy: Callable[[], bool]) -> Iterator[None]:
        """Abandon the process if the event loop is blocked when the lease expires while `busy`."""
        loop = asyncio.get_running_loop()
        watchdog = EventLoopWatchdog(loop, self.clock, self.lease_until, busy, self.abandon)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.stop()
