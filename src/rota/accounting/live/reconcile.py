"""Reconciliation: compares tokens in Redis with rows of `proc`, and counters with tokens, beside running bookings.

Buckets are added to a shadow one after the other, from the highest down. While the marker stands, bookings and releases
in buckets from it on also change the shadow; so at the end the shadow is the exact sum of tokens at every instant, and
every counter takes its value from it. It needs no quiet moment, and no call handles more than a few buckets. New tokens
are higher than all before, so they are in the shadow from the beginning, and no load outruns the scan.

The rows of the same tokens are read after the tokens:
- a row without a token is counted now. If it is deleted at this moment, its tombstone informs the next reconciliation;
- a tombstoned token without a row was released, but the release did not reach Redis: it is released now;
- any other token without a row is a booking in flight, or one whose booker died. After `grace_s` it is tombstoned under
  the show's exclusive lock, which waits for inserts in flight; a tombstoned token never gets a row.

A crash leaves marker and shadow behind; the next reconciliation begins with new ones. A concurrent one finds that the
marker is not where it left it, and stops. A seeding ends every reconciliation, because it changes the fence.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from rota.accounting import allocations
from rota.accounting.ledger import BATCH_MAX, NIL_UUID, TOKEN_END, BookingGroup, Charge
from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.infra import failpoints
from rota.infra.redis import script
from rota.infra.telemetry import metrics
from rota.model.ids import ShowId
from rota.model.quota import Level
from rota.model.token_ranges import to_spans

if TYPE_CHECKING:
    from rota.accounting.live.ledger import LiveLedger

log = structlog.get_logger(__name__)

DRIFT = metrics.counter(
    "rota_accounting_drift", "Counters that differed from the sum of their tokens.", labels=("level",)
)
HEALED = metrics.counter(
    "rota_accounting_tokens_healed", "Tokens that disagreed with rows and were repaired.", labels=("how",)
)
LIVE_TOKENS = metrics.gauge(
    "rota_accounting_tokens_live", "Tokens in Redis at the last reconciliation, all managed shows."
)
CHUNKS = metrics.counter("rota_accounting_recount_chunks", "Script calls that counted buckets.")

SCAN_END: Final = 0
"""The position of the marker when every bucket is in the shadow."""
BUCKETS_PER_CALL: Final = 8
CHARGES_PER_CALL: Final = 256
"""With more charges than this the next call takes fewer buckets: a call needs a few microseconds for each charge."""
COUNT_ATTEMPTS_MAX: Final = 1000
"""Attempts to count a set of buckets that changes concurrently."""
NAMES_PER_CALL: Final = 256
GROUPS_PER_CALL: Final = 128
ROWS_PER_READ: Final = 1024
PAUSE_MAX_S: Final = 0.05
"""Upper bound of a pause: when calls are slow because of other clients, long pauses only delay the end of the scan."""


class BucketsCountedReply(msgspec.Struct, frozen=True, tag="counted"):
    mark: int
    tokens: tuple[tuple[int, list[str]], ...]


class BucketsMovedReply(msgspec.Struct, frozen=True, tag="moved"):
    pass


class ReconcileLostReply(msgspec.Struct, frozen=True, tag="lost"):
    pass


class ReconcileBegunReply(msgspec.Struct, frozen=True, tag="begun"):
    mark: int
    seq: int


class ReconcileStepReply(msgspec.Struct, frozen=True, tag="settled"):
    drifted: int
    seq: int


class ReconcileDamagedReply(msgspec.Struct, frozen=True, tag="damaged"):
    where: str


COUNT = script(
    __package__, "recount", replies=BucketsCountedReply | BucketsMovedReply | ReconcileLostReply | ReconcileDamagedReply
)
SETTLE = script(
    __package__, "settle", replies=ReconcileBegunReply | ReconcileStepReply | ReconcileLostReply | ReconcileDamagedReply
)


class ReconcileReport(msgspec.Struct, frozen=True):
    """Differences that a reconciliation found and repaired."""

    tokens: int
    adopted: int = 0
    released: int = 0
    buried: int = 0
    drifted: Mapping[Level, int] = {}
    chunks: int = 0
    took_s: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.adopted or self.released or self.buried or self.drifted)


class ReconcileSuperseded(Exception):
    """Another reconciliation, a seeding or a flush interfered."""


async def reconcile_show(
    ledger: LiveLedger,
    show: ShowId,
    *,
    grace_s: float = 10.0,
    rest: float = 0.0,
    scan_slot: AbstractAsyncContextManager[object] | None = None,
    release_orphans: bool = True,
) -> ReconcileReport | None:
    """Reconcile one show; None when it was superseded.

    Between calls it pauses `rest` times as long as one took, up to `PAUSE_MAX_S`; `scan_slot` is held during the scan,
    not during the grace. Without `release_orphans` it ends with the scan: the counters are right, tokens without rows
    stay for the next one.
    """
    began = time.monotonic()
    try:
        found = await _ShowReconciler(ledger, show, rest).run(
            grace_s if release_orphans else None, scan_slot or nullcontext()
        )
    except ReconcileSuperseded as why:
        log.info("reconciliation_superseded", show=str(show), by=str(why))
        return None
    for level, drifted in found.drifted.items():
        DRIFT.labels(level).inc(drifted)
    for how in ("adopted", "released", "buried"):
        HEALED.labels(how).inc(getattr(found, how))
    if not found.clean:
        log.warning("reconciliation_repaired", show=str(show), **msgspec.to_builtins(found))
    return msgspec.structs.replace(found, took_s=round(time.monotonic() - began, 3))


class _ShowReconciler:
    def __init__(self, ledger: LiveLedger, show: ShowId, rest: float) -> None:
        self.ledger = ledger
        self.show = show
        self.keys = ledger.keys.show_keys(str(show))
        self.rest = rest
        self.name = secrets.token_hex(8)
        self.fence = 0
        self.buckets = 1
        """Buckets per call, adapted to the charges in the last ones."""
        self.tokens = self.adopted = self.chunks = 0
        self.suspects: set[int] = set()
        """Tokens without a row."""

    async def run(self, grace_s: float | None, scan_slot: AbstractAsyncContextManager[object]) -> ReconcileReport:
        async with scan_slot:
            drifted = await self._scan()
        released, buried = (0, 0) if grace_s is None else await self._release_orphans(grace_s)
        return ReconcileReport(self.tokens, self.adopted, released, buried, drifted, self.chunks)

    async def _scan(self) -> dict[Level, int]:
        [found] = await live_reader.show_states(self.ledger.client, [self.keys])
        if found.fence is None:
            raise ReconcileSuperseded("seeding")
        self.fence = found.fence
        mark = await self._run_step("begin")
        failpoints.hit("recount.after_begin")
        await self._adopt_rows(await self._row_tokens(mark << script_args.SPAN_BITS, TOKEN_END))
        while mark != SCAN_END:
            mark = await self._reconcile_buckets(mark)
        drifted = await self._swap_counters()
        await self._run_step("finish")
        return drifted

    async def _reconcile_buckets(self, mark: int) -> int:
        """Count the next buckets below the marker and compare them with rows; returns the new marker."""
        began = time.monotonic()
        counted = await self._count_buckets(mark)
        failpoints.hit("recount.after_count")
        charge_by_token = {
            (bucket << script_args.SPAN_BITS) + int(field): number
            for bucket, held in counted.tokens
            for field, number in zip(held[::2], held[1::2], strict=True)
        }
        rows = set(await self._row_tokens(counted.mark << script_args.SPAN_BITS, mark << script_args.SPAN_BITS))
        self.buckets = _next_bucket_count(self.buckets, len(set(charge_by_token.values())))
        self.tokens += len(charge_by_token)
        self.suspects |= charge_by_token.keys() - rows
        await self._adopt_rows(sorted(rows - charge_by_token.keys()))
        await asyncio.sleep(min(PAUSE_MAX_S, self.rest * (time.monotonic() - began)))
        return counted.mark

    async def _row_tokens(self, first: int, end: int) -> list[int]:
        """Tokens with a row, from `first` to before `end`."""
        return await allocations.tokens(self.ledger.database, self.show, first, end - 1)

    async def _count_buckets(self, mark: int) -> BucketsCountedReply:
        for _ in range(COUNT_ATTEMPTS_MAX):
            numbers = await live_reader.buckets(self.ledger.client, self.keys, mark, self.buckets)
            reply = await COUNT(
                self.ledger.client,
                seq=self.keys.seq,
                show=self.keys.show,
                index=self.keys.limits,
                charges=self.keys.charges,
                buckets=self.keys.buckets,
                shadow=self.keys.shadow,
                places=[self.keys.tokens(number) for number in numbers],
                fence=self.fence,
                recounter=self.name,
                mark=mark,
                numbers=numbers,
            )
            self.chunks += 1
            CHUNKS.inc()
            match reply:
                case BucketsCountedReply():
                    return reply
                case ReconcileLostReply():
                    raise ReconcileSuperseded("another")
                case ReconcileDamagedReply():
                    raise self._report_damage(reply)
        raise ReconcileSuperseded("buckets that never rest")

    async def _adopt_rows(self, missing: Sequence[int]) -> None:
        """Count rows without a token in Redis, after checking Redis again: most were booked since.

        Rows are read once more afterwards. A release deletes the row first, so a frame that ends at this moment is not
        counted again.
        """
        held = await live_reader.charge_numbers(self.ledger.client, self.keys, missing)
        for first, last in to_spans([token for token in missing if token not in held]):
            for start in range(first, last + 1, ROWS_PER_READ):
                groups = await self._groups_of_rows(start, min(start + ROWS_PER_READ - 1, last))
                for chunk in live_reader.chunked(groups, GROUPS_PER_CALL):
                    adopted = await self.ledger.adopt(self.show, chunk, under=self.fence)
                    if adopted is None:
                        raise ReconcileSuperseded("seeding")
                    self.adopted += adopted

    async def _groups_of_rows(self, first: int, last: int) -> list[BookingGroup]:
        """Rows of a token range, grouped by charge."""
        rows = await allocations.page(self.ledger.database, self.show, first, last, ROWS_PER_READ)
        by_charge: dict[Charge, list[int]] = {}
        for row in rows:
            by_charge.setdefault(row.charge, []).append(row.token)
        return [BookingGroup(charge, NIL_UUID, tokens) for charge, tokens in by_charge.items()]

    async def _swap_counters(self) -> dict[Level, int]:
        """Set every counter to the value of the shadow; returns how many changed, by level.

        Jobs and layers have counters only if they have limits; otherwise their usage is summed from the charges.
        """
        names = {
            name
            async for name, _ in live_reader.scan_hash(self.ledger.client, self.keys.limits)
            if live_reader.is_counter_name(name)
        }
        async for field, _ in live_reader.scan_hash(self.ledger.client, self.keys.shadow):
            name = field.rpartition(":")[0]
            if live_reader.is_counter_name(name) and not name.startswith(("job:", "layer:")):
                names.add(name)
        failpoints.hit("recount.before_swap")
        drifted: Counter[Level] = Counter()
        for level in Level:
            of_level = sorted(name for name in names if script_args.parse_counter_name(name)[0] is level)
            for chunk in live_reader.chunked(of_level, NAMES_PER_CALL):
                drifted[level] += await self._run_step("swap", chunk)
        return {level: number for level, number in drifted.items() if number}

    async def _run_step(self, step: str, names: Sequence[str] = ()) -> int:
        """Run one step; returns the initial marker for `begin`, the number of drifted names for `swap`."""
        reply = await SETTLE(
            self.ledger.client,
            seq=self.keys.seq,
            show=self.keys.show,
            charges=self.keys.charges,
            buckets=self.keys.buckets,
            shadow=self.keys.shadow,
            places=[self.keys.counter_key(name) for name in names],
            show_id=str(self.show),
            fence=self.fence,
            recounter=self.name,
            step=step,
            names=list(names),
        )
        match reply:
            case ReconcileBegunReply():
                return reply.mark
            case ReconcileStepReply():
                return reply.drifted
            case ReconcileLostReply():
                raise ReconcileSuperseded("another")
            case ReconcileDamagedReply():
                raise self._report_damage(reply)

    async def _release_orphans(self, grace_s: float) -> tuple[int, int]:
        """Release tokens that will never have a row; returns how many were tombstoned before, and how many now."""
        if not self.suspects:
            return 0, 0
        tombstoned = await allocations.tombstoned(self.ledger.database, self.show, sorted(self.suspects))
        released = await self.ledger.release_tombstoned(self.show, self.fence, tombstoned)
        remaining = sorted(self.suspects - tombstoned)
        if not remaining:
            return released, 0
        await asyncio.sleep(grace_s)
        failpoints.hit("recount.before_bury")
        tombstoned_now = 0
        for chunk in live_reader.chunked(remaining, BATCH_MAX):
            orphans = await allocations.tombstone(self.ledger.database, self.show, chunk)
            failpoints.hit("recount.after_bury")
            tombstoned_now += await self.ledger.release_tombstoned(self.show, self.fence, orphans)
        return released, tombstoned_now

    def _report_damage(self, reply: ReconcileDamagedReply) -> ReconcileSuperseded:
        log.warning("ledger_damaged", show=str(self.show), key=reply.where, remedy="the show is seeded again")
        return ReconcileSuperseded("damage")


def _next_bucket_count(buckets: int, charges: int) -> int:
    """Buckets of the next call after `buckets` that held so many charges."""
    if charges > CHARGES_PER_CALL:
        return max(1, buckets // 2)
    return min(BUCKETS_PER_CALL, buckets * 2) if charges * 2 <= CHARGES_PER_CALL else buckets
