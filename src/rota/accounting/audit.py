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

from rota.accounting import allocations
from rota.accounting.live import integrity, reconcile, script_args, seeding
from rota.accounting.live import reader as live_reader
from rota.accounting.live.integrity import IntegrityFlaw
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.resources import QuotaItem, Show
from rota.accounting.service import AccountingService
from rota.infra.redis.keys import ACCT_JOB, ACCT_LAYER
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, RESOURCES, Level, Usage

SAMPLES_MAX: Final = 5
SAMPLE_INTERVAL_S: Final = 0.1
COUNTER_FIELDS: Final = frozenset({"int_cores", "int_gpus"})


class LedgerProblem(StrEnum):
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


class LedgerAuditLine(msgspec.Struct, frozen=True):
    """One key. `redis` is its counter, or what its tokens hold where it has none; None if that cannot be read."""

    level: Level
    id: UUID
    name: str
    procs: Usage
    table: Usage
    redis: Usage | None
    problem: LedgerProblem | None = None


class LedgerAudit(msgspec.Struct, frozen=True):
    show: Show
    seeded: bool | None
    """Whether Redis books the show under its fence; None for an unmanaged show."""
    lines: Sequence[LedgerAuditLine]
    damaged: Sequence[str] = ()
    """Keys of the show that no script leaves as they are."""

    @property
    def ok(self) -> bool:
        return self.seeded is not False and not self.damaged and not any(line.problem for line in self.lines)


async def audit(books: AccountingService, show: Show) -> LedgerAudit:
    names = await _display_names(books, show)
    tables = {
        script_args.counter_name(level, thing): usage
        for (level, thing), usage in (await books.transactional.counters(show.id)).items()
    }
    if not show.managed or books.live is None:
        held = await _proc_usage(books, show.id)
        lines = [_table_line(key, names, held, tables) for key in sorted({*held, *tables})]
        return LedgerAudit(show, None, lines)
    looks = [await _sample(books, books.live, show.id)]
    while len(looks) < SAMPLES_MAX and looks[-1].differs:
        await asyncio.sleep(SAMPLE_INTERVAL_S)
        looks.append(await _sample(books, books.live, show.id))
    seeded = await books.live.is_seeded(show.id, (await books.managed_shows()).get(show.id, 0))
    wrong = await _mismatched_limits(books.live, show.id) if seeded else set()
    keys = sorted({key for look in looks for key in look.keys} | wrong)
    damaged = {key for key, _, _ in set.intersection(*(look.flaws for look in looks))} if seeded else set()
    return LedgerAudit(show, seeded, [_line(key, names, tables, looks, wrong) for key in keys], sorted(damaged))


async def repair(books: AccountingService, show: Show) -> None:
    """Bring counters, limits and tables to what PostgreSQL says, while bookings go on."""
    if not show.managed or books.live is None:
        await books.transactional.recompute(show.id)
        return
    if await books.live.sync_limits(show.id):
        await reconcile.reconcile_show(books.live, show.id)
    if not (await audit(books, show)).ok:
        await seeding.seed(books.live, show.id)
        await reconcile.reconcile_show(books.live, show.id)
    await books.transactional.refresh_managed_tables(show.id)


async def orphan_keys(live: LiveLedger, shows: Sequence[ShowId]) -> list[str]:
    """Keys of jobs and layers that no managed show knows; they count nothing and may go."""
    known = {
        keys.counter_key(name)
        for keys in (live.keys.show_keys(str(show)) for show in shows)
        for name in await live_reader.names_in_use(live.client, keys)
    }
    found = [
        key
        for pattern in (ACCT_JOB, ACCT_LAYER)
        for key in await live_reader.scan_keys(live.client, live.keys, pattern)
    ]
    return sorted(key for key in found if key not in known)


class _CounterSample(msgspec.Struct, frozen=True):
    """One key at one look: what procs held before and after it, what its tokens held, and what its counter said."""

    before: Usage = Usage()
    after: Usage = Usage()
    tokens: Usage = Usage()
    counter: Usage | None = None
    readable: bool = True

    @property
    def redis_usages(self) -> list[Usage]:
        """Redis's words for it."""
        return [self.tokens] if self.counter is None else [self.counter, self.tokens]

    @property
    def low(self) -> bool:
        return any(
            told.of(each) < min(self.before.of(each), self.after.of(each))
            for told in self.redis_usages
            for each in RESOURCES
        )

    @property
    def high(self) -> bool:
        return any(
            told.of(each) > max(self.before.of(each), self.after.of(each))
            for told in self.redis_usages
            for each in RESOURCES
        )

    @property
    def differs(self) -> bool:
        return not self.readable or self.low or self.high

    @property
    def excess(self) -> tuple[int, ...]:
        return tuple(told.of(each) - self.after.of(each) for told in self.redis_usages for each in RESOURCES)


class _AuditSample(msgspec.Struct, frozen=True):
    keys: Mapping[str, _CounterSample]
    flaws: set[IntegrityFlaw]

    @property
    def differs(self) -> bool:
        return bool(self.flaws) or any(seen.differs for seen in self.keys.values())


async def _sample(books: AccountingService, live: LiveLedger, show: ShowId) -> _AuditSample:
    keys = live.keys.show_keys(str(show))
    before = await _proc_usage(books, show)
    tokens = await live_reader.usage_by_name(live.client, keys)
    counted = await live_reader.read_counters(
        live.client, keys, {*before, *await live_reader.names_in_use(live.client, keys)}
    )
    after = await _proc_usage(books, show)
    seen = {
        name: _CounterSample(
            before.get(name, Usage()),
            after.get(name, Usage()),
            tokens.get(name, Usage()),
            each.usage if each.fields else None,
            readable=each.usage is not None,
        )
        for name, each in counted.items()
    }
    return _AuditSample(seen, await integrity.find_flaws(live.client, keys))


async def _proc_usage(books: AccountingService, show: ShowId) -> dict[str, Usage]:
    """What procs hold, by short name."""
    held: dict[str, Usage] = {}
    for each in await allocations.sums(books.database, [show]):
        for level, thing in zip(LEVELS, (each.alloc, each.folder, each.job, each.layer, each.dept), strict=True):
            name = script_args.counter_name(level, thing)
            had = held.get(name, Usage())
            held[name] = Usage(had.cores + each.usage.cores, had.gpus + each.usage.gpus)
    return held


async def _mismatched_limits(live: LiveLedger, show: ShowId) -> set[str]:
    """Short names whose limits in Redis are not those of PostgreSQL."""
    keys = live.keys.show_keys(str(show))
    read = await live.limits.read(show)
    assert read is not None
    wanted = {name: dict(zip(fields[::2], fields[1::2], strict=True)) for name, _, fields in read.entries}
    there = {
        name async for name, _ in live_reader.scan_hash(live.client, keys.limits) if live_reader.is_counter_name(name)
    }
    found = await live_reader.read_counters(live.client, keys, {*wanted, *there})
    return {
        name
        for name, each in found.items()
        if {field: value for field, value in each.fields.items() if field not in COUNTER_FIELDS} != wanted.get(name, {})
        and (name in there or not name.startswith(("job:", "layer:")))
    }


async def _display_names(books: AccountingService, show: Show) -> Mapping[UUID, str]:
    """What operators call things; jobs and layers go by their ids."""
    lists: list[list[QuotaItem]] = [
        await books.admin.subscriptions(show.name),
        await books.admin.folders(show.name),
        await books.admin.points(show.name),
    ]
    return {item.id: item.name for items in lists for item in items}


def _line(
    key: str,
    names: Mapping[UUID, str],
    tables: Mapping[str, Usage],
    looks: Sequence[_AuditSample],
    wrong_limits: set[str],
) -> LedgerAuditLine:
    level, thing = script_args.parse_counter_name(key)
    seen = [look.keys.get(key, _CounterSample()) for look in looks]
    last = seen[-1]
    return LedgerAuditLine(
        level,
        thing,
        names.get(thing, str(thing)),
        last.after,
        tables.get(key, Usage()),
        last.redis_usages[0] if last.readable else None,
        _problem(seen) or (LedgerProblem.LIMITS if key in wrong_limits else None),
    )


def _problem(seen: Sequence[_CounterSample]) -> LedgerProblem | None:
    if not all(look.readable for look in seen):
        return LedgerProblem.UNREADABLE
    if all(look.low for look in seen):
        return LedgerProblem.LOW
    if all(look.high for look in seen) and len({look.excess for look in seen}) == 1:
        return LedgerProblem.HIGH
    return None


def _table_line(
    key: str, names: Mapping[UUID, str], held: Mapping[str, Usage], tables: Mapping[str, Usage]
) -> LedgerAuditLine:
    level, thing = script_args.parse_counter_name(key)
    holds, table = held.get(key, Usage()), tables.get(key, Usage())
    problem = None if holds == table else LedgerProblem.TABLE
    return LedgerAuditLine(level, thing, names.get(thing, str(thing)), holds, table, None, problem)
