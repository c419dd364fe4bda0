"""The audit of the books: what Redis counts, what the five tables say and what procs hold, key by key; and its repair.

Nothing is stopped for it, so while bookings go on a counter may be ahead of the procs for a moment. A difference is
reported when it stands still over several looks, or when Redis counts *less* than procs hold in all of them. Redis says
twice what is booked, by counters and by tokens: both are held against the procs, and the keys tokens lie in against
each other. The tables of a managed show follow with the recompute: they are shown, and wrong only for unmanaged shows.

The repair does what bookings can go on beside: limits and a recount. Where that cannot be enough, the show is seeded
anew, which takes everything from PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec

from rota.accounting import procs
from rota.accounting.books import Books
from rota.accounting.items import Item, Show
from rota.accounting.live import recount, seeding, soundness, state, wire
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.live.soundness import Flaw
from rota.infra.redis.keys import ACCT_JOB, ACCT_LAYER
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, RESOURCES, Level, Usage

LOOKS: Final = 5
BETWEEN_LOOKS_S: Final = 0.1
COUNTERS: Final = frozenset({"int_cores", "int_gpus"})


class Problem(StrEnum):
    LOW = "low"
    """Redis counts less than procs hold: a cap could be breached."""
    HIGH = "high"
    """Redis counts more than procs hold: something is not used that could be."""
    UNREADABLE = "unreadable"
    """The key has another type, or numbers that no script writes."""
    LIMITS = "limits"
    """The limits in Redis are not those of PostgreSQL."""
    TABLE = "table"
    """The table of an unmanaged show does not say what its procs hold."""


class Line(msgspec.Struct, frozen=True):
    """One key. `redis` is its counter, or what its tokens hold where it has none; None if that cannot be read."""

    level: Level
    id: UUID
    name: str
    procs: Usage
    table: Usage
    redis: Usage | None
    problem: Problem | None = None


class Audited(msgspec.Struct, frozen=True):
    show: Show
    seeded: bool | None
    """Whether Redis books the show under its fence; None for an unmanaged show."""
    lines: Sequence[Line]
    damaged: Sequence[str] = ()
    """Keys of the show that no script leaves as they are."""

    @property
    def ok(self) -> bool:
        return self.seeded is not False and not self.damaged and not any(line.problem for line in self.lines)


async def audit(books: Books, show: Show) -> Audited:
    names = await _names(books, show)
    tables = {
        wire.name(level, thing): usage
        for (level, thing), usage in (await books.transactional.counters(show.id)).items()
    }
    if not show.managed or books.live is None:
        held = await _held(books, show.id)
        lines = [_table_line(key, names, held, tables) for key in sorted({*held, *tables})]
        return Audited(show, None, lines)
    looks = [await _look(books, books.live, show.id)]
    while len(looks) < LOOKS and looks[-1].differs:
        await asyncio.sleep(BETWEEN_LOOKS_S)
        looks.append(await _look(books, books.live, show.id))
    seeded = await books.live.is_seeded(show.id, (await books.managed()).get(show.id, 0))
    wrong = await _wrong_limits(books.live, show.id) if seeded else set()
    keys = sorted({key for look in looks for key in look.keys} | wrong)
    damaged = {key for key, _, _ in set.intersection(*(look.flaws for look in looks))} if seeded else set()
    return Audited(show, seeded, [_line(key, names, tables, looks, wrong) for key in keys], sorted(damaged))


async def repair(books: Books, show: Show) -> None:
    """Bring counters, limits and tables to what PostgreSQL says, while bookings go on."""
    if not show.managed or books.live is None:
        await books.transactional.recompute(show.id)
        return
    if await books.live.catch_up(show.id):
        await recount.recount(books.live, show.id)
    if not (await audit(books, show)).ok:
        await seeding.seed(books.live, show.id)
        await recount.recount(books.live, show.id)
    await books.transactional.rewrite(show.id)


async def strangers(live: LiveLedger, shows: Sequence[ShowId]) -> list[str]:
    """Keys of jobs and layers that no managed show knows; they count nothing and may go."""
    known = {
        keys.counting(name)
        for keys in (live.keys.of_show(str(show)) for show in shows)
        for name in await state.names_in_use(live.client, keys)
    }
    found = [
        key for pattern in (ACCT_JOB, ACCT_LAYER) for key in await state.keys_like(live.client, live.keys, pattern)
    ]
    return sorted(key for key in found if key not in known)


class _Seen(msgspec.Struct, frozen=True):
    """One key at one look: what procs held before and after it, what its tokens held, and what its counter said."""

    before: Usage = Usage()
    after: Usage = Usage()
    tokens: Usage = Usage()
    counter: Usage | None = None
    readable: bool = True

    @property
    def told(self) -> list[Usage]:
        """Redis's words for it."""
        return [self.tokens] if self.counter is None else [self.counter, self.tokens]

    @property
    def low(self) -> bool:
        return any(
            told.of(each) < min(self.before.of(each), self.after.of(each)) for told in self.told for each in RESOURCES
        )

    @property
    def high(self) -> bool:
        return any(
            told.of(each) > max(self.before.of(each), self.after.of(each)) for told in self.told for each in RESOURCES
        )

    @property
    def differs(self) -> bool:
        return not self.readable or self.low or self.high

    @property
    def ahead(self) -> tuple[int, ...]:
        return tuple(told.of(each) - self.after.of(each) for told in self.told for each in RESOURCES)


class _Look(msgspec.Struct, frozen=True):
    keys: Mapping[str, _Seen]
    flaws: set[Flaw]

    @property
    def differs(self) -> bool:
        return bool(self.flaws) or any(seen.differs for seen in self.keys.values())


async def _look(books: Books, live: LiveLedger, show: ShowId) -> _Look:
    keys = live.keys.of_show(str(show))
    before = await _held(books, show)
    tokens = await state.held(live.client, keys)
    counted = await state.counted(live.client, keys, {*before, *await state.names_in_use(live.client, keys)})
    after = await _held(books, show)
    seen = {
        name: _Seen(
            before.get(name, Usage()),
            after.get(name, Usage()),
            tokens.get(name, Usage()),
            each.usage if each.fields else None,
            readable=each.usage is not None,
        )
        for name, each in counted.items()
    }
    return _Look(seen, await soundness.flaws(live.client, keys))


async def _held(books: Books, show: ShowId) -> dict[str, Usage]:
    """What procs hold, by short name."""
    held: dict[str, Usage] = {}
    for each in await procs.sums(books.database, [show]):
        for level, thing in zip(LEVELS, (each.alloc, each.folder, each.job, each.layer, each.dept), strict=True):
            name = wire.name(level, thing)
            had = held.get(name, Usage())
            held[name] = Usage(had.cores + each.usage.cores, had.gpus + each.usage.gpus)
    return held


async def _wrong_limits(live: LiveLedger, show: ShowId) -> set[str]:
    """Short names whose limits in Redis are not those of PostgreSQL."""
    keys = live.keys.of_show(str(show))
    read = await live.limits.read(show)
    assert read is not None
    wanted = {name: dict(zip(fields[::2], fields[1::2], strict=True)) for name, _, fields in read.entries}
    there = {name async for name, _ in state.fields_of(live.client, keys.limits) if state.is_name(name)}
    found = await state.counted(live.client, keys, {*wanted, *there})
    return {
        name
        for name, each in found.items()
        if {field: value for field, value in each.fields.items() if field not in COUNTERS} != wanted.get(name, {})
        and (name in there or not name.startswith(("job:", "layer:")))
    }


async def _names(books: Books, show: Show) -> Mapping[UUID, str]:
    """What operators call things; jobs and layers go by their ids."""
    lists: list[list[Item]] = [
        await books.admin.subscriptions(show.name),
        await books.admin.folders(show.name),
        await books.admin.points(show.name),
    ]
    return {item.id: item.name for items in lists for item in items}


def _line(
    key: str,
    names: Mapping[UUID, str],
    tables: Mapping[str, Usage],
    looks: Sequence[_Look],
    wrong_limits: set[str],
) -> Line:
    level, thing = wire.named(key)
    seen = [look.keys.get(key, _Seen()) for look in looks]
    last = seen[-1]
    return Line(
        level,
        thing,
        names.get(thing, str(thing)),
        last.after,
        tables.get(key, Usage()),
        last.told[0] if last.readable else None,
        _problem(seen) or (Problem.LIMITS if key in wrong_limits else None),
    )


def _problem(seen: Sequence[_Seen]) -> Problem | None:
    if not all(look.readable for look in seen):
        return Problem.UNREADABLE
    if all(look.low for look in seen):
        return Problem.LOW
    if all(look.high for look in seen) and len({look.ahead for look in seen}) == 1:
        return Problem.HIGH
    return None


def _table_line(key: str, names: Mapping[UUID, str], held: Mapping[str, Usage], tables: Mapping[str, Usage]) -> Line:
    level, thing = wire.named(key)
    holds, table = held.get(key, Usage()), tables.get(key, Usage())
    problem = None if holds == table else Problem.TABLE
    return Line(level, thing, names.get(thing, str(thing)), holds, table, None, problem)
