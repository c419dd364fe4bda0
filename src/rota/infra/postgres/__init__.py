"""PostgreSQL: statements in files, a bounded pool, notifications, migrations."""

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
