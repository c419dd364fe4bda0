"""A session holds the locks of one show, such as by an UPDATE that is not committed: other shows go on."""

import asyncpg
import pytest

from rota.accounting.audit import audit
from rota.model.errors import PostgresUnavailable
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

LOWER = """UPDATE rota.subscription SET int_burst = int_burst - 100 FROM rota.show s
WHERE s.pk_show = subscription.pk_show"""
LOCK_SHARES = "UPDATE rota.subscription SET int_burst = int_burst"
FREE_FRAMES = 300
FREE_WITHIN_S = 12.0
"""Generous: it takes one to two seconds. Without isolation, 1 to 7 frames end in a second."""


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        yield farm
        await farm.quiet()


async def is_explained(farm, job, text):
    reasons = (await farm.replica.engine.explainer.explain(job)).reasons
    return bool(reasons) and text in reasons[0].sentence


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "unmanaged"])
async def test_lock_timeout_of_one_show_does_not_slow_down_another(farm, database_url, managed):
    await farm.show("locked", managed=managed)
    await farm.show("free", managed=managed)
    await farm.worker(slots=12)
    gate = hanging("x")
    first = await farm.submit("hang", "x", show="locked", frames=4)
    await farm.running("x", 4)
    operator = await asyncpg.connect(database_url)
    async with operator.transaction():
        await operator.execute(f"{LOWER} AND s.str_name = 'locked'")
        gate.set()  # its frames end in the same reports as those of the other show
        waiting = await farm.submit("note", show="locked", frames=40)
        jobs = [await farm.submit("noop", show="free", frames=10) for _ in range(FREE_FRAMES // 10)]
        for job in jobs:
            assert await farm.ended(job, within_s=FREE_WITHIN_S) == "SUCCEEDED"
        locked = farm.accounting.locked_shows
        await until(lambda: bool(locked), what="an attempt on the locked show")
        # While an attempt is under way, it has reserved the slots.
        await until(lambda: is_explained(farm, waiting, "Another session holds a lock of its show"), what="the reason")
    await operator.close()
    for job in (first, waiting):
        assert await farm.ended(job, within_s=30) == "SUCCEEDED"
    shows = {show.name: show for show in await farm.accounting.admin.shows()}
    assert not [line for line in (await audit(farm.accounting, shows["locked"])).lines if line.problem]
    assert not farm.accounting.locked_shows


async def test_locks_of_a_server_that_is_paused_inside_a_transaction_end_within_seconds(farm):
    await farm.show(managed=False)
    await farm.worker()

    async def pause_inside_a_transaction():
        async with farm.replica.database.transaction() as paused:
            await paused.run(sql(LOCK_SHARES))
            assert await farm.ended(await farm.submit("noop", frames=3), within_s=8) == "SUCCEEDED"

    with pytest.raises(PostgresUnavailable):
        await pause_inside_a_transaction()


async def test_lock_timeout_of_a_booking_leaves_nothing_counted_in_redis(farm, database_url):
    await farm.show("locked", burst=4, size=4)
    operator = await asyncpg.connect(database_url)
    async with operator.transaction():
        await operator.execute(f"{LOWER.replace('100', '1')} AND s.str_name = 'locked'")
        await farm.worker(slots=12)
        job = await farm.submit("noop", show="locked", frames=8)
        await until(lambda: bool(farm.accounting.locked_shows), what="a lock timeout")
        [show] = await farm.accounting.admin.shows()

        async def nothing_counted():
            return not any(usage.cores for usage in (await farm.accounting.live.counters(show.id)).values())

        await until(nothing_counted, what="the end of the booking in Redis")
    await operator.close()
    assert await farm.ended(job) == "SUCCEEDED"
