"""Every SQL statement is prepared on the migrated schema, which checks names, types and syntax."""

from importlib.resources import files
from pathlib import Path

import asyncpg
import pytest

from rota.infra.postgres.sql import parse_query, queries

ROOT = Path(str(files("rota")))


async def test_every_query_prepares_on_the_migrated_schema(database):
    packages = ["rota." + ".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.rglob("queries.sql")]
    found = [query for package in packages for query in queries(package).values()]
    assert found
    refused = {}
    async with database.transaction() as tx:
        for query in found:
            try:
                async with tx.savepoint():
                    await tx.connection.prepare(query.text)
            except asyncpg.PostgresError as error:
                refused[query.name] = str(error)
    assert not refused


async def test_query_on_a_missing_column_is_detected(database):
    bad = parse_query("bad", "-- Refused.\nSELECT no_such_column FROM rota.migration")
    async with database.transaction() as tx:
        with pytest.raises(asyncpg.UndefinedColumnError):
            async with tx.savepoint():
                await tx.connection.prepare(bad.text)
