"""Periodic maintenance by one leader that bounds the storage: promote, fold, rotate, prune, carry over, orphans,
expiry.

Each step is one transaction that first checks the leader's fence, so a paused leader that wakes up writes nothing.
Frequent steps look first whether there is anything to do, with one read for the steps of a round. A crash between two
steps leaves the rest to the next leader, and every step is idempotent: one that meets a lock conflict is repeated. No
step blocks the queue (see `storage`). An open transaction can delay the reuse of slots; the log names its session.
Enqueueing, claiming and ending go on meanwhile, and pending deltas are still merged.

A dispatcher owns its claims until their frames are booked. When its lease has ended, its open tokens are passed to
`tombstone`, which returns those that it will never book: these are given back. The others are booked and belong to
their worker's lease. The owner row is deleted last, so that a leader that dies before leaves it to the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.postgres import Transaction, query
from rota.infra.telemetry import metrics
from rota.queue import metrics as queue_metrics
from rota.queue import storage, storage_report
from rota.queue.failed import REMOVE_MAX
from rota.queue.queue import Queue
from rota.queue.storage_report import MAINTENANCE_LEASE
from rota.queue.tokens import BATCH_MAX

EXPIRED_OWNERS = query(__package__, "owners_bury")
DELETE_OWNER = query(__package__, "owner_forget")

log = structlog.get_logger(__name__)

WARN_INTERVAL_S: Final = 30.0
PRUNABLE_INTERVAL_S: Final = 10.0
"""How often slots are looked at although nothing was folded, so that nothing can have ended."""
PROMOTIONS_MAX: Final = 32
EXPIRIES_MAX: Final = 32
CARRIES_MAX: Final = 32
"""Transactions of one step per round, so that the other steps get their share."""

STEPS = metrics.counter("rota_queue_upkeep", "Maintenance steps by outcome.", labels=("step", "outcome"))

TombstoneTokens = Callable[[Sequence[int]], Awaitable[set[int]]]
"""Takes tokens of a dead dispatcher and returns those that can never be booked any more."""


class MaintenanceIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of the steps, and limits of the ring."""

    promote_s: float = 0.25
    orphans_s: float = 0.25
    """Claims of a dispatcher that died wait for its lease, and then for this."""
    fold_s: float = 1.0
    measure_s: float = 5.0
    expire_s: float = 60.0
    slot_bytes: int = storage.SLOT_BYTES
    slot_age_s: float = storage.SLOT_AGE_S
    prune_delay_s: float = 5.0
    """How long ended frames of a slot are still known: their last logs arrive after their end."""
    failed_retention_s: float = 72 * 3600.0


class QueueMaintenance(LeaderLoop):
    def __init__(
        self, queue: Queue, leases: Leases, tombstone: TombstoneTokens, intervals: MaintenanceIntervals | None = None
    ) -> None:
        super().__init__(leases, MAINTENANCE_LEASE, kind="leader")
        self.queue = queue
        self.intervals = intervals or MaintenanceIntervals()
        self._tombstone = tombstone
        self._next_warning_at = 0.0
        self._ended_at: dict[int, float] = {}
        """By slot: when all its frames were first seen to have ended."""
        self._prunable_at = float("-inf")
        """When slots are looked at next; at once after a fold."""
        self._frames_due = storage.FramesDue(deferred=False, unowned=False)
        self._frames_read_at = float("-inf")
        self._storage_due = storage.StorageDue(deltas=False, rotation=False, counted=True)
        self._storage_read_at = float("-inf")

    def begin_term(self, lease: Lease) -> Sequence[LeaderStep]:
        self._prunable_at = self._frames_read_at = self._storage_read_at = float("-inf")
        every, collector = self.intervals, queue_metrics.MetricsCollector(self.queue, self.leases.clock)
        return [
            LeaderStep("promote", every.promote_s, partial(self._promote_due, lease)),
            LeaderStep("return_orphans", every.orphans_s, partial(self._return_silent, lease)),
            LeaderStep("fold", every.fold_s, partial(self._fold_waiting, lease)),
            LeaderStep("turn_ring", every.fold_s, partial(self._turn_ring_due, lease)),
            LeaderStep("measure", every.measure_s, collector.collect),
            LeaderStep("expire", every.expire_s, partial(self.expire, lease)),
            LeaderStep("shed", every.expire_s, partial(self.shed, lease)),
        ]

    def end_term(self) -> None:
        queue_metrics.clear_metrics()

    def on_step_failed(self, step: str, error: Exception) -> None:
        STEPS.labels(step, "busy").inc()
        log.warning("queue_maintenance_busy", step=step, reason=str(error))

    async def _read_frames_due(self) -> storage.FramesDue:
        """One statement for the steps of a round."""
        now, every = self.leases.clock.monotonic(), self.intervals
        if now - self._frames_read_at >= min(every.promote_s, every.orphans_s) / 2:
            self._frames_due, self._frames_read_at = await storage.frames_due(self.queue.database), now
        return self._frames_due

    async def _read_storage_due(self) -> storage.StorageDue:
        now, every = self.leases.clock.monotonic(), self.intervals
        if now - self._storage_read_at >= every.fold_s / 2:
            due = await storage.storage_due(self.queue.database, every.slot_bytes, every.slot_age_s)
            self._storage_due, self._storage_read_at = due, now
        return self._storage_due

    async def _promote_due(self, lease: Lease) -> None:
        if (await self._read_frames_due()).deferred:
            await self.promote(lease)

    async def _return_silent(self, lease: Lease) -> None:
        if (await self._read_frames_due()).unowned:
            await self.return_orphans(lease)

    async def _fold_waiting(self, lease: Lease) -> None:
        if (await self._read_storage_due()).deltas:
            await self.fold(lease)
            self._prunable_at = float("-inf")
        else:
            queue_metrics.FOLDED.set_to_current_time()

    async def _turn_ring_due(self, lease: Lease) -> None:
        due, now = await self._read_storage_due(), self.leases.clock.monotonic()
        if self._ended_at or not due.counted or now >= self._prunable_at:
            self._prunable_at = now + PRUNABLE_INTERVAL_S
            await self._prune_ended(lease)
        if due.rotation:
            await self._rotate(lease)
            self._prunable_at = float("-inf")

    async def promote(self, lease: Lease) -> int:
        """Promote everything that is due, in bounded steps."""
        promoted = 0
        for _ in range(PROMOTIONS_MAX):
            async with self._fenced_transaction(lease) as tx:
                number = await storage.promote(tx)
                failpoints.hit("queue.after_promote_before_commit")
            promoted += number
            if number < storage.PROMOTE_MAX:
                break
        return promoted

    async def fold(self, lease: Lease) -> list[storage.FoldResult]:
        pinning = await storage.pinning_sessions(self.queue.database)
        async with self._fenced_transaction(lease) as tx:
            folded = await storage.fold(tx, pinned=bool(pinning))
            failpoints.hit("queue.after_fold_before_commit")
        for each in folded:
            STEPS.labels("fold", each.done).inc()
        if not pinning:
            queue_metrics.FOLDED.set_to_current_time()
        return folded

    async def turn_ring(self, lease: Lease) -> str:
        """Prune slots that ended a while ago and open a new one if needed. Returns the outcome of the latter."""
        await self._prune_ended(lease)
        return await self._rotate(lease)

    async def _prune_ended(self, lease: Lease) -> None:
        now = self.leases.clock.monotonic()
        self._ended_at = {
            slot: self._ended_at.get(slot, now) for slot in await storage.prunable_slots(self.queue.database)
        }
        for slot, ended_at in self._ended_at.items():
            if now - ended_at < self.intervals.prune_delay_s:
                continue
            async with self._fenced_transaction(lease) as tx:
                pruned = await storage.prune(tx, slot)
                failpoints.hit("queue.after_prune_before_commit")
            STEPS.labels("prune", pruned).inc()

    async def _rotate(self, lease: Lease) -> str:
        async with self._fenced_transaction(lease) as tx:
            rotated = await storage.rotate(tx, self.intervals.slot_bytes, self.intervals.slot_age_s)
            failpoints.hit("queue.after_rotate_before_commit")
        STEPS.labels("rotate", rotated).inc()
        return await self._free_oldest_slot(lease) if rotated == "full" else rotated

    async def return_orphans(self, lease: Lease) -> int:
        """Give back claims of dead dispatchers that they will never book; returns the number of frames."""
        async with self._fenced_transaction(lease) as tx:
            dead = [row["owner"] for row in await tx.rows(EXPIRED_OWNERS)]
        returned = 0
        for owner in dead:
            tokens = await self.queue.open_tokens(owner)
            for first in range(0, len(tokens), BATCH_MAX):
                returned += await self._return_unbooked(lease, tokens[first : first + BATCH_MAX])
            failpoints.hit("queue.after_orphans_before_forget")
            async with self._fenced_transaction(lease) as tx:
                await tx.run(DELETE_OWNER, owner)
            log.warning("queue_owner_deleted", owner=owner, open=len(tokens), returned=returned)
        return returned

    async def expire(self, lease: Lease) -> int:
        """Delete failed frames past their retention, in bounded steps."""
        expired = 0
        for _ in range(EXPIRIES_MAX):
            async with self._fenced_transaction(lease) as tx:
                number = len(await self.queue.failed.expire(self.intervals.failed_retention_s, most=REMOVE_MAX, on=tx))
                failpoints.hit("queue.after_expire_before_commit")
            expired += number
            if number < REMOVE_MAX:
                break
        return expired

    async def shed(self, lease: Lease) -> None:
        """Delete ended rows among those carried out of the ring."""
        async with self._fenced_transaction(lease) as tx:
            await storage.purge_carried(tx)

    async def _return_unbooked(self, lease: Lease, tokens: Sequence[int]) -> int:
        tombstoned = await self._tombstone(tokens)
        failpoints.hit("queue.after_bury_before_return")
        async with self._fenced_transaction(lease) as tx:
            return (await self.queue.give_back(tombstoned, on=tx)).accepted

    async def _free_oldest_slot(self, lease: Lease) -> str:
        """Free the oldest slot for a new one: prune it, or carry its live entries out of the ring, part by part."""
        async with self._fenced_transaction(lease) as tx:
            pruned = await storage.prune(tx)
        if pruned != "live":
            return await self._record_outcome("prune", pruned)
        async with self._fenced_transaction(lease) as tx:
            await storage.purge_oldest(tx)
        carried: storage.CarryOutcome = "carrying"
        for _ in range(CARRIES_MAX):
            async with self._fenced_transaction(lease) as tx:
                carried = await storage.carry_over(tx)
                failpoints.hit("queue.after_carry_before_commit")
            if carried != "carrying":
                break
        return await self._record_outcome("carry", carried)

    async def _record_outcome(self, step: str, outcome: str) -> str:
        STEPS.labels(step, outcome).inc()
        now = self.leases.clock.monotonic()
        if outcome == "blocked" and now >= self._next_warning_at:
            self._next_warning_at = now + WARN_INTERVAL_S
            sessions = await storage_report.long_transactions(self.queue.database)
            log.warning(
                "queue_ring_full", outcome=outcome, sessions=[msgspec.structs.asdict(each) for each in sessions]
            )
        return outcome

    @asynccontextmanager
    async def _fenced_transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        async with self.queue.database.transaction() as tx:
            await self.leases.guard(tx, lease)
            yield tx
