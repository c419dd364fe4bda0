"""One PostgreSQL for a benchmark: durable, empty, with a database for whoever asks."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from rota.infra.postgres import Database, PostgresTarget, Query
from rota.infra.postgres.sql import parse_query
from rota.local import LocalStack, StackOptions


class Server:
    """Databases of one server. `wal_bytes` is all that the server ever wrote ahead, whoever caused it."""

    def __init__(self, url: str, admin: asyncpg.Connection[asyncpg.Record]) -> None:
        self._url = url
        self._admin = admin

    def url(self, database: str) -> str:
        return self._url.replace("/rota?", f"/{database}?")

    async def create(self, database: str, template: str = "template0") -> str:
        await self._admin.execute(f"CREATE DATABASE {database} TEMPLATE {template}")
        return self.url(database)

    async def drop(self, database: str) -> None:
        await self._admin.execute(f"DROP DATABASE {database} WITH (FORCE)")

    async def checkpoint(self) -> None:
        """So that no contender pays for what the one before it has left to be written."""
        await self._admin.execute("CHECKPOINT")

    async def wal_bytes(self) -> int:
        return int(await self._admin.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'"))


@asynccontextmanager
async def one_server() -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        stack = LocalStack(StackOptions(Path(folder) / "data", servers=("postgres",)))
        await stack.start()
        try:
            admin = await asyncpg.connect(stack.url("postgres"))
            yield Server(stack.url("postgres"), admin)
            await admin.close()
        finally:
            await stack.stop()


@asynccontextmanager
async def opened(url: str, connections: int = 4) -> AsyncIterator[Database]:
    """Without our time limits: filling a table with a million rows takes longer than a dispatcher would wait."""
    target = PostgresTarget(
        url=url, pool_max=connections, statement_timeout_s=600, idle_in_transaction_s=600, idle_default_s=600
    )
    database = await Database.open(target)
    try:
        yield database
    finally:
        await database.close()


def statement(text: str) -> Query:
    """A statement that only a benchmark needs."""
    return parse_query("bench", f"-- Benchmark.\n{text}")
