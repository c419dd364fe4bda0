"""Stories that the models of the books told (models/README.md), played on real servers: each once broke a rule."""

from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.ledger import BookingGroup
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.live.seeding import seed
from rota.accounting.transactional import TransactionalLedger
from rota.infra.redis import RedisKeys
from rota.model.quota import Level
from tests.contract.ledger_suite import LIMITS, MAKE_FOLDER, MAKE_FOLDER_RESOURCE, SUM, Books, sql

FLIP = sql("SELECT * FROM rota.show_set_managed($1, $2)")
FENCE = sql("SELECT int_fence FROM rota.show WHERE pk_show = $1")
RAISE = sql("SELECT rota.show_raise_fence($1)")
MAKE_JOB = sql("INSERT INTO rota.job_resource (pk_job, pk_show) VALUES ($1, $2)")
DROP_SHARE = sql("DELETE FROM rota.subscription WHERE pk_show = $1 AND pk_alloc = $2")


@pytest.fixture
def ledger(database, redis):
    return LiveLedger(database, redis, RedisKeys())


@pytest.fixture
async def books(database, ledger):
    async def tell(show):
        if not await ledger.sync_limits(show):
            assert await seed(ledger, show)

    return await Books(database, ledger, managed=True, tell=tell).make(burst=200)


async def counted(mark, counting):
    """Let a recount count everything, and pause before its end."""
    while mark != reconcile.SCAN_END:
        mark = await counting._reconcile_buckets(mark)


async def test_a_booking_under_way_when_its_cap_is_lowered_asks_the_new_cap(books, ledger, database, monkeypatch):
    real = allocations.insert
    lowered = []

    async def insert(on, show, fence, groups):
        if not lowered:
            lowered.append(True)
            await database.run(LIMITS[Level.SUBSCRIPTION], books.show, books.pool, 100, None)
            await ledger.limits.reseed(books.show)
        return await real(on, show, fence, groups)

    monkeypatch.setattr(allocations, "insert", insert)
    [outcome] = await ledger.book(books.show, [books.group([1, 2])])
    assert (len(outcome.booked), len(outcome.refused)) == (1, 1)
    assert await books.agree() == 100


async def test_teaching_a_folder_does_not_lift_the_fence_over_a_lowered_cap(books, ledger, database):
    await database.run(LIMITS[Level.FOLDER], books.show, books.folder, 100, None)  # its push is still to come
    folder = uuid4()
    await database.run(MAKE_FOLDER, folder, books.show, "new")
    await database.run(MAKE_FOLDER_RESOURCE, folder, books.show)
    await ledger.limits.push_missing(books.show, [f"folder:{folder}"])
    [outcome] = await ledger.book(books.show, [books.group([1, 2])])
    assert len(outcome.booked) == 1


async def test_a_repeat_after_the_fence_rose_keeps_its_token_whatever_comes_late(books, ledger, database):
    group = books.group([1])
    old = await database.value(FENCE, books.show)
    assert (await ledger.book(books.show, [group]))[0].booked
    late = await allocations.delete(database, books.show, [1])
    await database.value(RAISE, books.show)
    assert await ledger.sync_limits(books.show)
    assert (await ledger.book(books.show, [group]))[0].booked
    while await allocations.prune_tombstones(database):
        pass
    await ledger.publisher.publish(books.show, late)
    await ledger.publisher.rollback_bookings(books.show, old, [group])
    assert await books.agree() == 100
    assert await live_reader.usage_by_name(ledger.client, ledger.keys.show_keys(str(books.show)))


async def test_an_older_recount_does_not_end_a_newer_one(books, ledger, database):
    job = uuid4()
    assert (await ledger.book(books.show, [BookingGroup(books.charge(job=job), books.host, [1], capped=False)]))[
        0
    ].booked
    old, new = (reconcile._ShowReconciler(ledger, books.show, 0) for _ in range(2))
    old.fence = new.fence = await database.value(FENCE, books.show)
    await counted(await old._run_step("begin"), old)
    await old._swap_counters()
    await database.run(MAKE_JOB, job, books.show)
    await database.run(LIMITS[Level.JOB], books.show, job, 100, None)
    await ledger.limits.reseed(books.show)
    await counted(await new._run_step("begin"), new)
    with pytest.raises(reconcile.ReconcileSuperseded):
        await old._run_step("finish")
    await new._swap_counters()
    await new._run_step("finish")
    assert await ledger.sync_limits(books.show)
    [outcome] = await ledger.book(books.show, [BookingGroup(books.charge(job=job), books.host, [2])])
    assert outcome.refused == [2]


async def test_a_flip_there_and_back_that_redis_was_not_told_of_is_seeded(books, ledger, database):
    await database.row(FLIP, books.show, False)
    assert (await TransactionalLedger(database).book(books.show, [books.group([1, 2])]))[0].booked
    await database.row(FLIP, books.show, True)
    assert (await ledger.book(books.show, [books.group([3])]))[0].all_booked == []
    assert await seed(ledger, books.show)
    assert (await ledger.book(books.show, [books.group([3])]))[0].refused == [3]


async def test_a_removed_share_does_not_come_back_by_a_late_push(books, ledger, database, monkeypatch):
    late = await ledger.limits.read(books.show, [books.pool])
    await database.run(DROP_SHARE, books.show, books.pool)
    real = ledger.limits.write

    async def write(show, fence, entries, *, last=False, **given):
        if last:
            await real(show, late.fence, list(late.entries), how="push")
        return await real(show, fence, entries, last=last, **given)

    monkeypatch.setattr(ledger.limits, "write", write)
    await ledger.limits.reseed(books.show)
    monkeypatch.setattr(ledger.limits, "write", real)
    await ledger.book(books.show, [books.group([1])])
    assert await database.value(SUM, books.show) == 0
