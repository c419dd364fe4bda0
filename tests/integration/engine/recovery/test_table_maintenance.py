"""Bookings of ended frames are removed from their table before they slow down every look at what runs."""

import asyncpg
import pytest

from rota.engine.recovery.table_maintenance import DEAD_PROCS, DEAD_ROWS_MIN, TableMaintenance
from rota.infra.lease import Leases
from tests.support.waiting import until

COME_AND_GO = f"""
INSERT INTO rota.proc SELECT n, k, k, k, k, k, k, k, 100, 0, 1
FROM generate_series(1, {DEAD_ROWS_MIN}) AS n, (SELECT gen_random_uuid() AS k) AS id;
DELETE FROM rota.proc;
SELECT pg_stat_force_next_flush()"""


@pytest.fixture
async def operator(database_url):
    """The database may have been used by another test, and autovacuum may come at any time."""
    connection = await asyncpg.connect(database_url)
    await connection.execute("ALTER TABLE rota.proc SET (autovacuum_enabled = off)")
    await connection.execute("VACUUM rota.proc")
    yield connection
    await connection.execute("VACUUM rota.proc")
    await connection.execute("ALTER TABLE rota.proc RESET (autovacuum_enabled)")
    await connection.close()


async def dead_rows(maintenance):
    return int(await maintenance.database.value(DEAD_PROCS))


async def test_ended_bookings_are_removed_when_they_are_many(database, operator):
    maintenance = TableMaintenance(database, Leases(database))
    assert not await maintenance.vacuum_procs()
    await operator.execute(COME_AND_GO)

    async def is_counted():
        return await dead_rows(maintenance) >= DEAD_ROWS_MIN

    await until(is_counted, what="the count of PostgreSQL")
    assert await maintenance.vacuum_procs()
    assert await dead_rows(maintenance) == 0
    assert not await maintenance.vacuum_procs()


@pytest.fixture
async def reader(operator, database_url):
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def test_bookings_that_a_long_transaction_still_sees_are_not_vacuumed_again_and_again(database, operator, reader):
    async with reader.transaction(isolation="repeatable_read"):
        await reader.fetchval("SELECT count(*) FROM rota.proc")
        maintenance = TableMaintenance(database, Leases(database))
        await operator.execute(COME_AND_GO)

        async def is_tried():
            return await maintenance.vacuum_procs()

        await until(is_tried, what="a vacuum")
        assert await dead_rows(maintenance) >= DEAD_ROWS_MIN
        assert not await maintenance.vacuum_procs()
