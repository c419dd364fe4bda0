"""PostgreSQL: named statements, a bounded pool, transactions, notifications and migrations.

Every package that stores data calls `Database`; nothing else opens a connection, except `migrate` and the caller's own
connections in `foreign`.

    database         statements, transactions and LISTEN for the rest of Rota
    pool             bounded connection pool: no connection is lent while busy, broken or in a transaction
    driver           opens and closes asyncpg connections
    listen           LISTEN on one connection per process, with reconnect
    sql              named statements from each package's `queries.sql`
    failures         maps connection failures to `PostgresUnavailable`; states whether the outcome is known
    target           URL, pool size and timeouts
    foreign          statements on a caller's own connection (asyncpg, psycopg, SQLAlchemy, Django)
    migrate          applies migrations under an advisory lock; `migration_files` finds and orders them

Invariants: every wait has a timeout; a lost reply is reported as an unknown outcome and never retried here; a session
keeps no state between uses.
"""

from rota.infra.postgres.database import Database, Transaction
from rota.infra.postgres.driver import Connection, Record
from rota.infra.postgres.listen import Notifications
from rota.infra.postgres.migrate import check_current, migrate, status
from rota.infra.postgres.sql import Query, query
from rota.infra.postgres.target import PostgresTarget

__all__ = [
    "Connection",
    "Database",
    "Notifications",
    "PostgresTarget",
    "Query",
    "Record",
    "Transaction",
    "check_current",
    "migrate",
    "query",
    "status",
]
