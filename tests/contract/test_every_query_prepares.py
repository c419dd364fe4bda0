"""Every `.sql` file of Rota is prepared on the migrated schema, which checks names, types and syntax."""

from importlib.resources import files
from pathlib import Path

import asyncpg
import pytest

from rota.infra.postgres.sql import parse_query

ROOT = Path(str(files("rota")))


async def test_every_query_prepares_on_the_migrated_schema(database):
    paths = [path for path in ROOT.rglob("*.sql") if path.parent.name != "migrations"]
    assert paths
    refused = {}
    async with database.transaction() as tx:
        for path in paths:
            try:
                async with tx.savepoint():
                    await tx.connection.prepare(parse_query(path.stem, path.read_text()).text)
            except asyncpg.PostgresError as error:
                refused[str(path.relative_to(ROOT))] = str(error)
    assert not refused


async def test_a_query_on_a_missing_column_would_be_noticed(database):
    bad = parse_query("bad", "-- Refused.\nSELECT no_such_column FROM rota.migration")
    async with database.transaction() as tx:
        with pytest.raises(asyncpg.UndefinedColumnError):
            async with tx.savepoint():
                await tx.connection.prepare(bad.text)
