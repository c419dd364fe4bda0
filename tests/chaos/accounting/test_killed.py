"""Kill -9, a pause and a lost reply at every named place of the books, and an emptied Redis at each: what is left is
mended by one look and one recount, and nothing passes a limit meanwhile."""

import asyncio
from pathlib import Path

import pytest

from rota.accounting.audit import audit
from rota.accounting.live.reconcile import reconcile_show
from rota.accounting.live.seeding import seed
from rota.accounting.maintenance import AccountingMaintenance
from rota.accounting.service import AccountingService as AllBooks
from rota.infra import failpoints
from rota.infra.lease import Leases
from rota.model.settings.accounting import AccountingSettings
from tests.contract.ledger_suite import SUM, Books
from tests.support.waiting import until

ROOMS = ("admin.", "live.", "limits.", "publisher.", "recount.", "seeding.", "procs.", "ledger.")
PLACES = [(kind, name) for kind, name in failpoints.declared_failpoints() if name.startswith(ROOMS)]
DEATHS = [name for kind, name in PLACES if kind == "hit"]
BURST = 1000


class Farm:
    def __init__(self, database, redis, database_url, redis_url, spawn):
        self.books = AllBooks(database, redis)
        self.database = database
        self.made = Books(database, self.books.live, managed=True)
        self.env = {"DATABASE": database_url, "REDIS": redis_url}
        self.spawn = spawn
        self.upkeep = AccountingMaintenance(self.books, Leases(database), AccountingSettings(), grace_s=0, rest=0)

    async def make(self):
        await self.made.make(burst=BURST)
        self.name = f"show-{self.made.show}"
        assert await seed(self.books.live, self.made.show)
        return self

    async def keeper(self, **arm):
        made = self.made
        ids = (made.pool, made.folder, made.job, made.layer, made.dept, made.host)
        return await self.spawn("tests.chaos.accounting.maintainer", self.name, *ids, env=self.env | arm)

    async def booked(self):
        return await self.database.value(SUM, self.made.show)

    async def heal(self):
        """What upkeep does when the keeper of the books has changed."""
        show = await self.books.admin.show(self.name)
        if show.managed:
            await self.upkeep.seed_lagging_shows()
            assert await reconcile_show(self.books.live, show.id, grace_s=0) is not None
        found = await audit(self.books, await self.books.admin.show(self.name))
        assert found.ok, found

    async def lower(self, burst):
        await self.books.change(
            lambda admin: admin.change_subscription(self.name, f"pool-{self.made.pool}", actor="test", burst=burst)
        )


@pytest.fixture
async def farm(database, redis, database_url, redis_url, spawn):
    return await Farm(database, redis, database_url, redis_url, spawn).make()


def test_the_places_are_known():
    assert len(PLACES) > 25


async def test_the_keeper_comes_to_its_end_when_nothing_befalls_it(farm):
    keeper = await farm.keeper()
    assert await keeper.line() == "done", await keeper.errors()
    await farm.heal()
    assert await farm.booked() == 800


@pytest.mark.parametrize("place", DEATHS)
async def test_whoever_is_killed_leaves_books_that_heal_also_when_redis_is_emptied(farm, redis, place):
    keeper = await farm.keeper(CRASH_AT=place)
    assert await keeper.wait() == failpoints.CRASH_EXIT_STATUS, await keeper.errors()
    booked = await farm.booked()
    assert booked <= BURST
    await farm.heal()
    await redis.flushdb()
    await farm.heal()
    assert await farm.booked() == booked


@pytest.mark.parametrize("place", [name for kind, name in PLACES if kind == "after_send"])
async def test_a_lost_reply_leaves_books_that_heal_and_may_be_asked_for_again(farm, place):
    keeper = await farm.keeper(LOST_REPLY_AT=place)
    assert await keeper.line() == "lost", await keeper.errors()
    await farm.heal()
    again = await farm.keeper()
    assert await again.line() == "done", await again.errors()
    await farm.heal()
    assert await farm.booked() <= BURST


@pytest.mark.parametrize("place", DEATHS)
async def test_whoever_sleeps_through_a_lowered_cap_and_a_seeding_passes_nothing_when_he_wakes(farm, place):
    keeper = await farm.keeper(PAUSE_AT=place)
    await until(lambda: is_stopped(keeper.pid), what="the pause")
    if place != "admin.after_flip":  # it holds the show's lock, and everybody waits for it
        await farm.lower(2)
        if (await farm.books.admin.show(farm.name)).managed:
            await seed(farm.books.live, farm.made.show)
    before = await farm.booked()
    keeper.resume()
    await asyncio.wait_for(keeper.wait(), 20)
    cap = BURST if place == "admin.after_flip" else 200
    assert await farm.booked() <= max(before, cap)
    await farm.heal()


def is_stopped(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"
