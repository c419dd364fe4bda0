"""The relay: takes messages out of the outbox and publishes them.

    claim (lock) ─► publish, all at once ─► delete what was confirmed ─► COMMIT

One pass is one transaction, open no longer than a publish may take, and none is begun while NATS is away. Any number of
relays may run, in one process or in many: a row that one of them works on is skipped by the others.

Where we may die, and what follows:
- after the claim: the locks go with the transaction, another relay claims the rows;
- after the publish, before COMMIT: the rows are published again under the same ids. Within the stream's dedup window
  NATS stores them once; after it, or when NATS lost its memory, twice. **Receivers must be idempotent**;
- a lost reply to COMMIT is the same case, and so is a pause: PostgreSQL ends the transaction of a relay that is silent.

Nothing is lost: a row leaves only when the bus has confirmed its message, or into `outbox_parked` with a reason when
the bus can never take it. Messages that the bus cannot take *now* (no answer, a full stream) stay: they are passed by,
so that the rest does not wait for them, and every `LOOK_BACK_EVERY`th pass is theirs, so that they do not wait for the
rest to be gone.

Order: a pass publishes in the order of ids. Ids are given at insert, not at commit, and passes of several relays
overlap, so across transactions there is no order. Whoever needs one puts a number into the message.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import SystemRandom

import asyncpg
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
    "rota_outbox_relayed", "Messages of the outbox, by what the bus said.", labels=("outcome",)
)
DEPTH = metrics.gauge("rota_outbox_depth", "Messages waiting in the outbox; counted up to ten thousand.")
OLDEST_AGE = metrics.gauge("rota_outbox_oldest_age_seconds", "Age of the first message in the outbox.")
PARKED = metrics.gauge("rota_outbox_parked", "Messages put aside because they can never be published.")

CLAIM = query(__package__, "claim")
REMOVE = query(__package__, "remove")
PARK = query(__package__, "park")
DEPTH_NOW = query(__package__, "depth")

BATCH_MAX = 512
BATCH_BYTES_MAX = 4 * 1024 * 1024
"""What one pass holds in memory and on its way to NATS at most, one message more at the worst."""
PAUSE_GRACE_S = 1.0
"""A relay silent for this long beyond its publish is taken for paused: PostgreSQL ends its transaction."""
DEPTH_COUNT_MAX = 10_000
WARN_INTERVAL_S = 30.0
RETRY_BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
RETRY_SKIPPED_EVERY = 16
TRANSIENT_ERRORS = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.TransactionRollbackError,
    asyncpg.InsufficientResourcesError,
)
"""What a PostgreSQL says that has no time or room now (somebody holds the table, its disk is full): the pass had no
effect, and the next one may succeed."""
_jitter = SystemRandom().random


class RelayCounts(msgspec.Struct, frozen=True):
    """What became of the messages of one pass, or of all."""

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
    """`Service("outbox_relay", relay.run)` keeps it going."""

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
        """All messages since the start."""
        self.drained = asyncio.Event()
        """Set while the last pass found nothing to do."""
        self.stalled = asyncio.Event()
        """Set while messages cannot leave because NATS or PostgreSQL is away."""
        self._database = database
        self._bus = bus
        self._batch = batch
        self._poll_s = poll_s
        self._measure_s = measure_s
        self._clock = clock or SystemClock()
        self._measure_at = self._clock.monotonic()
        self._warn_at = self._measure_at
        self._after = 0
        """The last message that was passed by, or published after one that was; 0 when none was."""
        self._looked_back_to = 0
        self._passes = 0
        self._streak = 0

    async def run(self, life: Lifecycle) -> None:
        async with self._database.listen(CHANNEL) as wakes:
            life.ready()
            while not life.draining:
                await self._run_pass(life, wakes)

    async def _run_pass(self, life: Lifecycle, wakes: Notifications) -> None:
        """One pass, and the pause that it calls for."""
        try:
            await self._update_gauges_when_due()
            passed = await self._relay_batch() if self._bus.connected else None
        except (Unavailable, *TRANSIENT_ERRORS) as error:
            log.warning("outbox_pass_failed", code=error_kind(error), reason=str(error))
            passed = None
        if passed is None or (passed.unsettled and not passed.removed):
            await self._back_off(life)
        else:
            self._streak = 0
            self.stalled.clear()
            if not passed.claimed:
                await self._wait_for_messages(life, wakes)

    async def _relay_batch(self) -> RelayCounts:
        """Publish the next messages and forget those that were confirmed, in one transaction."""
        after = self._next_start()
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
        passed = self._record_outcomes(receipts)
        self._advance(after, rows[-1]["id"], passed)
        return passed

    def _idle_limit_ms(self) -> str:
        return str(round((self._bus.target.publish_timeout_s + PAUSE_GRACE_S) * 1000))

    def _next_start(self) -> int:
        """After which message to go on: mostly after those that were passed by, now and then among them."""
        self._passes += 1
        return self._after if self._passes % RETRY_SKIPPED_EVERY else self._looked_back_to

    def _advance(self, after: int, last: int, passed: RelayCounts) -> None:
        if after < self._after:
            self._looked_back_to = last if last < self._after else 0
        elif passed.unsettled or self._after:
            self._after = last

    def _wrap_around(self, after: int) -> RelayCounts:
        """Nothing behind `after`: go back to those that were passed by, if any."""
        self._after = self._looked_back_to = 0
        if after == 0:
            self.drained.set()
            return RelayCounts()
        return RelayCounts(unsettled=1)

    def _record_outcomes(self, receipts: Sequence[PublishReceipt]) -> RelayCounts:
        passed = _count_outcomes(receipts)
        self.tally += passed
        for outcome, count in msgspec.structs.asdict(passed).items():
            MESSAGES_RELAYED.labels(outcome).inc(count)
        return passed

    async def _back_off(self, life: Lifecycle) -> None:
        self._streak += 1
        self.stalled.set()
        now = self._clock.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_INTERVAL_S
            log.warning("outbox_stalled", nats_connected=self._bus.connected)
        await life.pause(RETRY_BACKOFF.pause_s(self._streak, _jitter()))

    async def _wait_for_messages(self, life: Lifecycle, wakes: Notifications) -> None:
        """Until somebody commits messages, or `poll_s`: a notification is only a hint."""
        waits = {asyncio.create_task(wakes.next(self._poll_s)), asyncio.create_task(life.until_draining())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
        while await wakes.next(0) is not None:
            pass  # one pass answers all that were told meanwhile

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
    judged = list(zip(rows, receipts, strict=True))
    if settled := [row["id"] for row, receipt in judged if receipt.settled]:
        await transaction.run(REMOVE, settled)
    rejected = [(row, receipt) for row, receipt in judged if receipt.outcome is PublishOutcome.REJECTED]
    if rejected:
        ids, reasons = [row["id"] for row, _ in rejected], [receipt.reason for _, receipt in rejected]
        await transaction.run(PARK, ids, reasons)
        log.error("outbox_parked", count=len(ids), first_subject=rejected[0][0]["subject"], first_reason=reasons[0])


def _message(row: Record) -> BusMessage:
    headers: dict[str, str] = msgspec.json.decode(row["headers"]) if row["headers"] else {}
    return BusMessage(subject=row["subject"], data=row["payload"], msg_id=row["msg_id"], headers=headers)


def _count_outcomes(receipts: Sequence[PublishReceipt]) -> RelayCounts:
    counts = Counter(receipt.outcome for receipt in receipts)
    return RelayCounts(
        stored=counts[PublishOutcome.STORED],
        duplicate=counts[PublishOutcome.DUPLICATE],
        parked=counts[PublishOutcome.REJECTED],
        unsettled=counts[PublishOutcome.UNSETTLED],
    )
