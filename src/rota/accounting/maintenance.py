"""Periodic accounting maintenance, by one elected replica for all.

- *look*, every second, or when a booking found an unseeded show: seeds managed shows that Redis lacks; where the fence
  in Redis lags, syncs all limits;
- *recompute*, `accounting.recompute_interval_seconds`: compares tokens with rows and counters with tokens; rewrites the
  five tables of managed shows from `SUM(proc)`; a separate step at the same interval prunes obsolete tombstones. Runs
  immediately after a seeding, since rows may have been deleted while they were counted, and after an election, since
  the previous leader may have died between the COMMIT of a release in PostgreSQL and its release in Redis;
- *limits*, `accounting.limit_reseed_interval_seconds`: syncs all limits to Redis; drops shows that are no longer
  managed;
- *changed_limits*, every second: copies limits that have changed in PostgreSQL to Redis, in case the process that
  changed them did not (`changed_limits`);
- *flush*, twice a second and in every replica: publishes releases that Redis missed while it was unavailable, and
  resolves those whose reply from PostgreSQL was lost;
- *release_lost*, in every replica at its start and when another one has fallen silent, without waiting for an election,
  and for a show that is refused for longer than a moment (`suspected_shows`): releases in Redis what has ended in
  PostgreSQL; the leader repeats it with *recompute*;
- *recalculate*, `accounting.recalculate_subs_interval`: rewrites the five tables of unmanaged shows from `SUM(proc)`.

A lease elects the leader. Two concurrent leaders break nothing: every step checks the marker or fence it belongs to. An
unavailable server fails a step, not the loop; the next try starts from the current state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import structlog

from rota.accounting import allocations, show_isolation
from rota.accounting.changed_limits import LIMITS_CHANNEL, ChangedLimits
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile, seeding
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.service import DELETED_SHOW_FENCE, AccountingService
from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.redis.keys import ACCT_SHOW
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import PostgresBusy, Unavailable
from rota.model.ids import ShowId
from rota.model.settings.accounting import AccountingSettings

log = structlog.get_logger(__name__)

ROUND_SECONDS = metrics.histogram(
    "rota_accounting_reseed_seconds", "Duration of one maintenance round.", labels=("loop",)
)
LAST_SUCCESS = metrics.gauge(
    "rota_accounting_reseed_last_success", "Time of the last successful round, Unix time.", labels=("loop",)
)
FENCE = metrics.gauge("rota_accounting_fence", "Fence of a managed show.", labels=("show",))
UNSEEDED = metrics.gauge("rota_accounting_shows_unseeded", "Managed shows that were not seeded at the last check.")
TOMBSTONES = metrics.gauge("rota_accounting_graves", "Tombstones of released tokens at the last round, all shows.")

POLL_INTERVAL_S: Final = 1.0
READY_POLL_INTERVAL_S: Final = 0.05
FLUSH_INTERVAL_S: Final = 0.5
RELEASE_RETRY_INTERVAL_S: Final = 1.0
TOMBSTONES_MAX: Final = 100_000
"""Maximum tombstones of one fence; beyond it the fence of the show is raised, which makes them obsolete."""


class AccountingMaintenance(LeaderLoop):
    """A service for every replica; only the elected leader runs the steps."""

    def __init__(
        self,
        accounting: AccountingService,
        leases: Leases,
        settings: AccountingSettings,
        *,
        grace_s: float = 10.0,
        rest: float = 4.0,
    ) -> None:
        super().__init__(leases, "accounting", kind="accounting", parallel=True)
        self.accounting = accounting
        self.settings = settings
        self.grace_s = grace_s
        self.rest = rest
        self._changed_limits = ChangedLimits()
        self._seeded = asyncio.Event()
        """A show was seeded since the last reconciliation."""

    async def run(self, life: Lifecycle) -> None:
        """Ready once every managed show is seeded, by this replica or another."""
        await self.accounting.check_publishing()
        with contextlib.suppress(Unavailable):  # the leader repeats it
            await self.accounting.release_lost()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.leadership.serve(life))
            loops = (
                self._flush_loop(),
                self._release_lost_loop(),
                self._doubted_limits_loop(),
                self._limit_changes_loop(),
            )
            beside = [tasks.create_task(loop) for loop in loops]
            while not await self.all_seeded() and await life.pause(READY_POLL_INTERVAL_S):
                pass
            life.ready()
            await life.until_draining()
            for task in beside:
                task.cancel()

    async def _flush_loop(self) -> None:
        """Runs in every replica: each holds its own unpublished releases."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.accounting.publisher.flush_pending()
            with contextlib.suppress(Unavailable):
                await self.accounting.resolve_unknown_commits()

    async def _release_lost_loop(self) -> None:
        """Runs in every replica: the leader may be the one that has died."""
        accounting = self.accounting
        while True:
            await accounting.releases_doubted.wait()
            accounting.releases_doubted.clear()
            everywhere, accounting.server_left = accounting.server_left, False
            shows, accounting.suspected = accounting.suspected, set()
            try:
                await accounting.release_lost(None if everywhere else shows)
            except Unavailable as error:
                log.warning("lost_release_deferred", reason=error.sentence)
                accounting.server_left |= everywhere
                accounting.suspected |= shows
                accounting.releases_doubted.set()
                await asyncio.sleep(RELEASE_RETRY_INTERVAL_S)

    async def _doubted_limits_loop(self) -> None:
        """Runs in every replica, as above."""
        while True:
            await self.accounting.limits_doubted.wait()
            try:
                await self.accounting.push_doubted_limits()
            except Unavailable as error:
                log.warning("limit_push_deferred", reason=error.sentence)
                await asyncio.sleep(RELEASE_RETRY_INTERVAL_S)

    async def _limit_changes_loop(self) -> None:
        """Runs in every replica, so that the next leader knows what has changed."""
        while True:
            with contextlib.suppress(Unavailable):
                async with self.accounting.database.listen(LIMITS_CHANNEL) as changes:
                    self.accounting.doubt_limits()  # an earlier process may have died between PostgreSQL and Redis
                    async for payload in changes:
                        if payload is None:  # some may have been missed
                            self.accounting.doubt_limits()
                        else:
                            self._changed_limits.notified(payload, self.leases.clock.monotonic())
            await asyncio.sleep(RELEASE_RETRY_INTERVAL_S)

    async def copy_changed_limits(self) -> None:
        if shows := self._changed_limits.take_due(self.leases.clock.monotonic()):
            self.accounting.doubt_limits(shows)

    async def all_seeded(self) -> bool:
        return not await self.lagging_shows() if self.accounting.live else True

    async def lagging_shows(self) -> dict[ShowId, live_reader.ShowState]:
        """Managed shows whose fence in Redis is not the current one, with their state in Redis."""
        assert self.accounting.live is not None
        shows = await self.accounting.managed_shows()
        keys = [self.accounting.live.keys.show_keys(str(show)) for show in shows]
        found = await live_reader.show_states(self.accounting.live.client, keys)
        lag = {show: each for (show, fence), each in zip(shows.items(), found, strict=True) if each.fence != fence}
        UNSEEDED.set(len(lag))
        return lag

    def begin_term(self, _lease: Lease) -> Sequence[LeaderStep]:
        settings, unseeded = self.settings, self.accounting.unseeded
        recompute_s, limits_s = settings.recompute_interval_seconds, settings.limit_reseed_interval_seconds
        # Without `at_once`: the previous leader has just run these.
        steps = [
            LeaderStep("recalculate", settings.recalculate_subs_interval, self.recalculate, at_once=False),
            LeaderStep("graves", recompute_s, self.prune_tombstones, at_once=False),
        ]
        if self.accounting.live:
            steps += [
                LeaderStep("look", POLL_INTERVAL_S, self.seed_lagging_shows, wake=unseeded),
                LeaderStep("release_lost", recompute_s, self.accounting.release_lost),
                LeaderStep("recompute", recompute_s, self.recompute, wake=self._seeded),
                LeaderStep("limits", limits_s, self.reseed_limits, at_once=False),
                LeaderStep("changed_limits", POLL_INTERVAL_S, self.copy_changed_limits),
            ]
        return steps

    def on_step_done(self, step: str, took_s: float) -> None:
        ROUND_SECONDS.labels(step).observe(took_s)
        LAST_SUCCESS.labels(step).set_to_current_time()

    def on_step_failed(self, step: str, error: Exception) -> None:
        log.warning("accounting_round_failed", loop=step, why=str(error))

    async def seed_lagging_shows(self) -> None:
        """Seed shows that Redis lacks and sync limits where the fence lags.

        The reconciliation after a seeding is left to the next `recompute` round: its grace would delay all other shows.
        """
        assert self.accounting.live is not None
        live, lagging = self.accounting.live, await self.lagging_shows()

        async def seed(show: ShowId) -> int:
            fence = lagging[show].fence
            missing = fence is None or await self._exceeds_postgres_fence(show, fence)
            if (missing or not await live.sync_limits(show)) and await seeding.seed(live, show):
                self._seeded.set()
            return 0

        await show_isolation.for_each(lagging, seed)

    async def _exceeds_postgres_fence(self, show: ShowId, fence: int) -> bool:
        """Whether a fence from Redis is above that of PostgreSQL, read after it: then PostgreSQL did not issue it."""
        return fence > (await self.accounting.managed_shows()).get(show, fence)

    async def recompute(self) -> None:
        """Reconcile Redis and the five tables of every managed show with `proc`. Shows are scanned one at a time."""
        assert self.accounting.live is not None
        scan_slot = asyncio.Semaphore(1)
        async with asyncio.TaskGroup() as tasks:
            counts = [
                tasks.create_task(self._recompute_or_busy(self.accounting.live, show, scan_slot))
                for show in await self.accounting.managed_shows()
            ]
        found = [task.result() for task in counts]
        if busy := [each for each in found if isinstance(each, PostgresBusy)]:
            raise busy[0]
        reconcile.LIVE_TOKENS.set(sum(each for each in found if isinstance(each, int)))

    async def _recompute_or_busy(
        self, live: LiveLedger, show: ShowId, scan_slot: asyncio.Semaphore
    ) -> int | PostgresBusy:
        """A locked show does not cancel the others."""
        try:
            return await self._recompute(live, show, scan_slot)
        except PostgresBusy as busy:
            return busy

    async def _recompute(self, live: LiveLedger, show: ShowId, scan_slot: asyncio.Semaphore) -> int:
        found = None
        for _ in range(1 + self.settings.cas_max_retries):
            found = await reconcile.reconcile_show(
                live, show, grace_s=self.grace_s, rest=self.rest, scan_slot=scan_slot
            )
            if found is not None:
                break
        await self.accounting.transactional.refresh_managed_tables(show)
        return found.tokens if found else 0

    async def prune_tombstones(self) -> None:
        """Raise the fence of shows with too many tombstones, and remove those that a higher fence made obsolete."""
        tombstones = await allocations.count_tombstones(self.accounting.database)
        TOMBSTONES.set(sum(tombstones.values()))
        too_many = [show for show, count in tombstones.items() if count > TOMBSTONES_MAX]
        with contextlib.suppress(PostgresBusy):  # a locked show is tried again in the next round
            await show_isolation.for_each(too_many, self._raise_fence)
        await allocations.prune_tombstones(self.accounting.database)

    async def _raise_fence(self, show: ShowId) -> int:
        await self.accounting.raise_fence(show)
        return 1

    async def reseed_limits(self) -> None:
        assert self.accounting.live is not None
        # List Redis first: a show created in between must not look like a deleted one.
        in_redis = await self._shows_in_redis(self.accounting.live)
        shows = {show.id: show for show in await self.accounting.admin.shows()}
        for show in shows.values():
            if show.managed:
                FENCE.labels(show.name).set(show.fence)
                await self.accounting.live.sync_limits(show.id)
        for show_id in in_redis:
            if show_id not in shows or not shows[show_id].managed:
                fence = shows[show_id].fence if show_id in shows else DELETED_SHOW_FENCE
                await seeding.drop_show(self.accounting.live, show_id, fence)

    async def _shows_in_redis(self, live: LiveLedger) -> list[ShowId]:
        """Shows with a state in Redis."""
        keys = await live_reader.scan_keys(live.client, live.keys, ACCT_SHOW)
        ids = [live.keys.parse(ACCT_SHOW, key)["show"] for key in keys]
        return [ShowId(UUID(each)) for each in ids if live_reader.is_uuid(each)]

    async def recalculate(self) -> None:
        for show, levels in (await self.accounting.transactional.recompute_all()).items():
            log.warning(
                "quota_tables_repaired", show=str(show), **{str(level): number for level, number in levels.items()}
            )
