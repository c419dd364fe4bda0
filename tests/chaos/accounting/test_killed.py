"""SIGKILL, a pause and a lost reply at every accounting failpoint, also with a Redis flush: one maintenance round and
one reconciliation repair the ledger, and no cap is exceeded meanwhile."""

import asyncio
from pathlib import Path

import pytest

from rota.accounting.audit import audit
from rota.accounting.live.reconcile import reconcile_show
from rota.accounting.live.seeding import seed
from rota.accounting.maintenance import AccountingMaintenance
from rota.accounting.service import AccountingService
from rota.infra import failpoints
from rota.infra.lease import Leases
from rota.model.settings.accounting import AccountingSettings
from tests.contract.ledger_suite import SUM, Books
from tests.support.waiting import until

PREFIXES = ("admin.", "live.", "limits.", "publisher.", "recount.", "seeding.", "procs.", "ledger.")
FAILPOINTS = [(kind, name) for kind, name in failpoints.declared_failpoints() if name.startswith(PREFIXES)]
CRASH_POINTS = [name for kind, name in FAILPOINTS if kind == "hit"]
BURST = 1000


class Farm:
    def __init__(self, database, redis, database_url, redis_url, spawn):
        self.accounting = AccountingService(database, redis)
        self.database = database
        self.ledger = Books(database, self.accounting.live, managed=True)
        self.env = {"DATABASE": database_url, "REDIS": redis_url}
        self.spawn = spawn
        self.maintenance = AccountingMaintenance(
            self.accounting, Leases(database), AccountingSettings(), grace_s=0, rest=0
        )

    async def make(self):
        await self.ledger.make(burst=BURST)
        self.name = f"show-{self.ledger.show}"
        assert await seed(self.accounting.live, self.ledger.show)
        return self

    async def maintainer(self, **arm):
        ledger = self.ledger
        ids = (ledger.pool, ledger.folder, ledger.job, ledger.layer, ledger.dept, ledger.host)
        return await self.spawn("tests.chaos.accounting.maintainer", self.name, *ids, env=self.env | arm)

    async def booked(self):
        return await self.database.value(SUM, self.ledger.show)

    async def recover(self):
        """One maintenance round and reconciliation, then an audit."""
        show = await self.accounting.admin.show(self.name)
        if show.managed:
            await self.maintenance.seed_lagging_shows()
            assert await reconcile_show(self.accounting.live, show.id, grace_s=0) is not None
        found = await audit(self.accounting, await self.accounting.admin.show(self.name))
        assert found.ok, found

    async def lower(self, burst):
        await self.accounting.change(
            lambda admin: admin.change_subscription(self.name, f"pool-{self.ledger.pool}", actor="test", burst=burst)
        )


@pytest.fixture
async def farm(database, redis, database_url, redis_url, spawn):
    return await Farm(database, redis, database_url, redis_url, spawn).make()


def test_accounting_failpoints_are_found():
    assert len(FAILPOINTS) > 25


async def test_maintainer_process_without_faults_completes(farm):
    maintainer = await farm.maintainer()
    assert await maintainer.line() == "done", await maintainer.errors()
    await farm.recover()
    assert await farm.booked() == 800


@pytest.mark.parametrize("failpoint", CRASH_POINTS)
async def test_ledger_recovers_after_kill_and_redis_flush(farm, redis, failpoint):
    maintainer = await farm.maintainer(CRASH_AT=failpoint)
    assert await maintainer.wait() == failpoints.CRASH_EXIT_STATUS, await maintainer.errors()
    booked = await farm.booked()
    assert booked <= BURST
    await farm.recover()
    await redis.flushdb()
    await farm.recover()
    assert await farm.booked() == booked


@pytest.mark.parametrize("failpoint", [name for kind, name in FAILPOINTS if kind == "after_send"])
async def test_ledger_recovers_after_lost_reply_and_retry(farm, failpoint):
    maintainer = await farm.maintainer(LOST_REPLY_AT=failpoint)
    assert await maintainer.line() == "lost", await maintainer.errors()
    await farm.recover()
    again = await farm.maintainer()
    assert await again.line() == "done", await again.errors()
    await farm.recover()
    assert await farm.booked() <= BURST


@pytest.mark.parametrize("failpoint", CRASH_POINTS)
async def test_process_paused_across_lowered_cap_and_seeding_exceeds_no_cap(farm, failpoint):
    maintainer = await farm.maintainer(PAUSE_AT=failpoint)
    await until(lambda: is_stopped(maintainer.pid), what="the pause")
    if failpoint != "admin.after_flip":  # it holds the lock of the show and blocks all others
        await farm.lower(2)
        if (await farm.accounting.admin.show(farm.name)).managed:
            await seed(farm.accounting.live, farm.ledger.show)
    before = await farm.booked()
    maintainer.resume()
    await asyncio.wait_for(maintainer.wait(), 20)
    cap = BURST if failpoint == "admin.after_flip" else 200
    assert await farm.booked() <= max(before, cap)
    await farm.recover()


def is_stopped(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"
