"""Keeping the books: what one replica does for all, again and again.

- *look*, every second, or when a booking met an unseeded show: managed shows that Redis does not have are seeded; where
  the fence lags, all limits are sent;
- *recompute*, `accounting.recompute_interval_seconds`: tokens against rows, counters against tokens; the five tables of
  managed shows from `SUM(proc)`; and, as often, graves that are needless go. At once after a seeding, since rows may
  have gone while they were counted, and after an election, since the leader before may have died between the COMMIT of
  a release in PostgreSQL and its release in Redis;
- *limits*, `accounting.limit_reseed_interval_seconds`: all limits to Redis; shows that are no longer managed go there;
- *pay*, twice a second and in every replica: releases that Redis was not told of while it was away, and those whose
  reply from PostgreSQL was lost;
- *recalculate*, `accounting.recalculate_subs_interval`: the five tables of unmanaged shows from `SUM(proc)`.

One replica does it, under a lease. Should two believe that they do, nothing breaks: every step asks for the mark or the
fence it belongs to. A server that is away ends a round, not the loop; the next round begins from what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

import structlog

from rota.accounting import allocations
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile, seeding
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.service import DELETED_SHOW_FENCE, AccountingService
from rota.infra.asyncio_cancel import cancellable
from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.redis.keys import ACCT_SHOW
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import Unavailable
from rota.model.ids import ShowId
from rota.model.settings.accounting import AccountingSettings

log = structlog.get_logger(__name__)

ROUND_SECONDS = metrics.histogram("rota_accounting_reseed_seconds", "How long one round took.", labels=("loop",))
LAST_SUCCESS = metrics.gauge(
    "rota_accounting_reseed_last_success", "When a round last ended well, Unix time.", labels=("loop",)
)
FENCE = metrics.gauge("rota_accounting_fence", "Fence of a managed show.", labels=("show",))
UNSEEDED = metrics.gauge("rota_accounting_shows_unseeded", "Managed shows that cannot be booked at the last look.")
TOMBSTONES = metrics.gauge("rota_accounting_graves", "Graves of released tokens at the last round, all shows.")

POLL_INTERVAL_S: Final = 1.0
READY_POLL_INTERVAL_S: Final = 0.05
FLUSH_INTERVAL_S: Final = 0.5
TOMBSTONES_MAX: Final = 100_000
"""Beyond this many graves of one fence the fence of a show rises, which makes them needless."""
PRUNES_PER_ROUND: Final = 100


class AccountingMaintenance:
    """A service for every replica; the leader among them works."""

    def __init__(
        self,
        books: AccountingService,
        leases: Leases,
        wanted: AccountingSettings,
        *,
        grace_s: float = 10.0,
        rest: float = 4.0,
    ) -> None:
        self.books = books
        self.wanted = wanted
        self.grace_s = grace_s
        self.rest = rest
        self.leadership = Leadership(leases, "accounting", self._lead, kind="accounting")
        self._recount_due = asyncio.Event()
        """Set when a show was seeded, or this replica was elected, and nothing was recounted since."""

    async def run(self, life: Lifecycle) -> None:
        """Ready once every managed show can be booked, whoever saw to it."""
        await self.books.check_publishing()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.leadership.serve(life))
            paying = tasks.create_task(self._flush_loop())
            while not await self.all_seeded() and await life.pause(READY_POLL_INTERVAL_S):
                pass
            life.ready()
            await life.until_draining()
            paying.cancel()

    async def _flush_loop(self) -> None:
        """In every replica: each owes what it could not tell."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.books.publisher.flush_pending()
            with contextlib.suppress(Unavailable):
                await self.books.resolve_unknown_commits()

    async def all_seeded(self) -> bool:
        return not await self.lagging_shows() if self.books.live else True

    async def lagging_shows(self) -> dict[ShowId, live_reader.ShowState]:
        """Managed shows that Redis does not book under the fence they have, and what it knows of them."""
        assert self.books.live is not None
        shows = await self.books.managed_shows()
        keys = [self.books.live.keys.show_keys(str(show)) for show in shows]
        found = await live_reader.show_states(self.books.live.client, keys)
        lag = {show: each for (show, fence), each in zip(shows.items(), found, strict=True) if each.fence != fence}
        UNSEEDED.set(len(lag))
        return lag

    async def _lead(self, lease: Lease) -> None:
        del lease
        wanted = self.wanted
        self._recount_due.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_run_every(wanted.recalculate_subs_interval, "recalculate", self.recalculate))
            tasks.create_task(_run_every(wanted.recompute_interval_seconds, "graves", self.prune_tombstones))
            if self.books.live:
                tasks.create_task(self._seed_loop())
                tasks.create_task(
                    _run_every(wanted.recompute_interval_seconds, "recompute", self.recompute, soon=self._recount_due)
                )
                tasks.create_task(_run_every(wanted.limit_reseed_interval_seconds, "limits", self.reseed_limits))

    async def _seed_loop(self) -> None:
        while True:
            self.books.unseeded.clear()
            await _run_round("look", self.seed_lagging_shows)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self.books.unseeded.wait()

    async def seed_lagging_shows(self) -> None:
        """Seed what Redis does not have, and send limits to where the fence lags.

        The recount after a seeding is left to the next round of `recompute`: in its grace all other shows would wait.
        """
        assert self.books.live is not None
        for show, found in (await self.lagging_shows()).items():
            away = found.fence is None or await self._exceeds_postgres_fence(show, found.fence)
            if (away or not await self.books.live.sync_limits(show)) and await seeding.seed(self.books.live, show):
                self._recount_due.set()

    async def _exceeds_postgres_fence(self, show: ShowId, fence: int) -> bool:
        """Whether a fence found in Redis lies above that of PostgreSQL, read after it: then it came from elsewhere."""
        return fence > (await self.books.managed_shows()).get(show, fence)

    async def recompute(self) -> None:
        """Redis and the five tables of every managed show, from rows. Shows are scanned one after the other."""
        assert self.books.live is not None
        turn = asyncio.Semaphore(1)
        async with asyncio.TaskGroup() as tasks:
            counts = [
                tasks.create_task(self._recompute(self.books.live, show, turn))
                for show in await self.books.managed_shows()
            ]
        reconcile.LIVE_TOKENS.set(sum(task.result() for task in counts))

    async def _recompute(self, live: LiveLedger, show: ShowId, turn: asyncio.Semaphore) -> int:
        found = None
        for _ in range(1 + self.wanted.cas_max_retries):
            found = await reconcile.reconcile_show(live, show, grace_s=self.grace_s, rest=self.rest, turn=turn)
            if found is not None:
                break
        await self.books.transactional.refresh_managed_tables(show)
        return found.tokens if found else 0

    async def prune_tombstones(self) -> None:
        """Raise the fence of shows with many graves, and remove those that a higher fence made needless."""
        graves = await allocations.count_tombstones(self.books.database)
        TOMBSTONES.set(sum(graves.values()))
        for show, number in graves.items():
            if number > TOMBSTONES_MAX:
                await self.books.raise_fence(show)
        for _ in range(PRUNES_PER_ROUND):
            if not await allocations.prune_tombstones(self.books.database):
                return

    async def reseed_limits(self) -> None:
        assert self.books.live is not None
        # Listed first: a show that is made in between must not be taken for one that was deleted.
        in_redis = await self._shows_in_redis(self.books.live)
        shows = {show.id: show for show in await self.books.admin.shows()}
        for show in shows.values():
            if show.managed:
                FENCE.labels(show.name).set(show.fence)
                await self.books.live.sync_limits(show.id)
        for known in in_redis:
            if known not in shows or not shows[known].managed:
                fence = shows[known].fence if known in shows else DELETED_SHOW_FENCE
                await seeding.drop_show(self.books.live, known, fence)

    async def _shows_in_redis(self, live: LiveLedger) -> list[ShowId]:
        """Shows that Redis knows anything of."""
        keys = await live_reader.scan_keys(live.client, live.keys, ACCT_SHOW)
        ids = [live.keys.parse(ACCT_SHOW, key)["show"] for key in keys]
        return [ShowId(UUID(each)) for each in ids if live_reader.is_uuid(each)]

    async def recalculate(self) -> None:
        for show, levels in (await self.books.transactional.recompute_all()).items():
            log.warning("tables_mended", show=str(show), **{str(level): number for level, number in levels.items()})


async def _run_every(
    interval_s: float, loop: str, work: Callable[[], Awaitable[None]], soon: asyncio.Event | None = None
) -> None:
    """Rounds of work: the first after one interval, since the leader before has just done the same, or when it is due
    `soon`. A round that was due soon and failed is tried again in a moment."""
    soon = soon or asyncio.Event()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await soon.wait()
        was_due = soon.is_set()
        soon.clear()
        if not await _run_round(loop, work) and was_due:
            await asyncio.sleep(POLL_INTERVAL_S)
            soon.set()


async def _run_round(loop: str, work: Callable[[], Awaitable[None]]) -> bool:
    """Run `work` once; False when PostgreSQL or Redis was unavailable."""
    began = time.monotonic()
    failed = None
    try:
        with cancellable():  # a TaskGroup whose task fails while it is cancelled itself raises the failure alone
            await work()
    except* Unavailable as away:
        failed = str(away.exceptions[0])
    if failed:
        log.warning("books_round_failed", loop=loop, why=failed)
        return False
    ROUND_SECONDS.labels(loop).observe(time.monotonic() - began)
    LAST_SUCCESS.labels(loop).set_to_current_time()
    return True
