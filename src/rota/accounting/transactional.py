"""The transactional ledger: the books of unmanaged shows, in PostgreSQL alone.

Counters of the five tables and `proc` rows change in one transaction, which is one function call:
- `rota.ledger_book` holds the show's lock shared, then every row the batch counts in, level by level and by id, so
  batches wait for each other and never in a circle; limits and counters are read under these locks, so no level
  passes its limit and nothing that fits is refused for another's sake (A1);
- `rota.proc_delete` gives back at the same five levels (A3: the tables are `SUM(proc)` in every snapshot);
- both look the token up first, so a repeat changes nothing (A5), and a token that was released is not booked again.

A managed show is declined here, read under the lock, so there is no moment at which both ledgers book it. If we die or
the reply is lost, the call happened or it did not; calling again tells.
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
    """A `Ledger` for shows that Redis does not keep."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def book(self, show: ShowId, groups: BookingBatch, *, force: bool = False) -> list[BookingOutcome]:
        check_booking(groups)
        each = expand_single_frames(groups)
        rows = await self._book(show, each, force=force)
        failpoints.after_send("ledger.book")
        outcomes = collapse_outcomes(groups, _outcomes(each, rows))
        record_outcomes("transactional", outcomes)
        return outcomes

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[ReleasedTokens]:
        return list((await allocations.delete(self.database, show, tokens)).released)

    async def counters(self, show: ShowId) -> dict[QuotaKey, Usage]:
        rows = await self.database.rows(COUNTERS, show)
        return {(LEVELS[row["level"] - 1], row["id"]): Usage(row["cores"], row["gpus"]) for row in rows}

    async def recompute(self, show: ShowId) -> dict[Level, int]:
        """Write the five tables anew from `proc`; how many keys of each level were wrong. Bookings wait meanwhile.

        Nothing in Rota makes them wrong: this heals what hands and restored backups did. Rows of jobs and layers that
        hold nothing and have no caps are removed. A managed show is left alone.
        """
        return _changed_by_level(await self.database.rows(RECOMPUTE, show))

    async def recompute_all(self) -> dict[ShowId, dict[Level, int]]:
        """`recompute` for every unmanaged show, one transaction each; only shows with a wrong key are told."""
        shows = [row["pk_show"] for row in await self.database.rows(UNMANAGED)]
        wrong = {show: await self.recompute(show) for show in shows}
        return {show: levels for show, levels in wrong.items() if levels}

    async def refresh_managed_tables(self, show: ShowId) -> dict[Level, int]:
        """Write into the tables what a managed show uses, as of one read of `proc`; how many keys changed by level.

        They only show it, so nobody waits, and jobs and layers without a row get none. An unmanaged show is left alone.
        """
        return _changed_by_level(await self.database.rows(REWRITE, show))

    async def _book(self, show: ShowId, groups: Sequence[BookingGroup], *, force: bool) -> list[Record]:
        arguments = (*allocations.group_columns(groups), *allocations.range_columns(groups))
        for left in reversed(range(BOOK_ATTEMPTS_MAX)):
            try:
                failpoints.hit("ledger.before_book")
                return await self.database.rows(BOOK, show, force, *arguments)
            except asyncpg.UniqueViolationError:
                # Somebody booked one of these tokens on other keys at the same moment, and has committed by now; the
                # row may even have been released again.
                if not left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")


def _changed_by_level(rows: Sequence[Record]) -> dict[Level, int]:
    return {LEVELS[row["level"] - 1]: row["changed"] for row in rows if row["changed"]}


def _outcomes(groups: Sequence[BookingGroup], rows: Sequence[Record]) -> list[BookingOutcome]:
    barred: list[dict[int, DeclineReason]] = [{} for _ in groups]
    decided: list[Record | None] = [None] * len(groups)
    for row in rows:
        if row["token"] is None:
            decided[row["owner"] - 1] = row
        else:
            barred[row["owner"] - 1][row["token"]] = DeclineReason(row["why"])
    return [_outcome(*each) for each in zip(groups, barred, decided, strict=True)]


def _outcome(group: BookingGroup, barred: dict[int, DeclineReason], decided: Record | None) -> BookingOutcome:
    wanted = [token for token in group.tokens if token not in barred] if barred else group.tokens
    already = [token for token, why in barred.items() if why is DeclineReason.ALREADY]
    declined = {token: why for token, why in barred.items() if why is not DeclineReason.ALREADY}
    if decided is None:
        return BookingOutcome(already=already, declined=declined)
    why = DeclineReason(decided["why"]) if decided["why"] else None
    if why is not None and why is not DeclineReason.NO_SUBSCRIPTION:
        return BookingOutcome(already=already, declined=declined | dict.fromkeys(wanted, why))
    fit = decided["fit"]
    return BookingOutcome(
        wanted[:fit], already, wanted[fit:], declined, _refusal(group, decided) if fit < len(wanted) else None
    )


def _refusal(group: BookingGroup, decided: Record) -> Refusal:
    if decided["level"] is None:
        resource = Resource.CORES if group.charge.cores else Resource.GPUS
        return Refusal(Level.SUBSCRIPTION, resource, 0, 0, group.charge.ask.of(resource))
    resource = RESOURCES[decided["resource"] - 1]
    return Refusal(
        LEVELS[decided["level"] - 1], resource, decided["current"], decided["cap"], group.charge.ask.of(resource)
    )
