"""Tests that leak resources, each of another kind. Run only by tests/acceptance/test_support_finds_leaks.py."""

import asyncio

import asyncpg
import psycopg
from redis.asyncio import Redis

from tests.support.queue import sql

KEPT = []
SHOWS = sql("SELECT count(*) FROM rota.show")
FENCE = sql("SELECT nextval('rota.lease_fence')")


async def test_leaves_a_task(database_url):
    KEPT.append(asyncio.create_task(asyncio.Event().wait()))


async def test_leaves_a_key(redis):
    await redis.set("stray", 1)


async def test_leaves_a_redis_connection(redis_url):
    client = Redis.from_url(redis_url)
    await client.ping()
    KEPT.append(client)


async def test_leaves_a_postgres_connection(database_url):
    KEPT.append(await asyncpg.connect(database_url))


async def test_leaves_an_unpooled_session(database_url):
    KEPT.append(psycopg.connect(database_url))


async def test_leaves_rows_settings_and_a_lock(database):
    """Not a leak, because the harness resets these before the next test."""
    for statement in (
        "INSERT INTO rota.show (pk_show, str_name) VALUES (gen_random_uuid(), 'left')",
        "UPDATE rota.queue_storage SET counters_trusted = false",
        "CREATE TABLE rota.left_behind (n int)",
        "SELECT pg_advisory_lock(7)",
        "SET work_mem = '65kB'",
    ):
        await database.run(sql(statement))
    assert await database.value(FENCE) == 1


async def test_leaves_a_changed_schema(database):
    await database.run(sql("ALTER TABLE rota.show ADD COLUMN left_behind int"))


async def test_leaves_nothing(database, redis):
    await redis.set("expires", 1, ex=60)
    assert await database.value(SHOWS) == 0
    assert await database.value(FENCE) == 1
    assert await database.value(sql("SELECT to_regclass('rota.left_behind') IS NULL"))
    assert await database.value(sql("SELECT counters_trusted FROM rota.queue_storage"))
    assert await database.value(sql("SELECT current_setting('work_mem') <> '65kB'"))
    here = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    locks = f"pg_locks WHERE locktype = 'advisory' AND {here}"
    assert await database.value(sql(f"SELECT count(*) FROM {locks}")) == 0
    columns = "SELECT count(*) FROM information_schema.columns WHERE column_name = 'left_behind'"
    assert await database.value(sql(columns)) == 0


async def test_leaves_nothing_again(database, redis):
    await test_leaves_nothing(database, redis)
