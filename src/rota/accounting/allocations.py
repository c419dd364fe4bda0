"""Rows of `proc`, which are what is booked: everything else about bookings is a sum over them.

Who keeps what:
- `rota.proc_insert` and `rota.proc_delete` hold the show's lock shared from the look at flag and fence until the end of
  the transaction; who raises the fence, flips the show or buries tokens without a row holds it exclusive. So nobody
  inserts under a fence that has risen, in commit order;
- a token has one row in its life. Two at a time: the primary key. One after the other: the transaction that deletes a
  row buries its token, and an insert looks at the graves once its rows are in, since it may have waited for just that
  deletion. A grave holds a run of consecutive tokens, so a batch of frames costs one. It is needed while a release of
  its time may still be on its way to Redis; those are refused under a higher fence, and then it is pruned;
- rows are inserted plainly; the rare repeat takes the slow path in a subtransaction, is compared with what is there and
  told as `already`, even if the fence has risen since, or as tombstoned if it lies in a grave;
- what a row holds is given back to the keys it was charged to, wherever its job or host belongs now.

A transaction that inserts or deletes for several shows does it in the order of their ids, since each call keeps the
lock of its show. If we die before the COMMIT nothing happened, after it everything did; a lost reply is had again by
calling again.

How sums are read: one pass over the whole table and a hash aggregate, for all shows at once. With one row per running
frame the table is small and hot: 100,000 rows of 20 shows took 35 ms, 1,000,000 took 0.3 s, every two minutes, beside
inserts of 4 to 8 us a row in batches of 256. An index on pk_show spared a single show half of those milliseconds and
cost every insert 20 % and more, all day. Recounts and adoption read ranges of tokens, which the primary key serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
    token_ranges,
)
from rota.infra import failpoints
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.quota import Usage
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
    """Tokens of a batch that got no row now; all others did."""

    already: Sequence[int] = []
    """Had their row, with the same charge and host: booked."""
    refused: dict[int, DeclineReason] = {}
    """Have none, and get none from this call."""


class ProcDeleteResult(msgspec.Struct, frozen=True):
    released: Sequence[ReleasedTokens]
    managed: bool
    """Whether Redis counts these, too, and must be told once the transaction is committed."""
    fence: int
    """Of the show when they were deleted, 0 if nothing was: Redis takes the release under this one only."""
    swarms: Sequence[SingleFrameBatch] = ()
    """What else was released, of jobs of one frame each."""

    @property
    def frames(self) -> int:
        return sum(len(each.tokens) for each in self.released) + sum(len(each.tokens) for each in self.swarms)

    @property
    def batch(self) -> BookingBatch:
        """For the ledger that is told of it."""
        return [*(BookingGroup(each.charge, NIL_UUID, each.tokens) for each in self.released), *self.swarms]

    def by_job(self) -> Counter[UUID]:
        """How many frames of each job."""
        jobs: Counter[UUID] = Counter()
        for each in self.released:
            jobs[each.charge.job] += len(each.tokens)
        for swarm in self.swarms:
            jobs.update(swarm.jobs)
        return jobs


class Proc(msgspec.Struct, frozen=True):
    token: int
    charge: Charge
    host: UUID
    fence: int


class ChargePage(NamedTuple):
    groups: list[tuple[Charge, list[int]]]
    last: int | None
    """The last token of the page, None when it is empty: behind it the next one starts."""


class ProcUsage(msgspec.Struct, frozen=True):
    """What procs hold that are charged to the same keys."""

    show: ShowId
    alloc: PoolId
    folder: FolderId
    job: JobId
    layer: LayerId
    dept: DeptId
    usage: Usage
    procs: int


async def insert(on: Database | Transaction, show: ShowId, fence: int, groups: BookingBatch) -> ProcInsertResult:
    """Insert what was booked in Redis under `fence`. Repeating it is free."""
    check_booking(groups)
    failpoints.hit("procs.before_insert")
    rows = await on.rows(INSERT, show, fence, *group_columns(groups), *range_columns(groups))
    failpoints.after_send("procs.insert")
    told = {row["token"]: DeclineReason(row["why"]) for row in rows}
    return ProcInsertResult(
        already=sorted(token for token, why in told.items() if why is DeclineReason.ALREADY),
        refused={token: why for token, why in told.items() if why is not DeclineReason.ALREADY},
    )


async def delete(on: Database | Transaction, show: ShowId, tokens: Iterable[int]) -> ProcDeleteResult:
    """Delete rows and bury their tokens; an unmanaged show's are given back in the five tables by the same step."""
    failpoints.hit("procs.before_delete")
    rows = await on.rows(DELETE, show, *_range_bounds(tokens))
    failpoints.after_send("procs.delete")
    released = [ReleasedTokens(charge_from_row(row), row["tokens"]) for row in rows]
    return (
        ProcDeleteResult(released, rows[0]["managed"], rows[0]["fence"])
        if rows
        else ProcDeleteResult([], managed=False, fence=0)
    )


async def tombstone(on: Database | Transaction, show: ShowId, tokens: Sequence[int]) -> set[int]:
    """Bury what has no row; returns the tokens that never will have one. Waits for inserts under way."""
    failpoints.hit("procs.before_bury")
    buried = {row["token"] for row in await on.rows(TOMBSTONE, show, tokens)}
    failpoints.after_send("procs.bury")
    return buried


async def tombstoned(on: Database | Transaction, show: ShowId, tokens: Iterable[int]) -> set[int]:
    """Those of the tokens that lie in a grave: they were released, or will never have a row."""
    return set(await on.value(TOMBSTONED, show, *_range_bounds(tokens)))


async def count_tombstones(on: Database | Transaction) -> dict[ShowId, int]:
    """How many graves each show has that only a higher fence would make needless."""
    return {ShowId(row["pk_show"]): row["graves"] for row in await on.rows(TOMBSTONE_COUNTS)}


async def prune_tombstones(on: Database | Transaction, most: int = 1000) -> int:
    """Remove graves that a higher fence has made needless; returns how many."""
    return await on.run(PRUNE_TOMBSTONES, most)


async def page(
    on: Database | Transaction, show: ShowId, first: int = 0, last: int = TOKEN_END, most: int = BATCH_MAX
) -> list[Proc]:
    """Rows of a show from one token to another, both included. A shorter answer than `most` is the end."""
    rows = await on.rows(PAGE, show, first, last, most)
    return [Proc(row["token"], charge_from_row(row), row["pk_host"], row["fence"]) for row in rows]


async def page_groups(on: Database | Transaction, show: ShowId, first: int = 0, most: int = BATCH_MAX) -> ChargePage:
    """The next rows of a show from a token on, by charge, each with its tokens in order."""
    rows = await on.rows(PAGE_GROUPS, show, first, most)
    groups = [(charge_from_row(row), row["tokens"]) for row in rows]
    return ChargePage(groups, max((held[-1] for _, held in groups), default=None))


async def tokens(on: Database | Transaction, show: ShowId, first: int, last: int) -> list[int]:
    """Tokens that have a row, from one to another, both included, in order."""
    found: list[int] = await on.value(TOKENS, show, first, last)
    return found


async def sums(on: Database | Transaction, shows: Sequence[ShowId]) -> list[ProcUsage]:
    """What is booked in these shows, from one snapshot."""
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


def group_columns(groups: BookingBatch) -> GroupColumns:
    """What groups have in common, each once; then of every group, and of every frame of a swarm, which of these it has
    (from 1), its job and its layer. A column is as dear to send as it is long."""
    shapes: dict[tuple[UUID, UUID, UUID, UUID, int, int], int] = {}
    of: list[int] = []
    jobs: list[UUID] = []
    layers: list[UUID] = []
    for group in groups:
        charge = group.charge
        shape = (charge.alloc, charge.folder, charge.dept, group.host, charge.cores, charge.gpus)
        place = shapes.setdefault(shape, len(shapes) + 1)
        if isinstance(group, SingleFrameBatch):
            of += [place] * len(group.tokens)
            jobs += group.jobs
            layers += group.layers
        else:
            of.append(place)
            jobs.append(charge.job)
            layers.append(charge.layer)
    shared = tuple(list(column) for column in zip(*shapes, strict=True)) or ([],) * 6
    return (*shared, of, jobs, layers)


def range_columns(groups: BookingBatch) -> RangeColumns:
    """The number of the group (from 1), first and last token of each run."""
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
        for first, last in token_ranges(group.tokens):
            owners.append(number)
            firsts.append(first)
            lasts.append(last)
        number += 1
    return columns


def _range_bounds(tokens: Iterable[int]) -> tuple[list[int], list[int]]:
    """First and last of each run of the tokens, ascending."""
    spans = list(token_ranges(tokens if isinstance(tokens, range) and tokens.step == 1 else sorted(set(tokens))))
    check_tokens(spans)
    return [first for first, _ in spans], [last for _, last in spans]
