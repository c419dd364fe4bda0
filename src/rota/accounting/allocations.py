"""Rows of `proc`: the canonical record of bookings; every counter is a sum over them.

Invariants and what enforces them:
- `rota.proc_insert` and `rota.proc_delete` hold the show lock shared from the check of flag and fence to the end of the
  transaction; raising the fence, flipping the show and tombstoning tokens without a row hold it exclusive. So no insert
  commits under an outdated fence;
- a token has at most one row in its life. Concurrent inserts: the primary key. Later inserts: the transaction that
  deletes a row tombstones its token, and an insert checks the tombstones after its rows are in, since it may have
  waited for that deletion. A tombstone holds a range of consecutive tokens, so a batch of frames costs one. It is
  needed while a release of its time may be in flight to Redis; Redis refuses those under a higher fence, and then it is
  pruned;
- rows are inserted by a plain INSERT. A rare repeat takes the slow path in a subtransaction: it is compared with the
  existing row and reported as `already`, even if the fence has risen since, or as tombstoned;
- a row is released at the keys it was charged to, even if its job or host has moved since;
- frames in series (ADR 23) have a row each. Only that of the last one, the carrier, has a charge, and it is deleted
  with the last row of the series (`rota.proc_end`): as long as a frame of the series may run, the charge is there.

A transaction that inserts or deletes for several shows must do so in the order of their ids, because each call keeps
the lock of its show. A crash before COMMIT leaves nothing, after it everything; after a lost reply, repeat the call.

Sums read the whole table once with a hash aggregate, for all shows together. The table has one row per running frame,
so it is small and hot: 100,000 rows of 20 shows took 35 ms, 1,000,000 took 0.3 s, every two minutes, beside inserts of
4 to 8 us a row in batches of 256. An index on pk_show saved a single show half of those milliseconds and cost every
insert 20 % and more. Reconciliation and adoption read ranges of tokens, which the primary key serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from uuid import UUID

import msgspec

from rota.accounting.ledger import (
    BATCH_MAX,
    NIL_UUID,
    TOKEN_END,
    BookingBatch,
    BookingGroup,
    Charge,
    DeclineReason,
    ReleasedTokens,
    SingleFrameBatch,
    check_booking,
    check_tokens,
)
from rota.infra import failpoints
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.quota import Usage
from rota.model.token_ranges import to_spans
from rota.model.units import Centicores

INSERT = query(__package__, "proc_insert")
DELETE = query(__package__, "proc_delete")
TOMBSTONE = query(__package__, "proc_bury")
TOMBSTONED = query(__package__, "proc_buried")
TOMBSTONE_COUNTS = query(__package__, "proc_graves")
PRUNE_TOMBSTONES = query(__package__, "proc_graves_prune")
PAGE = query(__package__, "proc_page")
PAGE_GROUPS = query(__package__, "proc_page_groups")
TOKENS = query(__package__, "proc_tokens")
SUMS = query(__package__, "proc_sums")

GroupColumns = tuple[list[UUID] | list[int], ...]
RangeColumns = tuple[list[int], list[int], list[int]]


class ProcInsertResult(msgspec.Struct, frozen=True):
    """Tokens of a batch, with followers, that this call did not insert; all others were inserted."""

    already: Sequence[int] = []
    """Had a row with the same charge and host: booked."""
    refused: dict[int, DeclineReason] = {}
    """Have no row and get none from this call."""


class ProcDeleteResult(msgspec.Struct, frozen=True):
    """Charges that ended. Followers in a series have none, and are not in it."""

    released: Sequence[ReleasedTokens]
    managed: bool
    """Whether Redis counts these tokens too, so that the release must be published after the commit."""
    fence: int
    """The fence of the show at the deletion, 0 if nothing was deleted; Redis ignores the release under a higher one."""
    swarms: Sequence[SingleFrameBatch] = ()
    """Further released tokens, of jobs with one frame each."""

    @property
    def frames(self) -> int:
        return sum(len(each.tokens) for each in self.released) + sum(len(each.tokens) for each in self.swarms)

    @property
    def batch(self) -> BookingBatch:
        """The released tokens, for the release publisher."""
        return [*(BookingGroup(each.charge, NIL_UUID, each.tokens) for each in self.released), *self.swarms]

    def tokens(self) -> list[int]:
        return [token for group in self.batch for token in group.tokens]

    def plus(self, other: ProcDeleteResult) -> ProcDeleteResult:
        """The sum of two deletions in a show, each of which was published by itself."""
        released, swarms = [*self.released, *other.released], [*self.swarms, *other.swarms]
        return ProcDeleteResult(released, other.managed, other.fence, swarms)

    def by_pool(self) -> dict[PoolId, Usage]:
        """Released resources by pool."""
        usage: dict[PoolId, Usage] = {}
        for group in self.batch:
            pool = group.charge.alloc
            usage[pool] = usage.get(pool, Usage()).plus(group.charge.ask, len(group.tokens))
        return usage

    def by_job(self) -> Counter[UUID]:
        """Number of released frames per job."""
        jobs: Counter[UUID] = Counter()
        for each in self.released:
            jobs[each.charge.job] += len(each.tokens)
        for batch in self.swarms:
            jobs.update(batch.jobs)
        return jobs


class Proc(msgspec.Struct, frozen=True):
    token: int
    charge: Charge
    host: UUID
    fence: int


class ChargePage(NamedTuple):
    groups: list[tuple[Charge, list[int]]]
    last: int | None
    """The last token of the page, None when it is empty; the next page starts behind it."""


class ProcUsage(msgspec.Struct, frozen=True):
    """The sum of procs that are charged to the same keys."""

    show: ShowId
    alloc: PoolId
    folder: FolderId
    job: JobId
    layer: LayerId
    dept: DeptId
    usage: Usage
    procs: int


async def insert(on: Database | Transaction, show: ShowId, fence: int, groups: BookingBatch) -> ProcInsertResult:
    """Insert rows for bookings made in Redis under `fence`. Idempotent."""
    check_booking(groups)
    failpoints.hit("procs.before_insert")
    rows = await on.rows(INSERT, show, fence, *booking_columns(groups))
    failpoints.after_send("procs.insert")
    reasons = {row["token"]: DeclineReason(row["why"]) for row in rows}
    return ProcInsertResult(
        already=sorted(token for token, why in reasons.items() if why is DeclineReason.ALREADY),
        refused={token: why for token, why in reasons.items() if why is not DeclineReason.ALREADY},
    )


async def delete(on: Database | Transaction, show: ShowId, tokens: Iterable[int]) -> ProcDeleteResult:
    """Delete rows and tombstone their tokens; for an unmanaged show the same statement releases the five tables."""
    failpoints.hit("procs.before_delete")
    rows = await on.rows(DELETE, show, *_range_bounds(tokens))
    failpoints.after_send("procs.delete")
    charged = (row for row in rows if row["cores"] or row["gpus"])
    released = [ReleasedTokens(charge_from_row(row), row["tokens"]) for row in charged]
    return (
        ProcDeleteResult(released, rows[0]["managed"], rows[0]["fence"])
        if rows
        else ProcDeleteResult([], managed=False, fence=0)
    )


async def tombstone(on: Database | Transaction, show: ShowId, tokens: Sequence[int]) -> set[int]:
    """Tombstone tokens without a row; returns the tokens that will never have one. Waits for concurrent inserts."""
    failpoints.hit("procs.before_bury")
    tombstoned_now = {row["token"] for row in await on.rows(TOMBSTONE, show, tokens)}
    failpoints.after_send("procs.bury")
    return tombstoned_now


async def tombstoned(on: Database | Transaction, show: ShowId, tokens: Iterable[int]) -> set[int]:
    """Those of the tokens that are tombstoned: released, or barred from ever having a row."""
    return set(await on.value(TOMBSTONED, show, *_range_bounds(tokens)))


async def count_tombstones(on: Database | Transaction) -> dict[ShowId, int]:
    """Number of tombstones per show under its current fence; only a higher fence makes them obsolete."""
    return {ShowId(row["pk_show"]): row["graves"] for row in await on.rows(TOMBSTONE_COUNTS)}


async def prune_tombstones(on: Database | Transaction, most: int = 5000) -> int:
    """Remove all tombstones that a higher fence has made obsolete, `most` at a time; returns how many."""
    removed, after = 0, (UUID(int=0), -1, -1)
    while (row := await on.row(PRUNE_TOMBSTONES, most, *after)) is not None:
        removed += row["removed"]
        after = (row["pk_show"], row["int_fence"], row["token_last"])
    return removed


async def page(
    on: Database | Transaction, show: ShowId, first: int = 0, last: int = TOKEN_END, most: int = BATCH_MAX
) -> list[Proc]:
    """Rows of a show in a token range, both ends included. Fewer rows than `most` mean that it is the last page."""
    rows = await on.rows(PAGE, show, first, last, most)
    return [Proc(row["token"], charge_from_row(row), row["pk_host"], row["fence"]) for row in rows]


async def page_groups(on: Database | Transaction, show: ShowId, first: int = 0, most: int = BATCH_MAX) -> ChargePage:
    """The next rows of a show from token `first`, grouped by charge, each with its tokens in order."""
    rows = await on.rows(PAGE_GROUPS, show, first, most)
    groups = [(charge_from_row(row), row["tokens"]) for row in rows]
    return ChargePage(groups, max((held[-1] for _, held in groups), default=None))


async def tokens(on: Database | Transaction, show: ShowId, first: int, last: int) -> list[int]:
    """Tokens that have a row, in a range with both ends included, in order."""
    found: list[int] = await on.value(TOKENS, show, first, last)
    return found


async def sums(on: Database | Transaction, shows: Sequence[ShowId]) -> list[ProcUsage]:
    """Booked resources of these shows, from one snapshot."""
    rows = await on.rows(SUMS, shows)
    return [
        ProcUsage(
            row["pk_show"],
            row["pk_alloc"],
            row["pk_folder"],
            row["pk_job"],
            row["pk_layer"],
            row["pk_dept"],
            Usage(row["cores"], row["gpus"]),
            row["procs"],
        )
        for row in rows
    ]


def charge_from_row(row: Record) -> Charge:
    return Charge(
        PoolId(row["pk_alloc"]),
        FolderId(row["pk_folder"]),
        JobId(row["pk_job"]),
        LayerId(row["pk_layer"]),
        DeptId(row["pk_dept"]),
        Centicores(row["cores"]),
        row["gpus"],
    )


def booking_columns(groups: BookingBatch) -> tuple[list[UUID] | list[int], ...]:
    """A batch as arguments of `rota.proc_insert` and `rota.ledger_book`: the groups, then those of followers."""
    followers = [each for group in groups if group.series for each in _follower_groups(group)]
    return (
        *_group_columns([*groups, *followers]),
        *_range_columns([*groups, *followers]),
        [each.tokens[0] for group in groups for each in group.series.values()],
        [carrier for group in groups for carrier in group.series],
    )


def _follower_groups(group: BookingGroup | SingleFrameBatch) -> Iterator[BookingGroup | SingleFrameBatch]:
    """The followers of a group as groups that ask for nothing."""
    charge = group.charge
    free = Charge(charge.alloc, charge.folder, charge.job, charge.layer, charge.dept, Centicores(0), 0)
    for each in group.series.values():
        if isinstance(group, BookingGroup) and len(each.tokens) > 1 and {*each.layers} == {charge.layer}:
            yield BookingGroup(free, group.host, each.tokens)
        else:
            yield SingleFrameBatch(free, group.host, each.tokens, each.jobs, each.layers)


def _group_columns(groups: BookingBatch) -> GroupColumns:
    """Columns for `rota.ledger_group`: the distinct shapes, then per group or single frame the index of its shape (from
    1), its job and its layer. Shapes keep the long columns short."""
    shapes: dict[tuple[UUID, UUID, UUID, UUID, int, int], int] = {}
    shape_of: list[int] = []
    jobs: list[UUID] = []
    layers: list[UUID] = []
    for group in groups:
        charge = group.charge
        shape = (charge.alloc, charge.folder, charge.dept, group.host, charge.cores, charge.gpus)
        shape_number = shapes.setdefault(shape, len(shapes) + 1)
        if isinstance(group, SingleFrameBatch):
            shape_of += [shape_number] * len(group.tokens)
            jobs += group.jobs
            layers += group.layers
        else:
            shape_of.append(shape_number)
            jobs.append(charge.job)
            layers.append(charge.layer)
    shared = tuple(list(column) for column in zip(*shapes, strict=True)) or ([],) * 6
    return (*shared, shape_of, jobs, layers)


def _range_columns(groups: BookingBatch) -> RangeColumns:
    """The group number (from 1), first and last token of each range."""
    columns: RangeColumns = ([], [], [])
    owners, firsts, lasts = columns
    number = 1
    for group in groups:
        if isinstance(group, SingleFrameBatch):
            owners += range(number, number + len(group.tokens))
            firsts += group.tokens
            lasts += group.tokens
            number += len(group.tokens)
            continue
        for first, last in to_spans(group.tokens):
            owners.append(number)
            firsts.append(first)
            lasts.append(last)
        number += 1
    return columns


def _range_bounds(tokens: Iterable[int]) -> tuple[list[int], list[int]]:
    """First and last of each token range, ascending."""
    spans = list(to_spans(tokens if isinstance(tokens, range) and tokens.step == 1 else sorted(set(tokens))))
    check_tokens(spans)
    return [first for first, _ in spans], [last for _, last in spans]
