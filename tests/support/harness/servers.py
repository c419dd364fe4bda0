"""The servers of a test run: started once by the controlling process and used by every test process."""

import asyncio
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from rota.local import BinarySource, LocalStack, StackOptions, binaries

TEMPLATE = "rota_template"
TEMPLATE_WITHOUT_DAYS = "rota_template_without_days"
REDIS_DATABASES = 4096


@dataclass(frozen=True)
class Stack:
    """URLs of the shared servers, with superuser rights."""

    postgres_url: str
    redis_url: str
    nats_url: str
    calm_redis_url: str
    """A second Redis server, on which no test flushes scripts."""

    def database_url(self, name):
        return self.postgres_url.replace("/rota?", f"/{name}?")

    def redis_db_url(self, number, *, calm=False):
        url = self.calm_redis_url if calm else self.redis_url
        return url.removesuffix("/0") + f"/{number}"

    as_dict = asdict


class SharedServers:
    """Starts the stack on first use and prepares the template database."""

    def __init__(self):
        self._local = self._calm = None
        self._dir = None
        self._stack = None

    def stack(self):
        from rota.infra.postgres import migrate

        if self._stack is None:
            self._dir = Path(tempfile.mkdtemp(prefix="rota-tests-"))
            self._local = LocalStack(options_for_tests(self._dir, redis_databases=REDIS_DATABASES))
            asyncio.run(self._local.start())
            options = options_for_tests(self._dir / "calm", redis_databases=REDIS_DATABASES, servers=("redis",))
            self._calm = LocalStack(options)
            asyncio.run(self._calm.start())
            urls = [self._local.url(name) for name in ("postgres", "redis", "nats")]
            self._stack = Stack(*urls, self._calm.url("redis"))
            with psycopg.connect(self._stack.postgres_url, autocommit=True) as admin:
                admin.execute(f"CREATE DATABASE {TEMPLATE}")
            url = self._stack.database_url(TEMPLATE)
            asyncio.run(migrate(url))
            with psycopg.connect(self._stack.postgres_url, autocommit=True) as admin:
                admin.execute(f"CREATE DATABASE {TEMPLATE_WITHOUT_DAYS} TEMPLATE {TEMPLATE}")
            asyncio.run(_make_days(url))
        return self._stack

    def stop(self):
        if self._local:
            asyncio.run(self._local.stop())
            asyncio.run(self._calm.stop())
            shutil.rmtree(self._dir, ignore_errors=True)


async def _make_days(url):
    """Create the partitions that a server creates at startup; this saves 0.2 s in each test with a replica."""
    from rota.engine.recovery.retention import RetentionMaintenance
    from rota.infra.blob_store import table
    from rota.infra.lease import Leases
    from rota.infra.postgres import Database, PostgresTarget
    from rota.infra.postgres.sql import parse_query

    database = await Database.open(PostgresTarget(url=url))
    leases = Leases(database)
    [lease] = (await leases.acquire(["template"], kind="template", ttl_s=60.0)).granted
    await RetentionMaintenance(database, leases).make_days(lease)
    async with database.transaction() as tx:
        await table.create_partitions(tx, datetime.now(UTC).date())
    for statement in ("DELETE FROM rota.lease", "ALTER SEQUENCE rota.lease_fence RESTART"):
        await database.run(parse_query("test", f"-- Test.\n{statement}"))
    await database.close()


def options_for_tests(data_dir, **more):
    """Options for test servers: not durable, and the system binaries if TEST_SERVERS=system."""
    bins = {}
    if os.environ.get("TEST_SERVERS") == "system":
        for kind in (binaries.POSTGRES, binaries.REDIS):
            bins[kind.name] = str(binaries.find_binary(kind, None, BinarySource.SYSTEM).path)
    return StackOptions(data_dir, bins=bins, durable=False, **more)
