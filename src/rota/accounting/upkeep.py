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

from rota.accounting import procs
from rota.accounting.books import GONE, Books
from rota.accounting.live import recount, seeding, state
from rota.accounting.live.ledger import LiveLedger
from rota.infra.cancelling import cancellable
from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.redis.keys import ACCT_SHOW
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import Unavailable
from rota.model.ids import ShowId
from rota.model.settings.accounting import Accounting

log = structlog.get_logger(__name__)

TOOK = metrics.histogram("rota_accounting_reseed_seconds", "How long one round took.", labels=("loop",))
LAST = metrics.gauge(
    "rota_accounting_reseed_last_success", "When a round last ended well, Unix time.", labels=("loop",)
)
FENCE = metrics.gauge("rota_accounting_fence", "Fence of a managed show.", labels=("show",))
UNSEEDED = metrics.gauge("rota_accounting_shows_unseeded", "Managed shows that cannot be booked at the last look.")
GRAVES = metrics.gauge("rota_accounting_graves", "Graves of released tokens at the last round, all shows.")

LOOK_S: Final = 1.0
AWAIT_S: Final = 0.05
PAY_S: Final = 0.5
GRAVES_MAX: Final = 100_000
"""Beyond this many graves of one fence the fence of a show rises, which makes them needless."""
PRUNED_PER_ROUND: Final = 100


class Upkeep:
    """A service for every replica; the leader among them works."""

    def __init__(
        self, books: Books, leases: Leases, wanted: Accounting, *, grace_s: float = 10.0, rest: float = 4.0
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
            paying = tasks.create_task(self._pay())
            while not await self.all_seeded() and await life.pause(AWAIT_S):
                pass
            life.ready()
            await life.until_draining()
            paying.cancel()

    async def _pay(self) -> None:
        """In every replica: each owes what it could not tell."""
        while True:
            await asyncio.sleep(PAY_S)
            await self.books.publisher.pay()
            with contextlib.suppress(Unavailable):
                await self.books.settle()

    async def all_seeded(self) -> bool:
        return not await self.lagging() if self.books.live else True

    async def lagging(self) -> dict[ShowId, state.ShowState]:
        """Managed shows that Redis does not book under the fence they have, and what it knows of them."""
        assert self.books.live is not None
        shows = await self.books.managed()
        keys = [self.books.live.keys.of_show(str(show)) for show in shows]
        found = await state.show_states(self.books.live.client, keys)
        lag = {show: each for (show, fence), each in zip(shows.items(), found, strict=True) if each.fence != fence}
        UNSEEDED.set(len(lag))
        return lag

    async def _lead(self, lease: Lease) -> None:
        del lease
        wanted = self.wanted
        self._recount_due.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_every(wanted.recalculate_subs_interval, "recalculate", self.recalculate))
            tasks.create_task(_every(wanted.recompute_interval_seconds, "graves", self.tend_graves))
            if self.books.live:
                tasks.create_task(self._look_on())
                tasks.create_task(
                    _every(wanted.recompute_interval_seconds, "recompute", self.recompute, soon=self._recount_due)
                )
                tasks.create_task(_every(wanted.limit_reseed_interval_seconds, "limits", self.reseed_limits))

    async def _look_on(self) -> None:
        while True:
            self.books.unseeded.clear()
            await _round("look", self.look)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.books.unseeded.wait()

    async def look(self) -> None:
        """Seed what Redis does not have, and send limits to where the fence lags.

        The recount after a seeding is left to the next round of `recompute`: in its grace all other shows would wait.
        """
        assert self.books.live is not None
        for show, found in (await self.lagging()).items():
            away = found.fence is None or await self._is_above(show, found.fence)
            if (away or not await self.books.live.catch_up(show)) and await seeding.seed(self.books.live, show):
                self._recount_due.set()

    async def _is_above(self, show: ShowId, fence: int) -> bool:
        """Whether a fence found in Redis lies above that of PostgreSQL, read after it: then it came from elsewhere."""
        return fence > (await self.books.managed()).get(show, fence)

    async def recompute(self) -> None:
        """Redis and the five tables of every managed show, from rows. Shows are scanned one after the other."""
        assert self.books.live is not None
        turn = asyncio.Semaphore(1)
        async with asyncio.TaskGroup() as tasks:
            counts = [
                tasks.create_task(self._recompute(self.books.live, show, turn)) for show in await self.books.managed()
            ]
        recount.LIVE.set(sum(task.result() for task in counts))

    async def _recompute(self, live: LiveLedger, show: ShowId, turn: asyncio.Semaphore) -> int:
        found = None
        for _ in range(1 + self.wanted.cas_max_retries):
            found = await recount.recount(live, show, grace_s=self.grace_s, rest=self.rest, turn=turn)
            if found is not None:
                break
        await self.books.transactional.rewrite(show)
        return found.tokens if found else 0

    async def tend_graves(self) -> None:
        """Raise the fence of shows with many graves, and remove those that a higher fence made needless."""
        graves = await procs.graves(self.books.database)
        GRAVES.set(sum(graves.values()))
        for show, number in graves.items():
            if number > GRAVES_MAX:
                await self.books.raise_fence(show)
        for _ in range(PRUNED_PER_ROUND):
            if not await procs.prune_tombstones(self.books.database):
                return

    async def reseed_limits(self) -> None:
        assert self.books.live is not None
        # Listed first: a show that is made in between must not be taken for one that was deleted.
        in_redis = await self._known(self.books.live)
        shows = {show.id: show for show in await self.books.admin.shows()}
        for show in shows.values():
            if show.managed:
                FENCE.labels(show.name).set(show.fence)
                await self.books.live.catch_up(show.id)
        for known in in_redis:
            if known not in shows or not shows[known].managed:
                fence = shows[known].fence if known in shows else GONE
                await seeding.forget(self.books.live, known, fence)

    async def _known(self, live: LiveLedger) -> list[ShowId]:
        """Shows that Redis knows anything of."""
        keys = await state.keys_like(live.client, live.keys, ACCT_SHOW)
        ids = [live.keys.words(ACCT_SHOW, key)["show"] for key in keys]
        return [ShowId(UUID(each)) for each in ids if state.is_id(each)]

    async def recalculate(self) -> None:
        for show, levels in (await self.books.transactional.recompute_all()).items():
            log.warning("tables_mended", show=str(show), **{str(level): number for level, number in levels.items()})


async def _every(
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
        if not await _round(loop, work) and was_due:
            await asyncio.sleep(LOOK_S)
            soon.set()


async def _round(loop: str, work: Callable[[], Awaitable[None]]) -> bool:
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
    TOOK.labels(loop).observe(time.monotonic() - began)
    LAST.labels(loop).set_to_current_time()
    return True
