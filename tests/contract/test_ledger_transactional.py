"""The ledger contract over PostgreSQL alone."""

import pytest

from rota.accounting.transactional import TransactionalLedger
from tests.contract.ledger_suite import Books, LedgerSuite
from tests.contract.single_frame_batch_suite import SingleFrameBatchSuite


@pytest.fixture
def ledger(database):
    return TransactionalLedger(database)


@pytest.fixture
async def account(database, ledger):
    return await Books(database, ledger).make()


class TestTransactionalLedger(LedgerSuite, SingleFrameBatchSuite):
    pass
