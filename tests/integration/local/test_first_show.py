"""The first show of `rota up` is created completely, whenever an earlier start was interrupted."""

import pytest

from rota.accounting.admin import QuotaAdmin
from rota.accounting.service import AccountingService
from rota.cli.local.up import create_first_show


class Crash(Exception):
    """The process ends here."""


async def created(accounting):
    admin = accounting.admin
    return [[each.name for each in found] for found in (await admin.shows(), await admin.pools(), await admin.depts())]


@pytest.mark.parametrize("step", ["create_dept", "create_show", "create_subscription", "create_folder", "create_point"])
async def test_interrupted_creation_of_the_first_show_leaves_nothing_and_repeats(database, redis, step, monkeypatch):
    accounting = AccountingService(database, redis)

    async def interrupted(*_args, **_more):
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(QuotaAdmin, step, interrupted)
        with pytest.raises(Crash):
            await create_first_show(accounting)
    assert await created(accounting) == [[], [], []]
    await create_first_show(accounting)
    assert await created(accounting) == [["default"], ["local"], ["default"]]
    assert [each.name for each in await accounting.admin.subscriptions("default")] == ["local"]


async def test_first_show_is_not_created_where_a_pool_exists(database, redis):
    accounting = AccountingService(database, redis)
    await accounting.admin.create_pool("render", actor="anna")
    await create_first_show(accounting)
    assert await created(accounting) == [[], ["render"], []]
