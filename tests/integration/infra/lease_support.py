"""Helpers of the lease tests."""

import asyncio
from contextlib import asynccontextmanager

from rota.infra.postgres.sql import parse_query
from rota.model.backoff import Backoff
from tests.integration.infra.lease_holder import NOTE
from tests.support.waiting import until

QUICK_BACKOFF = Backoff(first_s=0.01, longest_s=0.01)
LONG_S = 60.0
"""A TTL that never ends during a test."""


def sql(text):
    return parse_query("test", f"-- Test.\n{text}")


EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() WHERE name = $1")
NOTES = sql("SELECT fence FROM rota.note ORDER BY n")
MAKE_NOTES = sql("CREATE TABLE rota.note (n bigint GENERATED ALWAYS AS IDENTITY, fence bigint)")


async def take(leases, name="door", ttl_s=LONG_S, **more):
    attempt = await leases.acquire([name], kind="test", ttl_s=ttl_s, **more)
    return attempt.granted[0] if attempt.granted else None


async def acquire_when_free(leases, name="door", ttl_s=LONG_S):
    """Acquire the lease as soon as it is free."""
    return await until(lambda: take(leases, name, ttl_s), what="the takeover")


async def write(leases, lease):
    async with leases.database.transaction() as tx:
        await leases.guard(tx, lease)
        await tx.run(NOTE, lease.fence)


def count(metric, kind="test"):
    return metric.labels(kind)._value.get()


@asynccontextmanager
async def leading(*candidates):
    """Run each candidate in a task, cancelled at the end."""
    tasks = [asyncio.create_task(each.run()) for each in candidates]
    try:
        async with asyncio.timeout(10):
            yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def forever():
    await asyncio.Event().wait()
