"""Two processes on one subscription: its burst is never passed, and nothing is left unused while somebody asks."""

import asyncio

import pytest

from rota.accounting.service import AccountingService
from tests.integration.accounting.accounting_support import Farm

FRAMES = 200
"""Of half a core each; the burst has room for these and a bit, not for one more."""


class Pair:
    def __init__(self, processes):
        self.processes = processes

    async def order(self, text):
        """What they hold together once both have done it."""
        for process in self.processes:
            await process.say(text)
        return sum([int(await process.line(30)) for process in self.processes])


@pytest.fixture
async def farm(database, redis):
    return await Farm(AccountingService(database, redis)).make(burst="100.3")


@pytest.fixture
async def pair(farm, spawn, database_url, redis_url):
    environment = {"DATABASE": database_url, "REDIS": redis_url}
    keys = (farm.show, farm.pool, farm.folder, farm.dept)
    processes = [
        await spawn("tests.integration.accounting.hot_booker", first, *keys, env=environment)
        for first in (0, 5 * 10**12)
    ]
    yield Pair(processes)
    for process in processes:
        process.stdin.close()
        await process.wait()


async def test_two_processes_fill_a_burst_exactly_never_pass_it_and_leave_nothing_behind(farm, pair):
    assert await pair.order("fill") == FRAMES
    assert (await farm.count(), len(await farm.tokens())) == ("100", FRAMES)

    churning = asyncio.create_task(pair.order("churn 25"))
    while not churning.done():
        assert await farm.over() == []
        await farm.recount(release_orphans=False)
    held = await churning
    assert len(await farm.tokens()) == held
    await farm.recount()  # a row that ended under the eyes of a recount may be counted until the next one

    assert await pair.order("fill") == FRAMES
    assert await farm.over() == []
    assert (await farm.recount()).clean
    assert await farm.agrees()

    assert await pair.order("release") == 0
    assert (await farm.tokens(), await farm.counters(), await farm.count()) == ([], {}, "0")
    assert (await farm.audit()).ok
