"""The one replica that keeps what Redis shows of workflows in line with PostgreSQL, under a fenced lease.

Every `workflow.delay.poll_interval` it adds what Redis lacks: all of it after Redis was emptied (its own key is gone
then), otherwise the next part, and a larger one while there are fewer timers than rows. Every
`workflow.delay.cleanup_interval` it removes what has no row, and nothing else: however long overdue a timer is, it is
there until it has fired. Parts are small, so that nobody waits behind them. A leader that was paused and goes on writes
what was true then; the next pass mends it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

import structlog
from redis.exceptions import RedisError

from rota.infra import faults
from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.postgres.failures import FAILURES
from rota.infra.redis import Keys, guard
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import LeaseLost, PostgresUnavailable, RotaError, StaleFence
from rota.model.settings.lifecycle import DelayTimers
from rota.workflow.saga_mirror import SagaMirror
from rota.workflow.sagas import Sagas
from rota.workflow.timer_index import FIRST, TimerIndex

LEASE: Final = "rota:wf:delay:poller"
PARTS_MAX: Final = 100_000
PARTS_SHORT: Final = 20
"""Of one pass when timers are missing; the next goes on."""

log = structlog.get_logger(__name__)
ADDED = metrics.counter("rota_workflow_timers_added", "Timers that their index in Redis lacked.")
REMOVED = metrics.counter("rota_workflow_view_removed", "What Redis showed and was over, by view.", labels=("view",))
FAILED = metrics.counter("rota_workflow_poll_failures", "Passes of the poller that failed.", labels=("reason",))


class Poller:
    def __init__(
        self,
        leases: Leases,
        timers: TimerIndex,
        mirror: SagaMirror,
        sagas: Sagas,
        wanted: DelayTimers | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.timers = timers
        self.mirror = mirror
        self.sagas = sagas
        self.wanted = wanted or DelayTimers()
        self._clock = leases.clock
        self._key = (keys or Keys()).workflow_poller()
        self._leadership = Leadership(leases, LEASE, self.lead, kind="workflow_poller", ttl_s=self.wanted.lock_ttl)
        self._timer = FIRST
        self._saga = 0

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        await self._leadership.serve(life)

    async def lead(self, lease: Lease) -> None:
        """Until cancelled."""
        clean_at = self._clock.monotonic() + self.wanted.cleanup_interval
        try:
            while True:
                await self._try(self.fill, lease)
                if self._clock.monotonic() >= clean_at:
                    await self._try(self.clean, lease)
                    clean_at = self._clock.monotonic() + self.wanted.cleanup_interval
                await self._clock.sleep(self.wanted.poll_interval)
        finally:
            self.sagas.measured(0)

    async def fill(self, lease: Lease) -> None:
        """Have Redis show what it lacks."""
        await self.sagas.measure()
        with guard(self.timers.client):
            was_emptied = not await self.timers.client.exists(self._key)
        parts = PARTS_MAX if was_emptied else PARTS_SHORT if await self.timers.is_short() else 1
        await self._fill_timers(FIRST if was_emptied else self._timer, parts)
        await self._fill_sagas(0 if was_emptied else self._saga, PARTS_MAX if was_emptied else 1)
        await self.mirror.tell_rolling_back()
        await self._leave_word(lease)

    async def clean(self, _lease: Lease) -> None:
        """Remove what Redis shows and is over."""
        for view, each in (("timers", self.timers.clean), ("sagas", self.mirror.clean)):
            cursor = 0
            for _ in range(PARTS_MAX):
                gone, cursor = await each(cursor)
                REMOVED.labels(view).inc(gone)
                if cursor == 0:
                    break

    async def _leave_word(self, lease: Lease) -> None:
        """That all was shown at some time, and who sees to it; for as long as somebody does."""
        kept_s = max(self.wanted.lock_ttl, 3 * self.wanted.poll_interval)
        faults.at("lock.before_poller_word")
        with guard(self.timers.client):
            await self.timers.client.set(self._key, lease.fence, px=round(kept_s * 1000))
        faults.reply("lock.poller_word")

    async def _fill_timers(self, after: tuple[UUID, int, int], parts: int) -> None:
        self._timer = after
        for _ in range(parts):
            added, self._timer = await self.timers.fill(self._timer)
            ADDED.inc(added)
            if self._timer == FIRST:
                return

    async def _fill_sagas(self, after: int, parts: int) -> None:
        self._saga = after
        for _ in range(parts):
            self._saga = await self.mirror.fill(self._saga)
            if self._saga == 0:
                return

    async def _try(self, step: Callable[[Lease], Awaitable[None]], lease: Lease) -> None:
        """Whatever is wrong with Redis, and whoever else uses its keys: what it shows nobody needs."""
        try:
            await step(lease)
        except (PostgresUnavailable, LeaseLost, StaleFence):
            raise
        except (RotaError, RedisError, OSError, *FAILURES) as error:
            reason = error.code if isinstance(error, RotaError) else type(error).__name__
            FAILED.labels(reason).inc()
            log.warning("view_not_kept", step=getattr(step, "__name__", "step"), reason=reason)
