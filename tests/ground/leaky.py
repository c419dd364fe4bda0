"""Tests that leave something behind, each in another way. Not collected by itself: see test_ground_finds_leaks."""

import asyncio

import asyncpg
from redis.asyncio import Redis

KEPT = []


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


async def test_leaves_nothing(database, redis):
    await redis.set("expires", 1, ex=60)
