"""The books of managed shows as Redis keeps them: bookings in one script, and everything that keeps Redis right.

| module | what it does |
|---|---|
| `ledger` | books and releases, with the rows of `proc` |
| `limits` | brings limits from PostgreSQL to Redis |
| `seeding` | fills an empty Redis, and takes over a show |
| `recount` | compares tokens with rows, and counters with tokens |
| `publisher` | tells Redis what was released, once it is committed |
| `state` | what Redis knows of a show, for monitors and audits |
| `soundness` | whether the keys of a show fit each other |

All of it follows docs/adr/0009-the-books.md. Two numbers decide who may write. The *fence* of a show is in PostgreSQL,
and in Redis once the show is seeded on the present run of the server: a booking is inserted only under the fence it was
made under. *Marks* in `acct:show:{show}` name the seeding, the reseed or the recount under way: a call of an older one
finds another mark and changes nothing.
"""
