"""The relay: publishes messages of the outbox to NATS.

    claim (lock) ─► publish the batch ─► delete the confirmed ─► COMMIT

One pass is one transaction, open no longer than a publish may take; none starts while NATS is disconnected. Without a
notification a pass looks first, with one read, whether there is a message. Any number of relays may run, in one process
or in several: each skips rows locked by another.

Crash cases:
- after the claim: the locks end with the transaction, and another relay claims the rows;
- after the publish, before COMMIT: the rows are published again under the same ids. Within the stream's dedup window
  NATS stores them once; later, or after NATS lost its data, twice. **Receivers must be idempotent**;
- a lost reply to COMMIT is the same case, and so is a pause: PostgreSQL ends the transaction of an idle relay.

Nothing is lost: a row leaves only after NATS confirmed its message, or to `outbox_parked` with a reason when NATS can
never accept it. Messages that NATS cannot accept *now* (no answer, a full stream) stay and are skipped, so that they do
not block the rest; every `RETRY_SKIPPED_EVERY`th pass retries them, so that they are not starved by the rest.

Order: a pass publishes in id order. Ids are assigned at insert, not at commit, and passes of several relays overlap, so
there is no order across transactions. Receivers that need one put a number into the message.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import SystemRandom

import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, BusMessage, PublishOutcome, PublishReceipt
from rota.infra.outbox.outbox import CHANNEL
from rota.infra.postgres import Database, Notifications, Record, Transaction, query
from rota.infra.service.lifecycle import Lifecycle
from rota.infra.service.supervisor import error_kind
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import Unavailable

log = structlog.get_logger(__name__)
MESSAGES_RELAYED = metrics.counter(
    "rota_outbox_relayed", "Messages of the outbox, by publish outcome.", labels=("outcome",)
)
DEPTH = metrics.gauge("rota_outbox_depth", "Messages waiting in the outbox; counted up to ten thousand.")
OLDEST_AGE = metrics.gauge("rota_outbox_oldest_age_seconds", "Age of the first message in the outbox.")
PARKED = metrics.gauge("rota_outbox_parked", "Messages parked because they can never be published.")

HAS_MESSAGES = query(__package__, "has_messages")
CLAIM = query(__package__, "claim")
REMOVE = query(__package__, "remove")
PARK = query(__package__, "park")
DEPTH_NOW = query(__package__, "depth")

BATCH_MAX = 512
BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Limit for one pass in memory and in flight; exceeded by at most one message."""
PAUSE_GRACE_S = 1.0
"""PostgreSQL ends the transaction of a relay that is idle for this long beyond its publish timeout."""
DEPTH_COUNT_MAX = 10_000
WARN_INTERVAL_S = 30.0
RETRY_BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
RETRY_SKIPPED_EVERY = 16
_jitter = SystemRandom().random


class RelayCounts(msgspec.Struct, frozen=True):
    """Messages of one pass, or of all passes, by outcome."""

    stored: int = 0
    duplicate: int = 0
    parked: int = 0
    unsettled: int = 0

    @property
    def claimed(self) -> int:
        return self.removed + self.unsettled

    @property
    def removed(self) -> int:
        """Messages that left the outbox."""
        return self.stored + self.duplicate + self.parked

    def __add__(self, other: RelayCounts) -> RelayCounts:
        return RelayCounts(
            self.stored + other.stored,
            self.duplicate + other.duplicate,
            self.parked + other.parked,
            self.unsettled + other.unsettled,
        )


class OutboxRelay:
    """Run it as `Service("outbox_relay", relay.run)`."""

    def __init__(
        self,
        database: Database,
        bus: Bus,
        *,
        batch: int = BATCH_MAX,
        poll_s: float = 1.0,
        measure_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        self.tally = RelayCounts()
        """Totals since the start."""
        self.drained = asyncio.Event()
        """Set while the last pass found an empty outbox."""
        self.stalled = asyncio.Event()
        """Set while NATS or PostgreSQL is unavailable."""
        self._database = database
        self._bus = bus
        self._batch = batch
        self._poll_s = poll_s
        self._measure_s = measure_s
        self._clock = clock or SystemClock()
        self._measure_at = self._clock.monotonic()
        self._warn_at = self._measure_at
        self._skipped_until = 0
        """Id after which the next pass starts: skipped messages lie before it. 0 when none was skipped."""
        self._retried_until = 0
        self._notified = True
        """Messages were announced since the last wait, or found."""
        self._passes = 0
        self._failures = 0

    async def run(self, lifecycle: Lifecycle) -> None:
        async with self._database.listen(CHANNEL) as notifications:
            lifecycle.ready()
            while not lifecycle.draining:
                await self._run_pass(lifecycle, notifications)

    async def _run_pass(self, lifecycle: Lifecycle, notifications: Notifications) -> None:
        """One pass, and the wait or back-off after it."""
        try:
            await self._update_gauges_when_due()
            counts = await self._relay_batch() if self._bus.connected else None
        except Unavailable as error:
            log.warning("outbox_pass_failed", code=error_kind(error), reason=str(error))
            counts = None
        if counts is None or (counts.unsettled and not counts.removed):
            await self._back_off(lifecycle)
        else:
            self._failures = 0
            self.stalled.clear()
            if not counts.claimed:
                await self._wait_for_messages(lifecycle, notifications)

    async def _relay_batch(self) -> RelayCounts:
        """Publish the next messages and delete the confirmed ones, in one transaction."""
        after = self._next_start()
        if not self._notified and not await self._database.value(HAS_MESSAGES, after):
            return self._wrap_around(after)
        self._notified = True
        async with self._database.transaction() as transaction:
            rows = await transaction.rows(CLAIM, after, self._batch, BATCH_BYTES_MAX, self._idle_limit_ms())
            if not rows:
                return self._wrap_around(after)
            failpoints.hit("outbox.after_claim")
            self.drained.clear()
            receipts = await self._bus.publish_many([_message(row) for row in rows])
            failpoints.hit("outbox.after_publish_before_mark")
            await _apply_receipts(transaction, rows, receipts)
            failpoints.hit("outbox.after_mark_before_commit")
        counts = self._record_outcomes(receipts)
        self._advance(after, rows[-1]["id"], counts)
        return counts

    def _idle_limit_ms(self) -> str:
        return str(round((self._bus.target.publish_timeout_s + PAUSE_GRACE_S) * 1000))

    def _next_start(self) -> int:
        """The id after which to continue: normally after the skipped messages, periodically among them."""
        self._passes += 1
        return self._skipped_until if self._passes % RETRY_SKIPPED_EVERY else self._retried_until

    def _advance(self, after: int, last: int, counts: RelayCounts) -> None:
        if after < self._skipped_until:
            self._retried_until = last if last < self._skipped_until else 0
        elif counts.unsettled or self._skipped_until:
            self._skipped_until = last

    def _wrap_around(self, after: int) -> RelayCounts:
        """Nothing after `after`: return to the skipped messages, if any."""
        self._skipped_until = self._retried_until = 0
        if after == 0:
            self.drained.set()
            return RelayCounts()
        return RelayCounts(unsettled=1)

    def _record_outcomes(self, receipts: Sequence[PublishReceipt]) -> RelayCounts:
        counts = _count_outcomes(receipts)
        self.tally += counts
        for outcome, count in msgspec.structs.asdict(counts).items():
            MESSAGES_RELAYED.labels(outcome).inc(count)
        return counts

    async def _back_off(self, lifecycle: Lifecycle) -> None:
        self._failures += 1
        self.stalled.set()
        now = self._clock.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_INTERVAL_S
            log.warning("outbox_stalled", nats_connected=self._bus.connected)
        await lifecycle.pause(RETRY_BACKOFF.pause_s(self._failures, _jitter()))

    async def _wait_for_messages(self, lifecycle: Lifecycle, notifications: Notifications) -> None:
        """Wait for a commit of messages, or `poll_s`, because a notification is only a hint."""
        message = asyncio.create_task(notifications.next(self._poll_s))
        waits = {message, asyncio.create_task(lifecycle.until_draining())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
        self._notified = not message.cancelled() and message.result() is not None
        while await notifications.next(0) is not None:
            pass  # one pass covers all pending notifications

    async def _update_gauges_when_due(self) -> None:
        now = self._clock.monotonic()
        if now < self._measure_at:
            return
        self._measure_at = now + self._measure_s
        row = await self._database.row(DEPTH_NOW, DEPTH_COUNT_MAX)
        assert row is not None
        DEPTH.set(row["depth"])
        OLDEST_AGE.set(row["oldest_age_s"] or 0)
        PARKED.set(row["parked"])


async def _apply_receipts(transaction: Transaction, rows: Sequence[Record], receipts: Sequence[PublishReceipt]) -> None:
    results = list(zip(rows, receipts, strict=True))
    if settled := [row["id"] for row, receipt in results if receipt.settled]:
        await transaction.run(REMOVE, settled)
    rejected = [(row, receipt) for row, receipt in results if receipt.outcome is PublishOutcome.REJECTED]
    if rejected:
        ids, reasons = [row["id"] for row, _ in rejected], [receipt.reason for _, receipt in rejected]
        await transaction.run(PARK, ids, reasons)
        log.error("outbox_parked", count=len(ids), first_subject=rejected[0][0]["subject"], first_reason=reasons[0])


def _message(row: Record) -> BusMessage:
    headers: dict[str, str] = msgspec.json.decode(row["headers"]) if row["headers"] else {}
    return BusMessage(subject=row["subject"], data=row["payload"], msg_id=row["msg_id"], headers=headers)


def _count_outcomes(receipts: Sequence[PublishReceipt]) -> RelayCounts:
    by_outcome = Counter(receipt.outcome for receipt in receipts)
    return RelayCounts(
        stored=by_outcome[PublishOutcome.STORED],
        duplicate=by_outcome[PublishOutcome.DUPLICATE],
        parked=by_outcome[PublishOutcome.REJECTED],
        unsettled=by_outcome[PublishOutcome.UNSETTLED],
    )
