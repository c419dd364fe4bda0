"""Reconciles the Redis mirror with PostgreSQL; one leader, under a fenced lease.

Every `workflow.delay.poll_interval` it adds missing entries: all of them after Redis was emptied (its own key is gone
then), otherwise the next page, and more pages while there are fewer timers than rows. Every
`workflow.delay.cleanup_interval` it removes entries without a row, and nothing else: an overdue timer stays until it
has fired. Pages are small, so that Redis is never blocked for long. A paused leader that wakes up writes old state; the
next pass repairs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from redis.exceptions import RedisError

from rota.infra import failpoints
from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.postgres.failures import FAILURES
from rota.infra.redis import RedisKeys, translate_errors
from rota.infra.service.supervisor import error_kind
from rota.infra.telemetry import metrics
from rota.model.errors import RotaError
from rota.model.settings.lifecycle import DelayTimersSettings
from rota.workflow.redis_mirror.sagas import SagaMirror
from rota.workflow.redis_mirror.timers import START_CURSOR, TimerMirror
from rota.workflow.sagas import Sagas

LEASE: Final = "rota:wf:delay:poller"
PAGES_MAX: Final = 100_000
CATCH_UP_PAGES_MAX: Final = 20
"""Per pass while timers are missing; the next pass goes on."""

log = structlog.get_logger(__name__)
ADDED = metrics.counter("rota_workflow_timers_added", "Timers that were missing in the Redis mirror.")
REMOVED = metrics.counter(
    "rota_workflow_view_removed", "Obsolete entries of the Redis mirror, by view.", labels=("view",)
)
PASS_FAILURES = metrics.counter("rota_workflow_poll_failures", "Passes of the poller that failed.", labels=("reason",))


class MirrorReconciler(LeaderLoop):
    def __init__(
        self,
        leases: Leases,
        timers: TimerMirror,
        mirror: SagaMirror,
        sagas: Sagas,
        settings: DelayTimersSettings | None = None,
        keys: RedisKeys | None = None,
    ) -> None:
        self.settings = settings or DelayTimersSettings()
        super().__init__(
            leases,
            LEASE,
            kind="workflow_poller",
            ttl_s=self.settings.lock_ttl,
            # Redis errors too, such as a key of another type: the mirror is not needed for anything.
            retried=(RotaError, RedisError, *FAILURES),
        )
        self.timers = timers
        self.mirror = mirror
        self.sagas = sagas
        self._key = (keys or RedisKeys()).workflow_poller()
        self._timer = START_CURSOR
        self._saga = 0

    def begin_term(self, lease: Lease) -> Sequence[LeaderStep]:
        return [
            LeaderStep("fill", self.settings.poll_interval, partial(self.fill, lease)),
            LeaderStep("clean", self.settings.cleanup_interval, self.clean, at_once=False),
        ]

    def end_term(self) -> None:
        self.sagas.set_active_gauge(0)

    def on_step_failed(self, step: str, error: Exception) -> None:
        reason = error_kind(error)
        PASS_FAILURES.labels(reason).inc()
        log.warning("redis_mirror_reconcile_failed", step=step, reason=reason)

    async def fill(self, lease: Lease) -> None:
        """Add missing entries."""
        await self.sagas.update_active_gauge()
        with translate_errors(self.timers.client):
            was_emptied = not await self.timers.client.exists(self._key)
        pages = PAGES_MAX if was_emptied else CATCH_UP_PAGES_MAX if await self.timers.is_incomplete() else 1
        await self._fill_timers(START_CURSOR if was_emptied else self._timer, pages)
        await self._fill_sagas(0 if was_emptied else self._saga, PAGES_MAX if was_emptied else 1)
        await self.mirror.publish_rolling_back()
        await self._write_leader_key(lease)

    async def clean(self) -> None:
        """Remove obsolete entries."""
        for view, each in (("timers", self.timers.clean), ("sagas", self.mirror.clean)):
            cursor = 0
            for _ in range(PAGES_MAX):
                removed, cursor = await each(cursor)
                REMOVED.labels(view).inc(removed)
                if cursor == 0:
                    break

    async def _write_leader_key(self, lease: Lease) -> None:
        """Marks the mirror as complete, with the leader's fence; expires when no leader renews it."""
        ttl_s = max(self.settings.lock_ttl, 3 * self.settings.poll_interval)
        failpoints.hit("lock.before_poller_word")
        with translate_errors(self.timers.client):
            await self.timers.client.set(self._key, lease.fence, px=round(ttl_s * 1000))
        failpoints.after_send("lock.poller_word")

    async def _fill_timers(self, after: tuple[UUID, int, int], pages: int) -> None:
        self._timer = after
        for _ in range(pages):
            added, self._timer = await self.timers.fill(self._timer)
            ADDED.inc(added)
            if self._timer == START_CURSOR:
                return

    async def _fill_sagas(self, after: int, pages: int) -> None:
        self._saga = after
        for _ in range(pages):
            self._saga = await self.mirror.fill(self._saga)
            if self._saga == 0:
                return
