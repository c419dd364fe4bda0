"""The recount: tokens in Redis against rows of `proc`, and counters against tokens, while bookings go on.

Bucket after bucket joins a shadow, from the highest down, and while the mark stands, bookings and releases in buckets
from it on change the shadow too; so at the end the shadow is what tokens hold, at every instant, and every counter
takes its value from it. No quiet moment is needed, and no call handles more than a few buckets. New tokens are higher
than all before, so they are in the shadow from the beginning, and no load outruns the scan.

Beside it the rows of the same tokens are read, after the tokens:
- a row without a token is counted now. Should it be deleted at this very moment, its grave tells the next recount;
- a token without a row that lies in a grave was released, and Redis was not told: it is released now;
- any other token without a row is a booking under way, or one whose booker died. It is given `grace_s`, then buried
  under the show's exclusive lock, which waits for inserts under way; what is under a stone then never gets a row.

If we die the mark and the shadow stay behind; the next recount begins with new ones. A second recount finds that the
mark is not where it left it, and stops. A seeding ends every recount: the fence is another one.
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

from rota.accounting import procs
from rota.accounting.ledger import BATCH_MAX, NOBODY, TOKEN_END, Charge, Group, runs
from rota.accounting.live import state, wire
from rota.infra import faults
from rota.infra.redis import script
from rota.infra.telemetry import metrics
from rota.model.ids import ShowId
from rota.model.quota import Level

if TYPE_CHECKING:
    from rota.accounting.live.ledger import LiveLedger

log = structlog.get_logger(__name__)

DRIFT = metrics.counter("rota_accounting_drift", "Counters that were not what their tokens hold.", labels=("level",))
HEALED = metrics.counter("rota_accounting_tokens_healed", "Tokens that did not agree with rows.", labels=("how",))
LIVE = metrics.gauge("rota_accounting_tokens_live", "Tokens in Redis at the last recount, all managed shows.")
CHUNKS = metrics.counter("rota_accounting_recount_chunks", "Script calls that counted buckets.")

ENDED: Final = 0
"""Where the mark stands when every bucket is in the shadow."""
BUCKETS_PER_CALL: Final = 8
CHARGES_PER_CALL: Final = 256
"""Fewer buckets are taken where more charges than this are in them: a call takes a few microseconds for each."""
TURNS_MAX: Final = 1000
"""Tries to take a portion of buckets that change under our hands."""
NAMES_PER_CALL: Final = 256
GROUPS_PER_CALL: Final = 128
ROWS_PER_READ: Final = 1024
REST_MAX_S: Final = 0.05
"""Where calls take long because others are served first, long rests would help nobody, and the scan must end."""


class Counted(msgspec.Struct, frozen=True):
    mark: int
    tokens: tuple[tuple[int, list[str]], ...]


class Moved(msgspec.Struct, frozen=True):
    pass


class Lost(msgspec.Struct, frozen=True):
    pass


class Begun(msgspec.Struct, frozen=True):
    mark: int
    seq: int


class Settled(msgspec.Struct, frozen=True):
    drifted: int
    seq: int


class Damaged(msgspec.Struct, frozen=True):
    where: str


COUNT = script(__package__, "recount", replies=Counted | Moved | Lost | Damaged)
SETTLE = script(__package__, "settle", replies=Begun | Settled | Lost | Damaged)


class Recounted(msgspec.Struct, frozen=True):
    """What a recount found and mended."""

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


class Overtaken(Exception):
    """Another recount, a seeding or a flush came between."""


async def recount(
    ledger: LiveLedger,
    show: ShowId,
    *,
    grace_s: float = 10.0,
    rest: float = 0.0,
    turn: AbstractAsyncContextManager[object] | None = None,
    bury: bool = True,
) -> Recounted | None:
    """Recount one show; None when something came between.

    Between calls it rests `rest` times as long as one took, up to `REST_MAX_S`; `turn` is held while it scans, and not
    in its grace.
    Without `bury` it ends with the scan: the counters are right, tokens without rows stay for the next one.
    """
    began = time.monotonic()
    try:
        found = await _Recount(ledger, show, rest).run(grace_s if bury else None, turn or nullcontext())
    except Overtaken as why:
        log.info("recount_overtaken", show=str(show), by=str(why))
        return None
    for level, drifted in found.drifted.items():
        DRIFT.labels(level).inc(drifted)
    for how in ("adopted", "released", "buried"):
        HEALED.labels(how).inc(getattr(found, how))
    if not found.clean:
        log.warning("recount_mended", show=str(show), **msgspec.to_builtins(found))
    return msgspec.structs.replace(found, took_s=round(time.monotonic() - began, 3))


class _Recount:
    def __init__(self, ledger: LiveLedger, show: ShowId, rest: float) -> None:
        self.ledger = ledger
        self.show = show
        self.keys = ledger.keys.of_show(str(show))
        self.rest = rest
        self.name = secrets.token_hex(8)
        self.fence = 0
        self.buckets = 1
        """How many are taken at a time, by what was in the last ones."""
        self.tokens = self.adopted = self.chunks = 0
        self.suspects: set[int] = set()
        """Tokens that had no row."""

    async def run(self, grace_s: float | None, turn: AbstractAsyncContextManager[object]) -> Recounted:
        async with turn:
            drifted = await self._scan()
        released, buried = (0, 0) if grace_s is None else await self._lay_to_rest(grace_s)
        return Recounted(self.tokens, self.adopted, released, buried, drifted, self.chunks)

    async def _scan(self) -> dict[Level, int]:
        [found] = await state.show_states(self.ledger.client, [self.keys])
        if found.fence is None:
            raise Overtaken("seeding")
        self.fence = found.fence
        mark = await self._settle("begin")
        faults.at("recount.after_begin")
        await self._adopt(await self._rows(mark << wire.SPAN_BITS, TOKEN_END))
        while mark != ENDED:
            mark = await self._portion(mark)
        drifted = await self._swap()
        await self._settle("finish")
        return drifted

    async def _portion(self, mark: int) -> int:
        """Count the next buckets below the mark and compare them with rows; the new mark."""
        began = time.monotonic()
        counted = await self._count(mark)
        faults.at("recount.after_count")
        seen = {
            (bucket << wire.SPAN_BITS) + int(field): number
            for bucket, held in counted.tokens
            for field, number in zip(held[::2], held[1::2], strict=True)
        }
        rows = set(await self._rows(counted.mark << wire.SPAN_BITS, mark << wire.SPAN_BITS))
        self.buckets = _buckets_next(self.buckets, len(set(seen.values())))
        self.tokens += len(seen)
        self.suspects |= seen.keys() - rows
        await self._adopt(sorted(rows - seen.keys()))
        await asyncio.sleep(min(REST_MAX_S, self.rest * (time.monotonic() - began)))
        return counted.mark

    async def _rows(self, first: int, end: int) -> list[int]:
        """Tokens that have a row, from one to before another."""
        return await procs.tokens(self.ledger.database, self.show, first, end - 1)

    async def _count(self, mark: int) -> Counted:
        for _ in range(TURNS_MAX):
            numbers = await state.buckets(self.ledger.client, self.keys, mark, self.buckets)
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
                case Counted():
                    return reply
                case Lost():
                    raise Overtaken("another")
                case Damaged():
                    raise self._damaged(reply)
        raise Overtaken("buckets that never rest")

    async def _adopt(self, strays: Sequence[int]) -> None:
        """Count rows that Redis has no token for, now that it is asked again: most were booked since.

        Rows are read once more afterwards. Who releases deletes the row first, so a frame that ends at this moment is
        not counted again.
        """
        held = await state.numbers(self.ledger.client, self.keys, strays)
        for first, last in runs([token for token in strays if token not in held]):
            for start in range(first, last + 1, ROWS_PER_READ):
                groups = await self._charged(start, min(start + ROWS_PER_READ - 1, last))
                for piece in state.pieces(groups, GROUPS_PER_CALL):
                    adopted = await self.ledger.adopt(self.show, piece, under=self.fence)
                    if adopted is None:
                        raise Overtaken("seeding")
                    self.adopted += adopted

    async def _charged(self, first: int, last: int) -> list[Group]:
        """Rows from one token to another, by what they hold."""
        rows = await procs.page(self.ledger.database, self.show, first, last, ROWS_PER_READ)
        by_charge: dict[Charge, list[int]] = {}
        for row in rows:
            by_charge.setdefault(row.charge, []).append(row.token)
        return [Group(charge, NOBODY, tokens) for charge, tokens in by_charge.items()]

    async def _swap(self) -> dict[Level, int]:
        """Give every counter the value of the shadow; how many had another one, by level.

        Jobs and layers have counters if they have limits; their frames are told from the charges otherwise.
        """
        names = {name async for name, _ in state.fields_of(self.ledger.client, self.keys.limits) if state.is_name(name)}
        async for field, _ in state.fields_of(self.ledger.client, self.keys.shadow):
            name = field.rpartition(":")[0]
            if state.is_name(name) and not name.startswith(("job:", "layer:")):
                names.add(name)
        faults.at("recount.before_swap")
        drifted: Counter[Level] = Counter()
        for level in Level:
            of_level = sorted(name for name in names if wire.named(name)[0] is level)
            for piece in state.pieces(of_level, NAMES_PER_CALL):
                drifted[level] += await self._settle("swap", piece)
        return {level: number for level, number in drifted.items() if number}

    async def _settle(self, step: str, names: Sequence[str] = ()) -> int:
        """One step: the mark to begin at, or how many of the names had drifted."""
        reply = await SETTLE(
            self.ledger.client,
            seq=self.keys.seq,
            show=self.keys.show,
            charges=self.keys.charges,
            buckets=self.keys.buckets,
            shadow=self.keys.shadow,
            places=[self.keys.counting(name) for name in names],
            show_id=str(self.show),
            fence=self.fence,
            recounter=self.name,
            step=step,
            names=list(names),
        )
        match reply:
            case Begun():
                return reply.mark
            case Settled():
                return reply.drifted
            case Lost():
                raise Overtaken("another")
            case Damaged():
                raise self._damaged(reply)

    async def _lay_to_rest(self, grace_s: float) -> tuple[int, int]:
        """Release tokens that will never have a row; how many of them were in a grave, and how many are now."""
        if not self.suspects:
            return 0, 0
        known = await procs.buried(self.ledger.database, self.show, sorted(self.suspects))
        released = await self.ledger.forget(self.show, self.fence, known)
        rest = sorted(self.suspects - known)
        if not rest:
            return released, 0
        await asyncio.sleep(grace_s)
        faults.at("recount.before_bury")
        buried = 0
        for piece in state.pieces(rest, BATCH_MAX):
            stones = await procs.bury(self.ledger.database, self.show, piece)
            faults.at("recount.after_bury")
            buried += await self.ledger.forget(self.show, self.fence, stones)
        return released, buried

    def _damaged(self, reply: Damaged) -> Overtaken:
        log.warning("books_damaged", show=str(self.show), key=reply.where, remedy="the show is seeded anew")
        return Overtaken("damage")


def _buckets_next(buckets: int, charges: int) -> int:
    """How many buckets to take after `buckets` that held so many charges."""
    if charges > CHARGES_PER_CALL:
        return max(1, buckets // 2)
    return min(BUCKETS_PER_CALL, buckets * 2) if charges * 2 <= CHARGES_PER_CALL else buckets
