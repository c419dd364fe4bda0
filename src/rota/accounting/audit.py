"""The ledger audit: compares counters in Redis, the five tables and `proc`, key by key; and repairs differences.

The audit stops nothing, so during bookings a counter may briefly be ahead of `proc`. A difference is reported when it
is the same in several samples, or when Redis counts *less* than `proc` in all of them. Redis holds usage twice, as
counters and as tokens: both are compared with `proc`, and the token keys are checked against each other. The tables of
a managed show are refreshed by the recompute loop: they are displayed, and count as wrong only for unmanaged shows.

The repair syncs limits and reconciles, both beside running bookings. If that does not suffice it seeds the show again,
which takes everything from PostgreSQL.
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
    """Redis counts less than `proc`: a cap could be exceeded."""
    HIGH = "high"
    """Redis counts more than `proc`: free capacity is withheld."""
    UNREADABLE = "unreadable"
    """The key has another type, or numbers that no script writes."""
    LIMITS = "limits"
    """The limits in Redis differ from those in PostgreSQL."""
    TABLE = "table"
    """The table of an unmanaged show differs from `proc`."""


class LedgerAuditLine(msgspec.Struct, frozen=True):
    """One key. `redis` is its counter, or the sum of its tokens where it has none; None if unreadable."""

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
    """Keys of the show in a state that no script leaves behind."""

    @property
    def ok(self) -> bool:
        return self.seeded is not False and not self.damaged and not any(line.problem for line in self.lines)


async def audit(accounting: AccountingService, show: Show) -> LedgerAudit:
    names = await _display_names(accounting, show)
    tables = {
        script_args.counter_name(level, thing): usage
        for (level, thing), usage in (await accounting.transactional.counters(show.id)).items()
    }
    if not show.managed or accounting.live is None:
        held = await _proc_usage(accounting, show.id)
        lines = [_table_line(key, names, held, tables) for key in sorted({*held, *tables})]
        return LedgerAudit(show, None, lines)
    samples = [await _sample(accounting, accounting.live, show.id)]
    while len(samples) < SAMPLES_MAX and samples[-1].differs:
        await asyncio.sleep(SAMPLE_INTERVAL_S)
        samples.append(await _sample(accounting, accounting.live, show.id))
    seeded = await accounting.live.is_seeded(show.id, (await accounting.managed_shows()).get(show.id, 0))
    wrong = await _mismatched_limits(accounting.live, show.id) if seeded else set()
    keys = sorted({key for sample in samples for key in sample.keys} | wrong)
    damaged = {key for key, _, _ in set.intersection(*(sample.flaws for sample in samples))} if seeded else set()
    return LedgerAudit(show, seeded, [_line(key, names, tables, samples, wrong) for key in keys], sorted(damaged))


async def repair(accounting: AccountingService, show: Show) -> None:
    """Bring counters, limits and tables to the state of PostgreSQL, beside running bookings."""
    if not show.managed or accounting.live is None:
        await accounting.transactional.recompute(show.id)
        return
    if await accounting.live.sync_limits(show.id):
        await reconcile.reconcile_show(accounting.live, show.id)
    if not (await audit(accounting, show)).ok:
        await seeding.seed(accounting.live, show.id)
        await reconcile.reconcile_show(accounting.live, show.id)
    await accounting.transactional.refresh_managed_tables(show.id)


async def orphan_keys(live: LiveLedger, shows: Sequence[ShowId]) -> list[str]:
    """Keys of jobs and layers that belong to no managed show; they count nothing and may be deleted."""
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
    """One key in one sample: `proc` before and after it, the sum of its tokens, and its counter."""

    before: Usage = Usage()
    after: Usage = Usage()
    tokens: Usage = Usage()
    counter: Usage | None = None
    readable: bool = True

    @property
    def redis_usages(self) -> list[Usage]:
        """Usage according to Redis: the counter, if there is one, and the tokens."""
        return [self.tokens] if self.counter is None else [self.counter, self.tokens]

    @property
    def low(self) -> bool:
        return any(
            usage.of(each) < min(self.before.of(each), self.after.of(each))
            for usage in self.redis_usages
            for each in RESOURCES
        )

    @property
    def high(self) -> bool:
        return any(
            usage.of(each) > max(self.before.of(each), self.after.of(each))
            for usage in self.redis_usages
            for each in RESOURCES
        )

    @property
    def differs(self) -> bool:
        return not self.readable or self.low or self.high

    @property
    def excess(self) -> tuple[int, ...]:
        return tuple(usage.of(each) - self.after.of(each) for usage in self.redis_usages for each in RESOURCES)


class _AuditSample(msgspec.Struct, frozen=True):
    keys: Mapping[str, _CounterSample]
    flaws: set[IntegrityFlaw]

    @property
    def differs(self) -> bool:
        return bool(self.flaws) or any(counter.differs for counter in self.keys.values())


async def _sample(accounting: AccountingService, live: LiveLedger, show: ShowId) -> _AuditSample:
    keys = live.keys.show_keys(str(show))
    before = await _proc_usage(accounting, show)
    tokens = await live_reader.usage_by_name(live.client, keys)
    counted = await live_reader.read_counters(
        live.client, keys, {*before, *await live_reader.names_in_use(live.client, keys)}
    )
    after = await _proc_usage(accounting, show)
    samples = {
        name: _CounterSample(
            before.get(name, Usage()),
            after.get(name, Usage()),
            tokens.get(name, Usage()),
            each.usage if each.fields else None,
            readable=each.usage is not None,
        )
        for name, each in counted.items()
    }
    return _AuditSample(samples, await integrity.find_flaws(live.client, keys))


async def _proc_usage(accounting: AccountingService, show: ShowId) -> dict[str, Usage]:
    """Usage by `proc`, by short name."""
    held: dict[str, Usage] = {}
    for each in await allocations.sums(accounting.database, [show]):
        for level, thing in zip(LEVELS, (each.alloc, each.folder, each.job, each.layer, each.dept), strict=True):
            name = script_args.counter_name(level, thing)
            before = held.get(name, Usage())
            held[name] = Usage(before.cores + each.usage.cores, before.gpus + each.usage.gpus)
    return held


async def _mismatched_limits(live: LiveLedger, show: ShowId) -> set[str]:
    """Short names whose limits in Redis differ from those in PostgreSQL."""
    keys = live.keys.show_keys(str(show))
    read = await live.limits.read(show)
    assert read is not None
    expected = {name: dict(zip(fields[::2], fields[1::2], strict=True)) for name, _, fields in read.entries}
    in_redis = {
        name async for name, _ in live_reader.scan_hash(live.client, keys.limits) if live_reader.is_counter_name(name)
    }
    found = await live_reader.read_counters(live.client, keys, {*expected, *in_redis})
    return {
        name
        for name, each in found.items()
        if {field: value for field, value in each.fields.items() if field not in COUNTER_FIELDS}
        != expected.get(name, {})
        and (name in in_redis or not name.startswith(("job:", "layer:")))
    }


async def _display_names(accounting: AccountingService, show: Show) -> Mapping[UUID, str]:
    """Names of things as operators know them; jobs and layers are missing and shown by id."""
    lists: list[list[QuotaItem]] = [
        await accounting.admin.subscriptions(show.name),
        await accounting.admin.folders(show.name),
        await accounting.admin.points(show.name),
    ]
    return {item.id: item.name for items in lists for item in items}


def _line(
    key: str,
    names: Mapping[UUID, str],
    tables: Mapping[str, Usage],
    samples: Sequence[_AuditSample],
    wrong_limits: set[str],
) -> LedgerAuditLine:
    level, thing = script_args.parse_counter_name(key)
    key_samples = [sample.keys.get(key, _CounterSample()) for sample in samples]
    last = key_samples[-1]
    return LedgerAuditLine(
        level,
        thing,
        names.get(thing, str(thing)),
        last.after,
        tables.get(key, Usage()),
        last.redis_usages[0] if last.readable else None,
        _problem(key_samples) or (LedgerProblem.LIMITS if key in wrong_limits else None),
    )


def _problem(samples: Sequence[_CounterSample]) -> LedgerProblem | None:
    if not all(sample.readable for sample in samples):
        return LedgerProblem.UNREADABLE
    if all(sample.low for sample in samples):
        return LedgerProblem.LOW
    if all(sample.high for sample in samples) and len({sample.excess for sample in samples}) == 1:
        return LedgerProblem.HIGH
    return None


def _table_line(
    key: str, names: Mapping[UUID, str], held: Mapping[str, Usage], tables: Mapping[str, Usage]
) -> LedgerAuditLine:
    level, thing = script_args.parse_counter_name(key)
    holds, table = held.get(key, Usage()), tables.get(key, Usage())
    problem = None if holds == table else LedgerProblem.TABLE
    return LedgerAuditLine(level, thing, names.get(thing, str(thing)), holds, table, None, problem)
