"""The one replica that keeps what Redis shows of workflows in line with PostgreSQL, under a fenced lease.

Every `workflow.delay.poll_interval` it adds what Redis lacks: all of it after Redis was emptied (its own key is gone
then, or there are fewer timers than rows), otherwise the next part. Every `workflow.delay.cleanup_interval` it removes
what has no row, and nothing else: however long overdue a timer is, it is there until it has fired. Parts are small, so
that nobody waits behind them. A leader that was paused and goes on writes what was true then; the next pass mends it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rota.infra import faults
from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.redis import Keys, guard
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import RedisUnavailable, ScriptFailed
from rota.model.settings.lifecycle import DelayTimers
from rota.workflow.saga_mirror import SagaMirror
from rota.workflow.sagas import Sagas
from rota.workflow.timer_index import FIRST, TimerIndex

LEASE: Final = "rota:wf:delay:poller"
PARTS_MAX: Final = 100_000
"""Of one pass; the next goes on."""

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
        was_emptied = await self._leave_word(lease)
        await self._fill_timers(whole=was_emptied or await self.timers.is_short())
        await self._fill_sagas(whole=was_emptied)
        await self.mirror.tell_rolling_back()

    async def clean(self, _lease: Lease) -> None:
        """Remove what Redis shows and is over."""
        for view, each in (("timers", self.timers.clean), ("sagas", self.mirror.clean)):
            cursor = 0
            for _ in range(PARTS_MAX):
                gone, cursor = await each(cursor)
                REMOVED.labels(view).inc(gone)
                if cursor == 0:
                    break

    async def _leave_word(self, lease: Lease) -> bool:
        """Show that somebody keeps the index; whether there was no such word."""
        kept_s = max(self.wanted.lock_ttl, 3 * self.wanted.poll_interval)
        faults.at("lock.before_poller_word")
        with guard(self.timers.client):
            before = await self.timers.client.set(self._key, lease.fence, px=round(kept_s * 1000), get=True)
        faults.reply("lock.poller_word")
        return before is None

    async def _fill_timers(self, *, whole: bool) -> None:
        self._timer = FIRST if whole else self._timer
        for _ in range(PARTS_MAX if whole else 1):
            added, self._timer = await self.timers.fill(self._timer)
            ADDED.inc(added)
            if self._timer == FIRST:
                return

    async def _fill_sagas(self, *, whole: bool) -> None:
        self._saga = 0 if whole else self._saga
        for _ in range(PARTS_MAX if whole else 1):
            self._saga = await self.mirror.fill(self._saga)
            if self._saga == 0:
                return

    async def _try(self, step: Callable[[Lease], Awaitable[None]], lease: Lease) -> None:
        """Redis may be away: what it shows then nobody reads."""
        try:
            await step(lease)
        except (RedisUnavailable, ScriptFailed, faults.LostReply) as error:
            reason = getattr(error, "code", type(error).__name__)
            FAILED.labels(reason).inc()
            log.warning("view_not_kept", step=getattr(step, "__name__", "step"), reason=reason)
