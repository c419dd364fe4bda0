"""Quota accounting: what each show may use of each pool, what it uses, and the two ledgers that enforce the limits.

The dispatcher books frames here before it assigns them, and the completion path releases them. `AccountingService`
picks the ledger of a show: Redis for managed shows (`live`), PostgreSQL for the others (`transactional`).

Invariants and what enforces them (docs/adr/0009-the-books.md gives the reasons):

A1 In commit order no insert into `proc` takes a key over its limit. Unmanaged shows: `rota.ledger_book` decides and
   writes under row locks. Managed shows: the booking script decides, and `rota.proc_insert` rejects bookings made under
   a fence that has risen since; triggers raise it on every lowered or removed limit, from any client.
A2 A seeded Redis never counts less than `SUM(proc)`: tokens are booked there first and released there last, and
   `rota.proc_insert` reports existing rows as `already`, never as refused.
A3 At rest, after one reconciliation, every counter equals `SUM(proc)`. The five tables of an unmanaged show always do:
   they change in the transaction that changes `proc`, and are rewritten when the show returns from Redis.
A4 Nothing is booked in an unseeded Redis: the script requires a fence there, `rota.proc_insert` requires the right one.
A5 Calls are idempotent: tokens name attempts, and every store looks them up first.
A6 Units are exact: hundredths of a core in PostgreSQL and in the scripts (`rota.model.units`); -1 stays -1.

The show lock (`rota.show_shared`, `rota.show_exclusive`) makes "check flag, fence and tombstones, then write" atomic.
It is an advisory lock, taken before any row; triggers take it for limits and flags changed by hand.

| module | responsibility |
|---|---|
| `ledger` | the contract of both ledgers: charges, booking groups, outcomes |
| `service` | chooses the ledger of a show; publishes releases and limit changes |
| `transactional`, `live` | the two ledgers |
| `allocations` | rows of `proc` and tombstones |
| `admin`, `resources` | changes of shows, pools, folders, subscriptions, departments and caps |
| `limits_snapshot`, `usage` | reads for explain and for operators |
| `maintenance` | periodic seeding, reconciliation and pruning by one leader |
| `suspected_shows` | which shows may be counted too high in Redis, because they are refused |
| `changed_limits` | which limits changed in PostgreSQL and must be copied to Redis |
| `audit` | compares Redis, tables and `proc`, and repairs differences |
"""

from rota.accounting.ledger import BookingGroup, BookingOutcome, Charge, DeclineReason, Ledger, ReleasedTokens
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.service import AccountingService
from rota.accounting.transactional import TransactionalLedger

__all__ = [
    "AccountingService",
    "BookingGroup",
    "BookingOutcome",
    "Charge",
    "DeclineReason",
    "Ledger",
    "LiveLedger",
    "ReleasedTokens",
    "TransactionalLedger",
]
