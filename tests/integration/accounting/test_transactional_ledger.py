"""The transactional ledger of unmanaged shows: changes of the managed flag, recomputes and crashes."""

import asyncio
import os
import signal
from itertools import count
from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.transactional import TransactionalLedger
from rota.infra.postgres import query
from rota.model.errors import PostgresUnavailable
from rota.model.quota import Level, Usage
from tests.contract.ledger_suite import Books, everywhere, outcome_of, sql
from tests.support.harness.lost_replies import lose_reply
from tests.support.waiting import until

FLIP = sql("SELECT was, fence FROM rota.show_set_managed($1, $2)")
HOLD = sql("SELECT 1 FROM rota.point WHERE pk_show = $1 FOR UPDATE")
HOLD_SHOW = sql("SELECT rota.show_shared($1)")
BOOK = query("rota.accounting", "ledger_book")
ROWS = sql("SELECT (SELECT count(*) FROM rota.job_resource) + (SELECT count(*) FROM rota.layer_resource)")
FENCE = sql("SELECT int_fence FROM rota.show WHERE pk_show = $1::uuid")
CAPPED = [sql(f"UPDATE rota.{table}_resource SET int_max_cores = 100000") for table in ("job", "layer")]
"""So that a flip to Redis keeps the rows."""
DAMAGE = sql(
    "WITH a AS (UPDATE rota.subscription SET int_cores = 77777), b AS (UPDATE rota.layer_resource SET int_gpus = 5)"
    " UPDATE rota.point SET int_cores = 0"
)
# The server is shared with other tests, so only this database counts.
BUSY = sql(
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    " AND query LIKE '%accounting.ledger_book%'"
)
WAITING = sql(
    "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted"
)


@pytest.fixture
async def quota(database):
    return await Books(database, TransactionalLedger(database)).make()


async def flip(quota, managed):
    return await quota.database.row(FLIP, quota.show, managed)


async def test_managed_show_is_declined_and_existing_bookings_are_reported(quota):
    await quota.book([1])
    await flip(quota, True)
    assert await quota.book([1, 2]) == outcome_of(already=[1], declined={2: DeclineReason.MANAGED})


async def test_managed_flag_toggled_under_load_keeps_tables_equal_to_procs(quota):
    numbers = count()
    await quota.limit(Level.SUBSCRIPTION, cores=3000)

    async def worker(rounds=25):
        for _ in range(rounds):
            first = next(numbers) * 3
            await quota.book(range(first, first + 3))
            fence = await quota.database.value(sql("SELECT int_fence FROM rota.show WHERE pk_show = $1"), quota.show)
            await allocations.insert(
                quota.database, quota.show, fence, [quota.group(range(10**6 + first, 10**6 + first + 1))]
            )
            await quota.ledger.release(quota.show, [first, 10**6 + first])

    async def flipper():
        for turn in range(15):
            await flip(quota, turn % 2 == 0)
        await flip(quota, False)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(worker())
        group.create_task(flipper())
    assert await quota.agree() > 0
    assert await quota.ledger.recompute(quota.show) == {}


async def test_tables_are_exact_as_soon_as_a_show_leaves_redis(quota):
    await flip(quota, True)
    job, layer = uuid4(), uuid4()
    await allocations.insert(
        quota.database, quota.show, 2, [quota.group(range(5), cores=50, gpus=1, job=job, layer=layer)]
    )
    assert await quota.ledger.counters(quota.show) == {}
    await flip(quota, False)
    assert await quota.agree() == 250


async def test_recompute_repairs_manual_changes_and_reports_their_levels(quota):
    await quota.book(range(3), gpus=1)
    await quota.database.run(DAMAGE)
    assert await quota.ledger.recompute_all() == {quota.show: {Level.SUBSCRIPTION: 1, Level.LAYER: 1, Level.POINT: 1}}
    assert await quota.counted() == everywhere(300, 3)
    assert await quota.ledger.recompute_all() == {}


async def test_recompute_sets_drained_keys_to_zero_and_skips_managed_shows(quota):
    other = await Books(quota.database, quota.ledger, managed=True).make()
    await quota.database.run(DAMAGE)
    assert quota.show in await quota.ledger.recompute_all()
    assert await quota.counted() == everywhere(0)
    assert await other.ledger.recompute(other.show) == {}
    assert (await other.counted())[Level.SUBSCRIPTION].cores == 77777


async def test_recompute_waits_for_a_booking_in_flight_and_counts_it(quota):
    group = [quota.group([1, 2])]
    async with quota.database.transaction() as tx:
        await tx.rows(BOOK, quota.show, False, *allocations.booking_columns(group))
        recomputing = asyncio.create_task(quota.ledger.recompute(quota.show))
        await until(lambda: quota.database.value(WAITING), what="the recompute to wait")
    assert await recomputing == {}
    assert await quota.agree() == 200


async def test_recompute_deletes_unused_default_rows_of_jobs_and_layers(quota):
    held, capped, ranked, idle = (uuid4() for _ in range(4))
    for token, job in enumerate((held, capped, ranked, idle)):
        await quota.book([token], job=job, layer=job)
    await quota.ledger.release(quota.show, [1, 2, 3])
    await quota.database.run(sql("UPDATE rota.job_resource SET int_max_gpus = 4 WHERE pk_job = $1"), capped)
    await quota.database.run(sql("UPDATE rota.layer_resource SET int_max_cores = 400 WHERE pk_layer = $1"), capped)
    await quota.database.run(sql("UPDATE rota.job_resource SET int_priority = 7 WHERE pk_job = $1"), ranked)
    assert await quota.ledger.recompute(quota.show) == {}
    jobs = {row["pk_job"] for row in await quota.database.rows(sql("SELECT pk_job FROM rota.job_resource"))}
    layers = {row["pk_layer"] for row in await quota.database.rows(sql("SELECT pk_layer FROM rota.layer_resource"))}
    assert (jobs, layers) == ({held, capped, ranked}, {held, capped})
    assert (await quota.book([9], job=idle, layer=idle)).booked == [9]
    assert await quota.agree() == 200


async def test_refresh_writes_the_usage_of_a_managed_show_and_adds_no_rows(quota):
    for capped in CAPPED:
        await quota.database.run(capped)
    await flip(quota, True)
    job, layer = uuid4(), uuid4()
    fence = await quota.database.value(FENCE, quota.show)
    await allocations.insert(
        quota.database, quota.show, fence, [quota.group([1, 2], gpus=1), quota.group([3], job=job, layer=layer)]
    )
    assert await quota.ledger.refresh_managed_tables(quota.show) == dict.fromkeys(Level, 1)
    counted = await quota.counted()
    assert (counted[Level.SUBSCRIPTION], counted[Level.JOB]) == (Usage(300, 2), Usage(200, 2))
    assert await quota.database.value(ROWS) == 2
    assert await quota.ledger.refresh_managed_tables(quota.show) == {}
    await allocations.delete(quota.database, quota.show, [1, 2, 3])
    assert await quota.ledger.refresh_managed_tables(quota.show) == dict.fromkeys(Level, 1)
    assert await quota.counted() == everywhere(0)


async def test_refresh_skips_an_unmanaged_show(quota):
    await quota.book([1])
    await quota.database.run(DAMAGE)
    assert await quota.ledger.refresh_managed_tables(quota.show) == {}
    assert (await quota.counted())[Level.SUBSCRIPTION].cores == 77777


async def test_refresh_changes_nothing_when_the_show_becomes_unmanaged_meanwhile(quota):
    await flip(quota, True)
    await allocations.insert(quota.database, quota.show, 2, [quota.group([1])])
    group = [quota.group([2, 3])]
    async with quota.database.transaction() as tx:
        await tx.row(FLIP, quota.show, False)
        refreshing = asyncio.create_task(quota.ledger.refresh_managed_tables(quota.show))
        await until(lambda: quota.database.value(WAITING), what="the refresh to wait")
        await tx.rows(BOOK, quota.show, False, *allocations.booking_columns(group))
    assert await refreshing == {}
    assert await quota.agree() == 300


async def test_recompute_under_load_loses_nothing(quota):
    async def worker(number):
        for turn in range(20):
            token = number * 1000 + turn
            await quota.book([token])
            if turn % 2:
                await quota.ledger.release(quota.show, [token])

    async def recomputer():
        return [await quota.ledger.recompute(quota.show) for _ in range(20)]

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(worker(number))
        differences = group.create_task(recomputer())
    assert not any(differences.result())
    assert await quota.agree() == 4000


async def test_too_low_counter_does_not_prevent_releases(quota):
    await quota.book(range(3))
    await quota.database.run(DAMAGE)
    await quota.ledger.release(quota.show, range(3))
    assert (await quota.tokens(), (await quota.counted())[Level.POINT].cores) == ([], 0)


async def test_backend_killed_during_a_booking_leaves_nothing(quota):
    async with quota.database.transaction() as tx:
        await tx.value(HOLD, quota.show)
        booking = asyncio.create_task(quota.book(range(20)))
        # It waits for the last of the five levels, with all others locked and nothing written yet.
        [row] = await until(lambda: quota.database.rows(BUSY), what="the booking to wait")
        os.kill(row["pid"], signal.SIGTERM)
        with pytest.raises(PostgresUnavailable):
            await booking
    assert (await quota.tokens(), await quota.counted()) == ([], everywhere(0))
    assert (await quota.book(range(20))).booked == list(range(20))


async def test_booking_with_a_lost_reply_can_be_repeated(quota, monkeypatch):
    with monkeypatch.context() as patched:
        lose_reply(patched, "ledger.book")
        with pytest.raises(ConnectionError):
            await quota.book(range(3))
    assert await quota.book(range(3)) == outcome_of(already=[0, 1, 2])
    assert await quota.counted() == everywhere(300)


async def test_rows_of_jobs_layers_and_points_are_created_by_a_booking(quota):
    job, layer = uuid4(), uuid4()
    await quota.database.run(sql("DELETE FROM rota.point"))
    assert (await quota.book([1, 2], job=job, layer=layer)).booked == [1, 2]
    assert await quota.agree() == 200


@pytest.mark.parametrize(
    ("field", "why"), [("folder", DeclineReason.UNKNOWN_FOLDER), ("dept", DeclineReason.UNKNOWN_DEPT)]
)
async def test_booking_without_a_countable_key_is_declined_and_the_rest_of_the_batch_booked(quota, field, why):
    lost, good = await quota.ledger.book(quota.show, [quota.group([1], **{field: uuid4()}), quota.group([2])])
    assert (dict(lost.declined), list(good.booked)) == ({1: why}, [2])
    assert await quota.agree() == 100


async def test_booking_on_a_folder_or_job_of_another_show_is_declined(quota):
    other = await Books(quota.database, quota.ledger).make()
    assert (await quota.book([1], folder=other.folder)).declined == {1: DeclineReason.UNKNOWN_FOLDER}
    assert (await quota.book([1], job=other.job)).declined == {1: DeclineReason.UNKNOWN_JOB}
    assert await other.counted() == everywhere(0)


async def test_concurrent_bookings_of_one_token_on_different_keys_book_it_once(quota):
    pools = [await quota.another_pool() for _ in range(6)]
    folders = [await quota.another_folder() for _ in range(6)]
    outcomes = await asyncio.gather(
        *(
            quota.book(range(10), alloc=pool, folder=folder, job=uuid4(), layer=uuid4())
            for pool, folder in zip(pools, folders, strict=True)
        )
    )
    assert sum(len(outcome.booked) for outcome in outcomes) == 10
    assert await quota.agree() == 1000


async def test_managed_flag_change_waits_for_a_booking_in_flight(quota):
    async with quota.database.transaction() as tx:
        await tx.value(HOLD_SHOW, quota.show)
        flipping = asyncio.create_task(flip(quota, True))
        await until(lambda: quota.database.value(WAITING), what="the flag change to wait")
        assert not flipping.done()
    assert (await flipping)["fence"] == 2
