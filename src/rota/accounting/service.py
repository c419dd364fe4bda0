"""Accounting of all shows: routes bookings to the ledger of a show and publishes changes to Redis.

The managed flags of shows are cached for `accounting.managed_shows_ttl`; changes made in this process update the cache
immediately. A stale entry costs one round trip and nothing else: the ledgers check the flag under the show lock and
decline a show that is not theirs, and then the other ledger is tried.

Releases need no cache: the deletion of rows returns the flag.

A process without Redis (`accounting.redis.enabled=false`) books unmanaged shows, declines managed ones and releases
both; Redis learns of its releases of managed shows at the next reconciliation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

import structlog
from redis.asyncio import Redis

from rota.accounting import allocations, show_isolation
from rota.accounting.admin import QuotaAdmin
from rota.accounting.ledger import (
    BookingBatch,
    BookingOutcome,
    DeclineReason,
    ReleasedTokens,
    merge_outcomes,
    record_outcomes,
    retryable_groups,
)
from rota.accounting.live import reader as live_reader
from rota.accounting.live.ledger import LiveLedger, outcomes_from_rows
from rota.accounting.live.release_publisher import MISCONFIGURED, NullReleasePublisher, ReleasePublisher
from rota.accounting.live.seeding import drop_show, seed
from rota.accounting.resources import QuotaChange, Show
from rota.accounting.suspected_shows import SuspectedShows
from rota.accounting.transactional import TransactionalLedger
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, query
from rota.infra.redis import RedisKeys
from rota.model.errors import PostgresUnavailable, RedisUnavailable, ScriptFailed, Unavailable
from rota.model.ids import ShowId

log = structlog.get_logger(__name__)

MANAGED_SHOWS = query(__package__, "shows_managed")
NOTIFY_LIMITS = query(__package__, "limits_told")
UNKNOWN_COMMIT_DELAY_S: Final = 2.0
"""Grace before resolving an unknown commit outcome: by then the transaction has usually ended."""
UNKNOWN_COMMITS_MAX: Final = 1000
SEEDED_ELSEWHERE_WITHIN_S: Final = 20.0
SEEDED_POLL_INTERVAL_S: Final = 0.05
DELETED_SHOW_FENCE: Final = 2**52
"""The fence of deleted shows, above all others."""
_WRONG_LEDGER = frozenset({DeclineReason.MANAGED, DeclineReason.NOT_MANAGED})


class AccountingService:
    def __init__(
        self,
        database: Database,
        client: Redis | None,
        keys: RedisKeys | None = None,
        *,
        remember_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.admin = QuotaAdmin(database, clock)
        self.transactional = TransactionalLedger(database)
        self.live = LiveLedger(database, client, keys or RedisKeys(), self._request_seeding) if client else None
        self.publisher: ReleasePublisher = self.live.publisher if self.live else NullReleasePublisher()
        self.unseeded = asyncio.Event()
        """Set when a booking found a managed show that is not seeded in Redis."""
        self.releases_doubted = asyncio.Event()
        """Set when frames may have ended in PostgreSQL and not in Redis."""
        self.server_left = False
        """Another server may have died between the two: any show may be concerned."""
        self.suspected: set[ShowId] = set()
        """Shows whose count in Redis is to be compared with PostgreSQL."""
        self.limits_doubted = asyncio.Event()
        """Set when limits may have changed in PostgreSQL and not in Redis."""
        self._doubted_limits: set[ShowId] | None = set()
        """Shows of these limits; None: any."""
        self._suspected_shows = SuspectedShows()
        self._clock = clock or SystemClock()
        self.locked_shows = show_isolation.LockedShows(self._clock)
        self._remember_s = remember_s
        self._managed: dict[ShowId, bool] = {}
        self._read_at_s = float("-inf")
        self._unknown_commits: deque[tuple[float, Sequence[int]]] = deque(maxlen=UNKNOWN_COMMITS_MAX)
        """Request time and tokens of releases with an unknown commit outcome, oldest first."""

    async def book(self, show: ShowId, groups: BookingBatch, *, force: bool = False) -> list[BookingOutcome]:
        outcomes = await self._book(show, groups, force=force, managed=await self.is_managed(show))
        misrouted = retryable_groups(groups, outcomes, _WRONG_LEDGER)
        if misrouted:
            await self._refresh_managed()
            managed = self._managed.get(show, False)
            again = await self._book(show, list(misrouted.values()), force=force, managed=managed)
            for at, outcome in zip(misrouted, again, strict=True):
                outcomes[at] = merge_outcomes(outcomes[at], outcome, _WRONG_LEDGER)
        return outcomes

    async def confirm_unbooked(
        self, show: ShowId, groups: BookingBatch, outcomes: Sequence[BookingOutcome], *, in_doubt: bool
    ) -> list[BookingOutcome]:
        """The outcomes after a call of `book` that failed; what they do not call booked is not booked.

        A failed call may have booked some of its tokens before it failed. `in_doubt`: a reply was lost, so PostgreSQL
        may still be working on the call, or Redis may count tokens that have no row. Tokens without a row are
        tombstoned then: none can get one later, when its frame has been given back and runs under another token, and
        Redis releases them.
        """
        booked = {token for outcome in outcomes for token in outcome.all_booked}
        for group, outcome in zip(groups, outcomes, strict=True):
            for carrier, followers in group.series.items():
                if carrier in booked:
                    booked.update(token for token in followers.tokens if token not in outcome.declined)
        unbooked = [
            token for group in groups for token in (*group.tokens, *group.follower_tokens()) if token not in booked
        ]
        if not unbooked:
            return list(outcomes)
        if in_doubt:
            tombstoned = await allocations.tombstone(self.database, show, unbooked)
            late = set(unbooked) - tombstoned
            await self.release_barred(sorted(tombstoned))
        else:
            late = set(await allocations.tokens(self.database, show, min(unbooked), max(unbooked)))
        return [outcome.with_rows(late) for outcome in outcomes] if late else list(outcomes)

    async def bar_unbooked(self, tokens: Sequence[int]) -> set[int]:
        """Tombstone tokens of a dispatcher that is gone, in all shows, because a claim does not name the show of its
        frames. Returns those without a proc row, which can never get one; Redis releases those that it alone counts."""
        unbooked = set(tokens)
        for show in await self.admin.shows():
            unbooked = await allocations.tombstone(self.database, show.id, sorted(unbooked)) if unbooked else unbooked
        await self.release_barred(sorted(unbooked))
        return unbooked

    async def release_barred(self, tokens: Sequence[int]) -> None:
        """Release tombstoned tokens that only Redis may count; if it is unavailable, as soon as it is back."""
        try:
            await self.release_tombstoned(tokens)
        except Unavailable as error:
            log.warning("token_release_deferred", tokens=len(tokens), reason=error.sentence)
            self.add_unknown_commit(tokens)

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[ReleasedTokens]:
        """Release in a separate transaction. Callers that delete rows in their own call `publisher` after the
        commit."""
        deleted = await allocations.delete(self.database, show, tokens)
        await self.publisher.publish(show, deleted)
        return list(deleted.released)

    def add_unknown_commit(self, tokens: Sequence[int]) -> None:
        """Note that the outcome of a transaction that deletes the rows of these tokens is unknown.

        If it committed, the tokens are tombstoned and `resolve_unknown_commits` releases them in Redis; the
        reconciliation releases the rest."""
        if self.live:
            self._unknown_commits.append((self._clock.monotonic(), tokens))

    async def resolve_unknown_commits(self) -> None:
        """Resolve outcomes that are old enough. Raises `Unavailable` and keeps the unresolved ones."""
        while self._unknown_commits and self._clock.monotonic() - self._unknown_commits[0][0] >= UNKNOWN_COMMIT_DELAY_S:
            oldest = self._unknown_commits[0]
            for show in await self.release_tombstoned(oldest[1]):
                # The last frame of a series ends its carrier with it, which had ended before and is not among these.
                self._suspect(show)
            if self._unknown_commits and self._unknown_commits[0] is oldest:
                self._unknown_commits.popleft()

    async def release_tombstoned(self, tokens: Sequence[int]) -> list[ShowId]:
        """Release in Redis those of the tokens that are tombstoned, in every managed show; returns shows that have
        any."""
        if self.live is None or not tokens:
            return []
        shows: list[ShowId] = []
        for show, fence in (await self.managed_shows()).items():
            tombstoned = await allocations.tombstoned(self.database, show, tokens)
            if not tombstoned:
                continue
            shows.append(show)
            try:
                await self.live.release_tombstoned(show, fence, tombstoned)
            except ScriptFailed as error:
                log.warning(
                    "tombstoned_release_failed",
                    show=str(show),
                    code=error.code,
                    remedy="the next reconciliation repairs it",
                )
        return shows

    def note_server_left(self) -> None:
        """Another server may have died, perhaps between the end of frames, or a change of limits, in PostgreSQL and in
        Redis."""
        self.server_left = True
        self.releases_doubted.set()
        self.doubt_limits()

    def doubt_limits(self, shows: Collection[ShowId] | None = None) -> None:
        """Limits of these shows, or of any, may be in PostgreSQL and not in Redis: they are pushed again at once."""
        if self.live is None:
            return
        known = self._doubted_limits
        self._doubted_limits = None if shows is None or known is None else known.union(shows)
        self.limits_doubted.set()

    async def push_doubted_limits(self) -> None:
        """Push limits that may not be in Redis. Raises `Unavailable` and keeps the doubt."""
        self.limits_doubted.clear()
        shows, self._doubted_limits = self._doubted_limits, set()
        try:
            managed = await self.managed_shows()
            await show_isolation.for_each(
                [show for show in managed if shows is None or show in shows], self._sync_limits
            )
        except BaseException:
            self.doubt_limits(shows)
            raise

    async def _sync_limits(self, show: ShowId) -> int:
        assert self.live is not None
        try:
            if not await self.live.sync_limits(show):
                self._request_seeding(show)
        except ScriptFailed as error:
            log.warning("limit_push_failed", show=str(show), code=error.code, remedy="the accounting leader repeats it")
            return 0
        await self.database.run(NOTIFY_LIMITS, f"pushed:{show}")
        return 1

    def limit_refused(self, show: ShowId) -> None:
        """A limit that frames share refused a booking: if this goes on, Redis may count too much."""
        if self.live is not None and self._suspected_shows.refused(show, self._clock.monotonic()):
            self._suspect(show)

    async def release_lost(self, only: Collection[ShowId] | None = None) -> int:
        """Release tokens in Redis whose frames ended in PostgreSQL, in these or all managed shows; returns how many.

        A server that died in between has left them; its frames cannot be told from running ones by Redis alone. Every
        step is safe beside bookings and releases of others, because both are idempotent by token.
        """
        live = self.live
        if live is None:
            return 0

        async def release(show: ShowId) -> int:
            started = self._clock.monotonic()
            keys, lost, unbooked = live.keys.show_keys(str(show)), 0, set[int]()
            for numbers in live_reader.chunked(await live_reader.buckets(live.client, keys)):
                held = await live_reader.held_tokens(live.client, keys, numbers)
                tombstoned = await allocations.tombstoned(self.database, show, held) if held else set()
                if only is not None and held:
                    rowless = set(held) - tombstoned - await self._tokens_with_rows(show, held)
                    unbooked |= rowless
                    barred = self._suspected_shows.rowless_before(show, rowless, self._clock.monotonic())
                    tombstoned |= await allocations.tombstone(self.database, show, barred) if barred else set()
                try:
                    lost += await live.release_tombstoned(show, fences[show], tombstoned) if tombstoned else 0
                except ScriptFailed as error:
                    log.warning("lost_release_failed", show=str(show), code=error.code)
                    return lost
            now = self._clock.monotonic()
            self._suspected_shows.compared(show, now - started, now)
            self.suspected.discard(show)
            again_s = self._suspected_shows.set_rowless(show, unbooked, now - started, now)
            if again_s is not None:
                asyncio.get_running_loop().call_later(again_s, self._suspect_again, show)
            if lost:
                log.warning("lost_releases_repaired", show=str(show), tokens=lost)
                await self.database.run(NOTIFY_LIMITS, f"released:{show}")
            return lost

        managed = await self.managed_shows()
        fences = {show: fence for show, fence in managed.items() if only is None or show in only}
        return await show_isolation.for_each(fences, release)

    async def _tokens_with_rows(self, show: ShowId, tokens: Collection[int]) -> set[int]:
        return set(await allocations.tokens(self.database, show, min(tokens), max(tokens)))

    def _suspect_again(self, show: ShowId) -> None:
        if self._suspected_shows.is_refused(show, self._clock.monotonic()):
            self._suspect(show)

    def _suspect(self, show: ShowId) -> None:
        self.suspected.add(show)
        self.releases_doubted.set()

    async def is_managed(self, show: ShowId) -> bool:
        if self._clock.monotonic() - self._read_at_s > self._remember_s:
            await self._refresh_managed()
        return self._managed.get(show, False)

    async def managed_shows(self) -> dict[ShowId, int]:
        """Managed shows and their current fences in PostgreSQL."""
        return {ShowId(row["pk_show"]): row["int_fence"] for row in await self.database.rows(MANAGED_SHOWS)}

    async def change(self, work: Callable[[QuotaAdmin], Awaitable[QuotaChange]]) -> QuotaChange:
        """Run a change of limits and push it to Redis after the commit; seeds a show that becomes managed.

        When Redis is unavailable the change stands, and is pushed as soon as Redis is back.
        """
        try:
            change = await work(self.admin)
        except (PostgresUnavailable, asyncio.CancelledError):
            self.doubt_limits()  # the change may have been committed
            raise
        self._cache_managed(change)
        try:
            await self._push_change(change)
        except RedisUnavailable as away:
            self._doubt_change(change)
            log.warning(
                "limit_push_failed", kind=change.kind, why=away.sentence, remedy="pushed again when Redis is available"
            )
            return change
        except BaseException:
            self._doubt_change(change)
            raise
        if self.live is not None and change.show is not None and change.show.managed:
            # Bookers that saw the commit but asked Redis before this push were refused: notify them to retry.
            with suppress(PostgresUnavailable):
                await self.database.run(NOTIFY_LIMITS, f"pushed:{change.show.id}")
        return change

    async def raise_fence(self, show: ShowId) -> None:
        """Invalidate every booking in flight; repeated bookings are accepted under the new fence."""
        fence = await self.admin.raise_fence(show)
        if self.live:
            await self.live.push_change(show, raised=fence)

    async def push_limits(self, show: ShowId) -> None:
        """Sync the limits in Redis with PostgreSQL; if Redis is unavailable, as soon as it is back."""
        if self.live is not None and await self.is_managed(show):
            try:
                await self.live.sync_limits(show)
            except BaseException as error:
                self.doubt_limits([show])
                if not isinstance(error, RedisUnavailable):
                    raise

    async def check_publishing(self) -> bool:
        """Whether releases of managed shows reach Redis from this process; logs a warning if they do not."""
        shows = len(await self.managed_shows()) if self.live is None else 0
        MISCONFIGURED.set(1 if shows else 0)
        if shows:
            log.warning(
                "redis_publish_misconfigured",
                managed_shows=shows,
                problem="Managed shows exist, but this process does not publish releases to Redis: it counts too much.",
                remedy="set accounting.redis.enabled=true",
            )
        return not shows

    async def _book(self, show: ShowId, groups: BookingBatch, *, force: bool, managed: bool) -> list[BookingOutcome]:
        if not managed:
            return await self.transactional.book(show, groups, force=force)
        if self.live is None:
            outcomes = await outcomes_from_rows(self.database, show, groups, DeclineReason.REDIS_OFF)
            record_outcomes("live", outcomes)
            return outcomes
        return await self.live.book(show, groups, force=force)

    async def _refresh_managed(self) -> None:
        self._managed = dict.fromkeys(await self.managed_shows(), True)
        self._read_at_s = self._clock.monotonic()

    def _cache_managed(self, change: QuotaChange) -> None:
        if change.kind == "show" and isinstance(change.after, Show):
            self._managed[change.after.id] = change.after.managed

    def _doubt_change(self, change: QuotaChange) -> None:
        self.doubt_limits(None if change.show is None else [change.show.id])

    async def _push_change(self, change: QuotaChange) -> None:
        if self.live is None:
            return
        show = change.after if isinstance(change.after, Show) else change.before
        if not isinstance(show, Show):
            if change.show and change.show.managed:
                await self.live.push_change(change.show.id, change)
        elif change.after is None:
            await drop_show(self.live, show.id, DELETED_SHOW_FENCE)
        elif not show.managed:
            await drop_show(self.live, show.id, show.fence)
        elif change.action in ("create", "set_managed"):
            await self._seed(show)

    async def _seed(self, show: Show) -> None:
        """Seed the show unless it is seeded under its current fence: then the change was a no-op. Returns when Redis
        keeps its accounts, also if another process seeds it."""
        assert self.live is not None
        if await self.live.is_seeded(show.id, show.fence) or await seed(self.live, show.id):
            return
        deadline = self._clock.monotonic() + SEEDED_ELSEWHERE_WITHIN_S
        while self._clock.monotonic() < deadline:
            fence = (await self.managed_shows()).get(show.id)
            if fence is None or await self.live.is_seeded(show.id, fence):
                return
            await self._clock.sleep(SEEDED_POLL_INTERVAL_S)
        log.warning("seeding_unfinished", show=str(show.id), remedy="the accounting leader finishes it")

    def _request_seeding(self, show: ShowId) -> None:
        del show
        self.unseeded.set()
