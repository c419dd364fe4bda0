"""Counterexamples of the accounting models (models/README.md) on real servers; each once broke an invariant."""

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
async def quota(database, ledger):
    async def push_limits(show):
        if not await ledger.sync_limits(show):
            assert await seed(ledger, show)

    return await Books(database, ledger, managed=True, tell=push_limits).make(burst=200)


async def scan_all(marker, reconciler):
    """Let a reconciliation scan every bucket, and pause before its end."""
    while marker != reconcile.SCAN_END:
        marker = await reconciler._reconcile_buckets(marker)


async def test_booking_in_flight_when_its_cap_is_lowered_is_checked_against_the_new_cap(
    quota, ledger, database, monkeypatch
):
    real = allocations.insert
    lowered = []

    async def insert(on, show, fence, groups):
        if not lowered:
            lowered.append(True)
            await database.run(LIMITS[Level.SUBSCRIPTION], quota.show, quota.pool, 100, None)
            await ledger.limits.reseed(quota.show)
        return await real(on, show, fence, groups)

    monkeypatch.setattr(allocations, "insert", insert)
    [outcome] = await ledger.book(quota.show, [quota.group([1, 2])])
    assert (len(outcome.booked), len(outcome.refused)) == (1, 1)
    assert await quota.agree() == 100


async def test_pushing_a_folder_does_not_raise_the_fence_past_a_lowered_cap(quota, ledger, database):
    await database.run(LIMITS[Level.FOLDER], quota.show, quota.folder, 100, None)  # not pushed to Redis yet
    folder = uuid4()
    await database.run(MAKE_FOLDER, folder, quota.show, "new")
    await database.run(MAKE_FOLDER_RESOURCE, folder, quota.show)
    await ledger.limits.push_missing(quota.show, [f"folder:{folder}"])
    [outcome] = await ledger.book(quota.show, [quota.group([1, 2])])
    assert len(outcome.booked) == 1


async def test_token_booked_again_under_a_higher_fence_survives_late_releases(quota, ledger, database):
    group = quota.group([1])
    old = await database.value(FENCE, quota.show)
    assert (await ledger.book(quota.show, [group]))[0].booked
    late = await allocations.delete(database, quota.show, [1])
    await database.value(RAISE, quota.show)
    assert await ledger.sync_limits(quota.show)
    assert (await ledger.book(quota.show, [group]))[0].booked
    while await allocations.prune_tombstones(database):
        pass
    await ledger.publisher.publish(quota.show, late)
    await ledger.publisher.rollback_bookings(quota.show, old, [group])
    assert await quota.agree() == 100
    assert await live_reader.usage_by_name(ledger.client, ledger.keys.show_keys(str(quota.show)))


async def test_older_reconciliation_does_not_finish_a_newer_one(quota, ledger, database):
    job = uuid4()
    assert (await ledger.book(quota.show, [BookingGroup(quota.charge(job=job), quota.host, [1], capped=False)]))[
        0
    ].booked
    old, new = (reconcile._ShowReconciler(ledger, quota.show, 0) for _ in range(2))
    old.fence = new.fence = await database.value(FENCE, quota.show)
    await scan_all(await old._run_step("begin"), old)
    await old._swap_counters()
    await database.run(MAKE_JOB, job, quota.show)
    await database.run(LIMITS[Level.JOB], quota.show, job, 100, None)
    await ledger.limits.reseed(quota.show)
    await scan_all(await new._run_step("begin"), new)
    with pytest.raises(reconcile.ReconcileSuperseded):
        await old._run_step("finish")
    await new._swap_counters()
    await new._run_step("finish")
    assert await ledger.sync_limits(quota.show)
    [outcome] = await ledger.book(quota.show, [BookingGroup(quota.charge(job=job), quota.host, [2])])
    assert outcome.refused == [2]


async def test_managed_flag_toggled_without_redis_noticing_requires_seeding(quota, ledger, database):
    await database.row(FLIP, quota.show, False)
    assert (await TransactionalLedger(database).book(quota.show, [quota.group([1, 2])]))[0].booked
    await database.row(FLIP, quota.show, True)
    assert (await ledger.book(quota.show, [quota.group([3])]))[0].all_booked == []
    assert await seed(ledger, quota.show)
    assert (await ledger.book(quota.show, [quota.group([3])]))[0].refused == [3]


async def test_deleted_subscription_is_not_restored_by_a_late_push(quota, ledger, database, monkeypatch):
    late = await ledger.limits.read(quota.show, [quota.pool])
    await database.run(DROP_SHARE, quota.show, quota.pool)
    real = ledger.limits.write

    async def write(show, fence, entries, *, last=False, **given):
        if last:
            await real(show, late.fence, list(late.entries), how="push")
        return await real(show, fence, entries, last=last, **given)

    monkeypatch.setattr(ledger.limits, "write", write)
    await ledger.limits.reseed(quota.show)
    monkeypatch.setattr(ledger.limits, "write", real)
    await ledger.book(quota.show, [quota.group([1])])
    assert await database.value(SUM, quota.show) == 0
