"""The live ledger: accounting of managed shows in Redis, and everything that keeps Redis consistent with PostgreSQL.

| module | responsibility |
|---|---|
| `ledger` | books and releases, together with the rows of `proc` |
| `limits` | brings limits from PostgreSQL to Redis |
| `seeding` | fills an empty Redis, and takes over a show |
| `reconcile` | compares tokens with rows, and counters with tokens |
| `release_publisher` | releases tokens in Redis after the commit in PostgreSQL |
| `reader` | reads the state of a show in Redis, for monitors and audits |
| `integrity` | checks the keys of a show against each other |
| `script_args` | packs bookings into script arguments |

docs/adr/0009-the-books.md gives the reasons. Two values decide which writes are valid. The *fence* of a show is in
PostgreSQL, and in Redis once the show is seeded on the current run of the server: a booking is inserted only under the
fence it was made under. *Markers* in `acct:show:{show}` name the seeding, reseed or reconciliation in progress: a call
of an older one finds another marker and changes nothing.
"""
