"""Publishes releases to Redis after the deletion of their rows is committed.

A release that does not reach Redis, because Redis was unavailable or the process died, leaves tokens without rows:
Redis counts too much, never too little, until the release is resent or the next reconciliation finds the tombstones. So
failures here never fail the caller. The same holds for bookings in Redis that PostgreSQL refused. A release carries the
show's fence at the deletion and is void under a higher one: by then the token may belong to another row.
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

FAILED = metrics.counter(
    "rota_accounting_publish_failures", "Releases that failed to reach Redis; reconciliation repairs it."
)
MISCONFIGURED = metrics.gauge(
    "rota_redis_publish_misconfigured",
    "1 while managed shows exist and this process does not publish releases to Redis (accounting.redis.enabled=false).",
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
    """With `booked`: the rollback of a booking made under that fence; otherwise a release."""

    show: ShowId
    fence: int
    groups: BookingBatch
    booked: int = 0


class ReleasePublisher(Protocol):
    async def publish(self, show: ShowId, deleted: ProcDeleteResult) -> None:
        """Call after the commit. Never raises for errors of Redis."""
        ...

    async def flush_pending(self) -> bool:
        """Resend pending releases; whether none is left."""
        ...


class RedisReleasePublisher:
    def __init__(self, client: Redis, keys: RedisKeys) -> None:
        self.client = client
        self.keys = keys
        self._pending: deque[_PendingRelease] = deque(maxlen=PENDING_MAX)
        """Releases that did not reach Redis, oldest first."""

    async def publish(self, show: ShowId, deleted: ProcDeleteResult) -> None:
        if not deleted.managed or not deleted.frames:
            return
        failpoints.hit("publisher.before_release")
        await self._release_or_queue(_PendingRelease(show, deleted.fence, deleted.batch))

    async def flush_pending(self) -> bool:
        """Resend pending releases; False if Redis is still unavailable. A release may be sent twice.

        Releases lost by a crash or by overflow are repaired by the next reconciliation.
        """
        while self._pending:
            oldest = self._pending[0]
            try:
                await self.release(oldest.show, oldest.fence, oldest.groups, booked=oldest.booked)
            except RedisUnavailable:
                return False
            except ScriptFailed as error:
                log.warning(
                    "release_publish_failed",
                    show=str(oldest.show),
                    code=error.code,
                    remedy="the next reconciliation repairs it",
                )
            if self._pending and self._pending[0] is oldest:
                self._pending.popleft()
        return True

    async def rollback_bookings(self, show: ShowId, fence: int, groups: BookingBatch) -> None:
        """Release tokens that were booked under `fence` and got no row. A higher fence does not matter: a later booking
        of the same token carries that one and is kept."""
        await self._release_or_queue(_PendingRelease(show, fence, groups, booked=fence))

    async def _release_or_queue(self, pending: _PendingRelease) -> None:
        try:
            await self.release(pending.show, pending.fence, pending.groups, booked=pending.booked)
        except (RedisUnavailable, ScriptFailed) as error:
            FAILED.inc(sum(len(group.tokens) for group in pending.groups))
            self._pending.append(pending)
            event = "booking_rollback_failed" if pending.booked else "release_publish_failed"
            log.warning(event, show=str(pending.show), code=error.code, remedy="resent when Redis is available")

    async def release(self, show: ShowId, fence: int, groups: BookingBatch, *, booked: int = 0) -> ReleaseReply:
        """Release tokens in Redis, unless the show has a higher fence there. Raises the errors of Redis.

        With `booked` only tokens booked under that fence are released, and the show may have a higher one. Jobs of one
        frame rarely have limits, so their keys are sent only when Redis requires them.
        """
        must_know = [0 if isinstance(group, BookingGroup) and len(group.tokens) > 1 else None for group in groups]
        reply = await self._send(show, fence, groups, must_know, booked)
        if isinstance(reply, KeysRequiredReply):
            expanded = expand_single_frames(groups)
            reply = await self._send(show, fence, expanded, [0] * len(expanded), booked)
        failpoints.after_send("publisher.release")
        if isinstance(reply, ReleaseDamagedReply):
            log.warning("ledger_damaged", show=str(show), key=reply.where, remedy="the show is seeded again")
        return reply

    async def _send(
        self, show: ShowId, fence: int, groups: BookingBatch, must_know: Sequence[int | None], booked: int
    ) -> ReleaseReply:
        keys = self.keys.show_keys(str(show))
        packed = script_args.pack_arguments(keys, groups, must_know)
        return await RELEASE(
            self.client,
            seq=keys.seq,
            show=keys.show,
            index=keys.limits,
            charges=keys.charges,
            buckets=keys.buckets,
            shadow=keys.shadow,
            places=packed.places,
            show_id=str(show),
            fence=fence,
            booked=booked,
            freed=packed.packed,
        )


class NullReleasePublisher:
    """For processes without Redis: they release in PostgreSQL alone."""

    async def publish(self, show: ShowId, deleted: ProcDeleteResult) -> None:
        del show
        if deleted.managed and deleted.frames:
            MISCONFIGURED.set(1)

    async def flush_pending(self) -> bool:
        return True
