"""The servers of one run, which everybody in it uses: durable as they come, one PostgreSQL, one Valkey, one NATS."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg
import redis.asyncio

from bench.server import Server
from rota.local import LocalStack, StackOptions
from rota.local.datadir import SERVERS

COMMITS: Final = "SELECT xact_commit FROM pg_stat_database WHERE datname = $1"


class Ground:
    """`urls` of the three servers by name, and `pids` whose CPU time is theirs."""

    def __init__(
        self,
        urls: Mapping[str, str],
        pids: Mapping[str, int],
        folder: Path,
        admin: asyncpg.Connection[asyncpg.Record],
    ) -> None:
        self.postgres = Server(urls["postgres"], admin)
        self.nats_url = urls["nats"]
        self.folder = folder
        self.pids = dict(pids)
        self._redis_url = urls["redis"]
        self._admin = admin

    def redis_url(self, number: int) -> str:
        return self._redis_url.removesuffix("/0") + f"/{number}"

    async def flush(self, number: int) -> None:
        client = redis.asyncio.from_url(self.redis_url(number))
        await client.flushdb()
        await client.aclose()

    async def commits(self, database: str) -> int:
        """Exact once nobody is connected to it: a session counts its last ones when it ends."""
        return int(await self._admin.fetchval(COMMITS, database))


@asynccontextmanager
async def one_ground() -> AsyncIterator[Ground]:
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as name:
        folder = Path(name)
        stack = LocalStack(StackOptions(folder / "data"))
        await stack.start()
        try:
            admin = await asyncpg.connect(stack.url("postgres"))
            urls = {name: stack.url(name) for name in SERVERS}
            yield Ground(urls, {name: _pid(stack, name) for name in SERVERS}, folder, admin)
            await admin.close()
        finally:
            await stack.stop()


def _pid(stack: LocalStack, name: str) -> int:
    process = stack.servers[name].process
    assert process
    return process.pid
