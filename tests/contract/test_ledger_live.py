"""The ledger contract over Redis and PostgreSQL."""

import pytest

from rota.accounting.live.ledger import LiveLedger
from rota.accounting.live.seeding import seed
from rota.infra.redis import RedisKeys
from tests.contract.ledger_suite import Books, LedgerSuite
from tests.contract.single_frame_batch_suite import SingleFrameBatchSuite


@pytest.fixture
def ledger(database, redis):
    return LiveLedger(database, redis, RedisKeys())


@pytest.fixture
async def account(database, ledger):
    async def tell(show):
        if not await ledger.sync_limits(show):
            assert await seed(ledger, show)

    return await Books(database, ledger, managed=True, tell=tell).make()


class TestLiveLedger(LedgerSuite, SingleFrameBatchSuite):
    pass
