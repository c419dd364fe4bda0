"""The transactional ledger: accounting of unmanaged shows, in PostgreSQL alone.

Counters of the five tables and `proc` rows change in one transaction, which is one function call:
- `rota.ledger_book` takes the show lock shared, then every row that the batch counts in, by level and id, so batches
  cannot deadlock; limits and counters are read under these locks, so no level exceeds its limit and nothing that fits
  is refused because of a concurrent batch (A1);
- `rota.proc_delete` releases at the same five levels (A3: the tables equal `SUM(proc)` in every snapshot);
- both look the token up first, so a repeat changes nothing (A5), and a released token is not booked again.

A managed show is declined; the flag is read under the lock, so the two ledgers never book a show at the same time.
After a crash or a lost reply the call happened or it did not: repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import asyncpg

from rota.accounting import allocations
from rota.accounting.ledger import (
    BookingBatch,
    BookingGroup,
    BookingOutcome,
    DeclineReason,
    QuotaKey,
    ReleasedTokens,
    check_booking,
    collapse_outcomes,
    expand_single_frames,
    record_outcomes,
)
from rota.infra import failpoints
from rota.infra.postgres import Database, Record, query
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, RESOURCES, Level, Refusal, Resource, Usage

BOOK = query(__package__, "ledger_book")
COUNTERS = query(__package__, "ledger_counters")
RECOMPUTE = query(__package__, "ledger_recompute")
REWRITE = query(__package__, "ledger_rewrite")
UNMANAGED = query(__package__, "shows_unmanaged")

BOOK_ATTEMPTS_MAX: Final = 3


class TransactionalLedger:
    """A `Ledger` for unmanaged shows."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def book(self, show: ShowId, groups: BookingBatch, *, force: bool = False) -> list[BookingOutcome]:
        check_booking(groups)
        expanded = expand_single_frames(groups)
        rows = await self._book(show, expanded, force=force)
        failpoints.after_send("ledger.book")
        outcomes = collapse_outcomes(groups, _outcomes(expanded, rows))
        record_outcomes("transactional", outcomes)
        return outcomes

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[ReleasedTokens]:
        return list((await allocations.delete(self.database, show, tokens)).released)

    async def counters(self, show: ShowId) -> dict[QuotaKey, Usage]:
        rows = await self.database.rows(COUNTERS, show)
        return {(LEVELS[row["level"] - 1], row["id"]): Usage(row["cores"], row["gpus"]) for row in rows}

    async def recompute(self, show: ShowId) -> dict[Level, int]:
        """Rewrite the five tables from `proc`; returns how many keys per level were wrong. Blocks bookings meanwhile.

        Rota itself never makes them wrong: this repairs manual edits and restored backups. Rows of jobs and layers
        without usage and caps are removed. A managed show is left alone.
        """
        return _changed_by_level(await self.database.rows(RECOMPUTE, show))

    async def recompute_all(self) -> dict[ShowId, dict[Level, int]]:
        """`recompute` for every unmanaged show, one transaction each; returns only shows with a wrong key."""
        shows = [row["pk_show"] for row in await self.database.rows(UNMANAGED)]
        wrong = {show: await self.recompute(show) for show in shows}
        return {show: levels for show, levels in wrong.items() if levels}

    async def refresh_managed_tables(self, show: ShowId) -> dict[Level, int]:
        """Write the usage of a managed show into the tables, from one read of `proc`; returns changed keys per level.

        The tables are display only, so bookings do not wait; jobs and layers without a row get none. An unmanaged
        show is left alone.
        """
        return _changed_by_level(await self.database.rows(REWRITE, show))

    async def _book(self, show: ShowId, groups: Sequence[BookingGroup], *, force: bool) -> list[Record]:
        arguments = allocations.booking_columns(groups)
        for retries_left in reversed(range(BOOK_ATTEMPTS_MAX)):
            try:
                failpoints.hit("ledger.before_book")
                return await self.database.rows(BOOK, show, force, *arguments)
            except asyncpg.UniqueViolationError:
                # A concurrent call booked one of these tokens on other keys and has committed; the row may even have
                # been released again.
                if not retries_left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")


def _changed_by_level(rows: Sequence[Record]) -> dict[Level, int]:
    return {LEVELS[row["level"] - 1]: row["changed"] for row in rows if row["changed"]}


def _outcomes(groups: Sequence[BookingGroup], rows: Sequence[Record]) -> list[BookingOutcome]:
    declined_early: list[dict[int, DeclineReason]] = [{} for _ in groups]
    decided: list[Record | None] = [None] * len(groups)
    group_of = {token: at for at, group in enumerate(groups) for token in group.follower_tokens()}
    for row in rows:
        if row["token"] is None:
            decided[row["owner"] - 1] = row
        elif row["token"] not in group_of:
            declined_early[row["owner"] - 1][row["token"]] = DeclineReason(row["why"])
        elif row["why"] != DeclineReason.ALREADY:
            declined_early[group_of[row["token"]]][row["token"]] = DeclineReason(row["why"])
    return [_outcome(*each) for each in zip(groups, declined_early, decided, strict=True)]


def _outcome(group: BookingGroup, declined_early: dict[int, DeclineReason], decided: Record | None) -> BookingOutcome:
    undecided = [token for token in group.tokens if token not in declined_early] if declined_early else group.tokens
    already = [token for token, why in declined_early.items() if why is DeclineReason.ALREADY]
    declined = {token: why for token, why in declined_early.items() if why is not DeclineReason.ALREADY}
    if decided is None:
        return BookingOutcome(already=already, declined=declined)
    why = DeclineReason(decided["why"]) if decided["why"] else None
    if why is not None and why is not DeclineReason.NO_SUBSCRIPTION:
        return BookingOutcome(already=already, declined=declined | dict.fromkeys(undecided, why))
    fit = decided["fit"]
    return BookingOutcome(
        undecided[:fit], already, undecided[fit:], declined, _refusal(group, decided) if fit < len(undecided) else None
    )


def _refusal(group: BookingGroup, decided: Record) -> Refusal:
    if decided["level"] is None:
        resource = Resource.CORES if group.charge.cores else Resource.GPUS
        return Refusal(Level.SUBSCRIPTION, resource, 0, 0, group.charge.ask.of(resource))
    resource = RESOURCES[decided["resource"] - 1]
    return Refusal(
        LEVELS[decided["level"] - 1], resource, decided["current"], decided["cap"], group.charge.ask.of(resource)
    )
