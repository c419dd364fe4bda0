"""Telling Redis what was released, once the deletion of its rows is committed.

A release that is not told, because Redis was away or we died, leaves tokens without rows: Redis counts too much, never
too little, until it is back and is told, or the next recount finds them in their graves. So nothing here fails the
caller. The same holds for what was booked in Redis and refused by PostgreSQL. A release is told with the show's fence
at the deletion, and is void under a higher one: by then the token may be somebody else's row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import structlog
from redis.asyncio import Redis

from rota.accounting.allocations import ProcDeleteResult
from rota.accounting.ledger import BookingBatch, BookingGroup, expand_single_frames
from rota.accounting.live import script_args
from rota.infra import failpoints
from rota.infra.redis import RedisKeys, script
from rota.infra.telemetry import metrics
from rota.model.errors import RedisUnavailable, ScriptFailed
from rota.model.ids import ShowId

log = structlog.get_logger(__name__)

FAILED = metrics.counter("rota_accounting_publish_failures", "Releases that Redis was not told of; a recount mends it.")
MISCONFIGURED = metrics.gauge(
    "rota_redis_publish_misconfigured",
    "1 while managed shows exist and this process does not tell Redis of releases (accounting.redis.enabled=false).",
)

PENDING_MAX: Final = 1000


class TokensReleasedReply(msgspec.Struct, frozen=True, tag="released"):
    tokens: int
    seq: int


class KeysRequiredReply(msgspec.Struct, frozen=True, tag="limited"):
    pass


class StaleFenceReply(msgspec.Struct, frozen=True, tag="stale"):
    pass


class ReleaseDamagedReply(msgspec.Struct, frozen=True, tag="damaged"):
    where: str


ReleaseReply = TokensReleasedReply | KeysRequiredReply | StaleFenceReply | ReleaseDamagedReply
RELEASE = script(
    __package__, "release", replies=TokensReleasedReply | KeysRequiredReply | StaleFenceReply | ReleaseDamagedReply
)


class _PendingRelease(msgspec.Struct, frozen=True):
    """With `booked`: given back, and booked under that fence; else released."""

    show: ShowId
    fence: int
    groups: BookingBatch
    booked: int = 0


class ReleasePublisher(Protocol):
    async def publish(self, show: ShowId, deleted: ProcDeleteResult) -> None:
        """After the commit. Never raises for Redis's sake."""
        ...

    async def flush_pending(self) -> bool:
        """Whether everything was told."""
        ...


class RedisReleasePublisher:
    def __init__(self, client: Redis, keys: RedisKeys) -> None:
        self.client = client
        self.keys = keys
        self._owed: deque[_PendingRelease] = deque(maxlen=PENDING_MAX)
        """What Redis was not told of because it was away, the oldest first."""

    async def publish(self, show: ShowId, deleted: ProcDeleteResult) -> None:
        if not deleted.managed or not deleted.frames:
            return
        failpoints.hit("publisher.before_release")
        await self._release_or_queue(_PendingRelease(show, deleted.fence, deleted.batch))

    async def flush_pending(self) -> bool:
        """Tell Redis what it was not told while it was away; False if it still is. Releases may be told twice.

        What is forgotten because we die, or because there is too much of it, is mended by the next recount.
        """
        while self._owed:
            oldest = self._owed[0]
            try:
                await self.release(oldest.show, oldest.fence, oldest.groups, booked=oldest.booked)
            except RedisUnavailable:
                return False
            except ScriptFailed as error:
                log.warning(
                    "release_not_published", show=str(oldest.show), code=error.code, remedy="the recount mends it"
                )
            if self._owed and self._owed[0] is oldest:
                self._owed.popleft()
        return True

    async def rollback_bookings(self, show: ShowId, fence: int, groups: BookingBatch) -> None:
        """Take out what was booked under `fence` and got no row. A higher fence by now is no hindrance: whoever booked
        the same token since did so under that one, and keeps it."""
        await self._release_or_queue(_PendingRelease(show, fence, groups, booked=fence))

    async def _release_or_queue(self, owed: _PendingRelease) -> None:
        try:
            await self.release(owed.show, owed.fence, owed.groups, booked=owed.booked)
        except (RedisUnavailable, ScriptFailed) as error:
            FAILED.inc(sum(len(group.tokens) for group in owed.groups))
            self._owed.append(owed)
            event = "booking_not_given_back" if owed.booked else "release_not_published"
            log.warning(event, show=str(owed.show), code=error.code, remedy="told when Redis is back")

    async def release(self, show: ShowId, fence: int, groups: BookingBatch, *, booked: int = 0) -> ReleaseReply:
        """Take tokens out of Redis, unless the show has a higher fence there. Raises what Redis fails with.

        With `booked` only those that were booked under that fence go, and the show may have a higher one. Jobs of one
        frame have no limits most of the time, so their places are sent only when Redis asks for them.
        """
        few = [0 if isinstance(group, BookingGroup) and len(group.tokens) > 1 else None for group in groups]
        reply = await self._send(show, fence, groups, few, booked)
        if isinstance(reply, KeysRequiredReply):
            each = expand_single_frames(groups)
            reply = await self._send(show, fence, each, [0] * len(each), booked)
        failpoints.after_send("publisher.release")
        if isinstance(reply, ReleaseDamagedReply):
            log.warning("books_damaged", show=str(show), key=reply.where, remedy="the show is seeded anew")
        return reply

    async def _send(
        self, show: ShowId, fence: int, groups: BookingBatch, must_know: Sequence[int | None], booked: int
    ) -> ReleaseReply:
        keys = self.keys.show_keys(str(show))
        wired = script_args.pack_arguments(keys, groups, must_know)
        return await RELEASE(
            self.client,
            seq=keys.seq,
            show=keys.show,
            index=keys.limits,
            charges=keys.charges,
            buckets=keys.buckets,
            shadow=keys.shadow,
            places=wired.places,
            show_id=str(show),
            fence=fence,
            booked=booked,
            freed=wired.packed,
        )


class NullReleasePublisher:
    """For processes without Redis: they release in PostgreSQL alone."""

    async def publish(self, show: ShowId, deleted: ProcDeleteResult) -> None:
        del show
        if deleted.managed and deleted.frames:
            MISCONFIGURED.set(1)

    async def flush_pending(self) -> bool:
        return True
