"""The books: what each show may use of which pool, what it uses, and two ledgers that keep the one below the other.

What holds, and who sees to it (docs/adr/0009-the-books.md says why):

A1 In commit order no insert into `proc` takes a key over its limit. Unmanaged shows: `rota.ledger_book` decides and
   writes under row locks. Managed shows: the booking script decides, and `rota.proc_insert` refuses what was decided
   under a fence that has risen since; triggers raise it whenever a limit is lowered or removed, whoever does it.
A2 A seeded Redis never counts less than `SUM(proc)`: tokens are booked there first and released there last, and
   `rota.proc_insert` tells rows that are there as `already`, never as refused.
A3 After quiet and one recount every counter equals `SUM(proc)`. The five tables of an unmanaged show do so always:
   they change in the transaction that changes `proc`, and are rewritten when the show comes back from Redis.
A4 Nothing is booked from an unseeded Redis: the script wants a fence there, `rota.proc_insert` wants the right one.
A5 Repeating a call changes nothing: tokens name attempts, and every store looks them up first.
A6 Units are exact: hundredths of a core in PostgreSQL and in the scripts (`rota.model.units`), -1 stays -1.

The lock of a show (`rota.show_shared`, `rota.show_exclusive`) makes "look at flag, fence and graves, then write"
one step. It is an advisory lock, taken before any row; limits and flags changed by hand take it by trigger.
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
