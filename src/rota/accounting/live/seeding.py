"""Seeding: fills Redis with the accounting of a show, when it is empty, rolled back or damaged, or takes over a show.

The order makes it safe to die after any step:
1. the fence rises in PostgreSQL: bookings made on the previous state of Redis are never inserted (A1, A4);
2. the show is marked in Redis as being seeded under this fence, and has no fence: nothing is booked. Every further call
   requires this marker on this run of the server, so a flush, a restart or a second seeding in between ends this one
   instead of leaving a partial state;
3. the remains of the previous state are removed, limits are written, all rows are counted;
4. the fence is written, and bookings are accepted again.

Rows deleted meanwhile may still be counted; the following reconciliation finds their tombstones. After a crash the
marker stays without a fence: the next check starts a new seeding with a higher fence. Every call handles a bounded
number of keys and tokens, so Redis is never blocked for long.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from rota.accounting import allocations
from rota.accounting.ledger import NIL_UUID, TOKEN_END, BookingGroup, Charge
from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.accounting.live.limits import LimitsWrittenReply
from rota.infra import failpoints
from rota.infra.postgres import query
from rota.infra.redis import script
from rota.infra.telemetry import metrics
from rota.model.ids import ShowId
from rota.model.quota import Level

if TYPE_CHECKING:
    from rota.accounting.live.ledger import LiveLedger

log = structlog.get_logger(__name__)

RAISE_SEEDING_FENCE = query(__package__, "show_found")
GET_SHOW = query("rota.accounting", "show_get")

SEEDINGS = metrics.counter("rota_accounting_seedings", "Shows that were seeded in Redis.")
SEEDING_SECONDS = metrics.histogram("rota_accounting_seeding_seconds", "Duration of a seeding.")

PAGE_SIZE: Final = 4096
TOKENS_PER_CALL: Final = 1024
GROUPS_PER_CALL: Final = 128


class SeedStepReply(msgspec.Struct, frozen=True, tag="done"):
    seq: int


class SeedSupersededReply(msgspec.Struct, frozen=True, tag="newer"):
    pass


SEED = script(__package__, "seed", replies=SeedStepReply | SeedSupersededReply)


class SeedingResult(msgspec.Struct, frozen=True):
    fence: int
    limits: int
    procs: int
    took_s: float


class SeedingSuperseded(Exception):
    """Another seeding, a flush or a restart interfered."""


async def seed(ledger: LiveLedger, show: ShowId) -> SeedingResult | None:
    """Seed the show under a new fence; None when another process does it, or the show is not managed."""
    began = time.monotonic()
    fence = await ledger.database.value(RAISE_SEEDING_FENCE, show)
    if fence is None:
        return None
    failpoints.hit("seeding.after_fence")
    try:
        done = await _seed(ledger, show, int(fence), began)
    except SeedingSuperseded:
        log.info("seeding_superseded", show=str(show), fence=fence)
        return None
    if done:
        SEEDINGS.inc()
        SEEDING_SECONDS.observe(done.took_s)
        log.info("show_seeded", show=str(show), fence=fence, procs=done.procs, limits=done.limits, s=done.took_s)
    return done


async def _seed(ledger: LiveLedger, show: ShowId, fence: int, began: float) -> SeedingResult | None:
    await _begin(ledger, show, fence)
    failpoints.hit("seeding.after_mark")
    await _wipe(ledger, show, fence)
    read = await ledger.limits.read(show)
    if read is None or not read.managed:
        return None
    for chunk in live_reader.chunked(read.entries, GROUPS_PER_CALL):
        if not isinstance(await ledger.limits.write(show, fence, chunk, how="seed"), LimitsWrittenReply):
            raise SeedingSuperseded
    failpoints.hit("seeding.after_limits")
    counted = await _count_rows(ledger, show, fence, read.names)
    await _run_step(ledger, show, fence, "finish")
    return SeedingResult(fence, len(read.entries), counted, round(time.monotonic() - began, 3))


async def _begin(ledger: LiveLedger, show: ShowId, fence: int) -> None:
    """Set the seeding marker. A fence in Redis above the one that PostgreSQL has *afterwards* is not from PostgreSQL:
    it was set by hand, or PostgreSQL was restored from a backup. It must not block the show."""
    try:
        await _run_step(ledger, show, fence, "begin")
    except SeedingSuperseded:
        row = await ledger.database.row(GET_SHOW, show)
        if row is None:
            raise
        await _run_step(ledger, show, row["fence"], "doubt")
        log.warning("foreign_fence_removed", show=str(show), fence=row["fence"])
        await _run_step(ledger, show, fence, "begin")


async def _wipe(ledger: LiveLedger, show: ShowId, fence: int) -> None:
    """Remove the previous state. The indexes go last: after a crash they still list the remaining keys."""
    keys = ledger.keys.show_keys(str(show))
    places = [keys.counter_key(name) for name in await live_reader.names_in_use(ledger.client, keys)]
    places += [keys.tokens(bucket) for bucket in await live_reader.buckets(ledger.client, keys)]
    for chunk in live_reader.chunked(places):
        await _run_step(ledger, show, fence, "wipe", chunk)
    failpoints.hit("seeding.mid_wipe")
    await _run_step(ledger, show, fence, "wipe", [keys.limits, keys.charges, keys.buckets, keys.shadow])


async def _count_rows(ledger: LiveLedger, show: ShowId, fence: int, limited: Collection[str]) -> int:
    """`limited`: names with limits in Redis; no other process changes them while the marker stands."""
    counted, first = 0, 0
    while first < TOKEN_END:
        page, last = await allocations.page_groups(ledger.database, show, first, PAGE_SIZE)
        for groups in _script_batches(page, limited):
            if await ledger.adopt(show, groups, under=fence) is None:
                raise SeedingSuperseded
            counted += sum(len(group.tokens) for group in groups)
            failpoints.hit("seeding.mid_rows")
        if last is None:
            return counted
        first = last + 1
    return counted


def _script_batches(
    page: Sequence[tuple[Charge, Sequence[int]]], limited: Collection[str]
) -> Iterator[list[BookingGroup]]:
    """Groups of a page, in batches that one script call handles in a few milliseconds."""
    batch: list[BookingGroup] = []
    tokens = 0
    for charge, charge_tokens in page:
        capped = any(
            script_args.counter_name(level, charge.key(level)) in limited for level in (Level.JOB, Level.LAYER)
        )
        for chunk in live_reader.chunked(charge_tokens, TOKENS_PER_CALL):
            if batch and (tokens + len(chunk) > TOKENS_PER_CALL or len(batch) == GROUPS_PER_CALL):
                yield batch
                batch, tokens = [], 0
            batch.append(BookingGroup(charge, NIL_UUID, chunk, capped))
            tokens += len(chunk)
    if batch:
        yield batch


async def _run_step(ledger: LiveLedger, show: ShowId, fence: int, step: str, places: Sequence[str] = ()) -> None:
    keys = ledger.keys.show_keys(str(show))
    arguments = {"seq": keys.seq, "show": keys.show, "places": list(places)}
    if isinstance(await SEED(ledger.client, **arguments, fence=fence, step=step), SeedSupersededReply):
        raise SeedingSuperseded


async def drop_show(ledger: LiveLedger, show: ShowId, fence: int) -> None:
    """Remove a show that Redis no longer keeps since `fence`, unless it was seeded again."""
    try:
        await _begin(ledger, show, fence)
        await _wipe(ledger, show, fence)
        await _run_step(ledger, show, fence, "drop")
    except SeedingSuperseded:
        log.info("show_drop_superseded", show=str(show), fence=fence)
