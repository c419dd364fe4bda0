"""Two processes on one subscription: they never exceed its burst, and use all of it while frames wait."""

import asyncio

import pytest

from rota.accounting.service import AccountingService
from tests.integration.accounting.accounting_support import ShowQuota

FRAMES = 200
"""Frames of half a core; the burst fits these and a fraction, not one more."""


class Pair:
    def __init__(self, processes):
        self.processes = processes

    async def send(self, text):
        """Send a command to both; returns the number of frames they hold once both have executed it."""
        for process in self.processes:
            await process.write_line(text)
        return sum([int(await process.line(30)) for process in self.processes])


@pytest.fixture
async def quota(database, redis):
    return await ShowQuota(AccountingService(database, redis)).make(burst="100.3")


@pytest.fixture
async def pair(quota, spawn, database_url, redis_url):
    environment = {"DATABASE": database_url, "REDIS": redis_url}
    keys = (quota.show, quota.pool, quota.folder, quota.dept)
    processes = [
        await spawn("tests.integration.accounting.hot_booker", first, *keys, env=environment)
        for first in (0, 5 * 10**12)
    ]
    yield Pair(processes)
    for process in processes:
        process.stdin.close()
        await process.wait()


async def test_two_processes_fill_a_burst_exactly_never_exceed_it_and_release_everything(quota, pair):
    assert await pair.send("fill") == FRAMES
    assert (await quota.count(), len(await quota.tokens())) == ("100", FRAMES)

    churning = asyncio.create_task(pair.send("churn 25"))
    while not churning.done():
        assert await quota.over_cap() == []
        await quota.reconcile(release_orphans=False)
    held = await churning
    assert len(await quota.tokens()) == held
    await quota.reconcile()  # a row that ended during a reconciliation may be counted until the next one

    assert await pair.send("fill") == FRAMES
    assert await quota.over_cap() == []
    assert (await quota.reconcile()).clean
    assert await quota.agrees()

    assert await pair.send("release") == 0
    assert (await quota.tokens(), await quota.counters(), await quota.count()) == ([], {}, "0")
    assert (await quota.audit()).ok
