"""Rows of `proc` for a managed show: who may insert them, when, and which refusal is returned otherwise."""

import asyncio
import os
import signal

import asyncpg
import pytest

from rota.accounting import allocations
from rota.accounting.ledger import Charge, DeclineReason, ReleasedTokens
from rota.accounting.transactional import TransactionalLedger
from rota.model.errors import PostgresUnavailable
from rota.model.quota import Level, Usage
from tests.contract.ledger_suite import Books, everywhere, sql
from tests.support.waiting import until

FENCE = sql("SELECT int_fence FROM rota.show WHERE pk_show = $1")
RAISE = sql("SELECT rota.show_raise_fence($1)")
FLIP = sql("SELECT was, fence FROM rota.show_set_managed($1, $2)")
SHARE = sql("SELECT rota.show_shared($1)")
# The server is shared with other tests, so only this database counts.
WAITING = sql(
    "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted"
)
BUSY = sql(
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    " AND query LIKE '%accounting.proc_insert%'"
)


@pytest.fixture
async def quota(database):
    return await Books(database, TransactionalLedger(database), managed=True).make()


async def insert(quota, tokens, *, fence=1, on=None, **charge):
    return await allocations.insert(on or quota.database, quota.show, fence, [quota.group(tokens, **charge)])


async def waiting(database):
    return await database.value(WAITING)


async def test_insert_under_the_booking_fence_adds_rows(quota):
    assert await insert(quota, [*range(5), 9, 7]) == allocations.ProcInsertResult()
    assert await quota.tokens() == [0, 1, 2, 3, 4, 7, 9]
    [proc, *_] = await allocations.page(quota.database, quota.show)
    assert proc == allocations.Proc(0, quota.charge(), quota.host, 1)


async def test_insert_under_an_older_fence_is_refused(quota):
    await quota.database.value(RAISE, quota.show)
    assert (await insert(quota, [1, 2])).refused == {1: DeclineReason.STALE_FENCE, 2: DeclineReason.STALE_FENCE}
    assert await insert(quota, [1, 2], fence=2) == allocations.ProcInsertResult()


async def test_insert_for_an_unmanaged_show_is_refused(quota):
    await quota.database.row(FLIP, quota.show, False)
    assert (await insert(quota, [1], fence=2)).refused == {1: DeclineReason.NOT_MANAGED}
    assert await quota.tokens() == []


async def test_repeated_insert_reports_rows_as_already_there(quota):
    await insert(quota, range(4))
    assert await insert(quota, range(4)) == allocations.ProcInsertResult(already=[0, 1, 2, 3])
    assert await insert(quota, range(2, 6)) == allocations.ProcInsertResult(already=[2, 3])
    assert await quota.tokens() == list(range(6))


async def test_existing_row_is_never_reported_as_refused(quota):
    await insert(quota, [1])
    await quota.database.value(RAISE, quota.show)
    result = await insert(quota, [1, 2])
    assert (result.already, result.refused) == ([1], {2: DeclineReason.STALE_FENCE})
    await quota.database.row(FLIP, quota.show, False)
    assert (await insert(quota, [1])).already == [1]


async def test_insert_of_a_token_with_another_charge_is_a_duplicate(quota):
    await insert(quota, [1])
    result = await insert(quota, [1, 2], cores=200)
    assert (result.already, result.refused) == ([], {1: DeclineReason.DUPLICATE})
    assert [proc.charge.cores for proc in await allocations.page(quota.database, quota.show)] == [100, 200]


async def test_tombstoned_token_never_gets_a_row_and_a_token_with_a_row_is_not_tombstoned(quota):
    await insert(quota, [1])
    assert await allocations.tombstone(quota.database, quota.show, [1, 2]) == {2}
    assert await allocations.tombstone(quota.database, quota.show, [2]) == {2}
    assert (await insert(quota, [2, 7])) == allocations.ProcInsertResult(refused={2: DeclineReason.TOMBSTONED})
    assert (await insert(quota, range(4))) == allocations.ProcInsertResult(
        already=[1], refused={2: DeclineReason.TOMBSTONED}
    )
    assert await quota.tokens() == [0, 1, 3, 7]


async def test_tombstones_are_pruned_only_under_a_higher_fence(quota):
    await allocations.tombstone(quota.database, quota.show, [1])
    assert await allocations.prune_tombstones(quota.database) == 0
    await quota.database.value(RAISE, quota.show)
    assert await allocations.prune_tombstones(quota.database) == 1
    assert (await insert(quota, [1])).refused == {1: DeclineReason.STALE_FENCE}


async def test_tombstone_waits_for_an_insert_in_flight_and_then_finds_its_row(quota):
    async with quota.database.transaction() as tx:
        await insert(quota, [1], on=tx)
        tombstoning = asyncio.create_task(allocations.tombstone(quota.database, quota.show, [1]))
        await until(lambda: waiting(quota.database), what="the tombstone call to wait")
        assert not tombstoning.done()
    assert await tombstoning == set()


async def test_insert_that_waited_while_the_fence_rose_is_refused(quota):
    async with quota.database.transaction() as tx:
        await tx.value(RAISE, quota.show)
        late = asyncio.create_task(insert(quota, [1]))
        await until(lambda: waiting(quota.database), what="the insert to wait")
    assert (await late).refused == {1: DeclineReason.STALE_FENCE}


async def test_manual_fence_update_waits_for_inserts_in_flight(quota):
    manual_update = sql("UPDATE rota.show SET int_fence = int_fence + 1 WHERE pk_show = $1")
    async with quota.database.transaction() as tx:
        await insert(quota, [1], on=tx)
        raising = asyncio.create_task(quota.database.run(manual_update, quota.show))
        await until(lambda: waiting(quota.database), what="the update to wait")
    await raising


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("resource", ["cores", "gpus"])
async def test_lowered_limit_raises_the_fence_and_raised_limit_does_not(quota, level, resource):
    async def fence_after(value):
        await quota.limit(level, **{resource: value})
        return await quota.database.value(FENCE, quota.show)

    start = await fence_after(5_000_000)
    assert await fence_after(6_000_000) == start
    assert await fence_after(5_999_999) == start + 1
    if level is not Level.SUBSCRIPTION or resource == "gpus":
        assert await fence_after(-1) == start + 1
        assert await fence_after(7_000_000) == start + 2


async def test_concurrent_inserts_of_the_same_tokens_insert_each_once(quota):
    results = await asyncio.gather(*(insert(quota, range(50)) for _ in range(6)))
    assert sorted(len(each.already) for each in results) == [0, 50, 50, 50, 50, 50]
    assert not any(each.refused for each in results)


async def test_concurrent_overlapping_batches_insert_each_token_once(quota):
    results = await asyncio.gather(*(insert(quota, range(start, start + 40)) for start in range(0, 100, 10)))
    assert not any(each.refused for each in results)
    assert await quota.tokens() == list(range(130))
    assert sum(40 - len(each.already) for each in results) == 130


async def test_delete_returns_released_charges_and_leaves_tables_of_a_managed_show_unchanged(quota):
    await insert(quota, [1, 2, 3], gpus=1)
    deleted = await allocations.delete(quota.database, quota.show, [3, 1, 77])
    assert deleted == allocations.ProcDeleteResult(
        [ReleasedTokens(quota.charge(gpus=1), [1, 3])], managed=True, fence=1
    )
    assert await quota.counted() == everywhere(0)
    assert await allocations.delete(quota.database, quota.show, [1, 3]) == allocations.ProcDeleteResult(
        [], managed=False, fence=0
    )


async def test_sums_and_pages_return_what_is_booked(quota):
    other = await Books(quota.database, quota.ledger, managed=True).make()
    await insert(quota, range(10), cores=50)
    await insert(other, range(100, 103), gpus=2)
    totals = {each.show: each for each in await allocations.sums(quota.database, [quota.show, other.show])}
    assert (totals[quota.show].usage, totals[quota.show].procs) == (Usage(500, 0), 10)
    assert (totals[other.show].usage, totals[other.show].dept) == (Usage(300, 6), other.dept)
    assert [proc.token for proc in await allocations.page(quota.database, quota.show, 3, 150, most=4)] == [3, 4, 5, 6]
    assert [proc.token for proc in await allocations.page(quota.database, quota.show, 8, 150)] == [8, 9]


async def test_tokens_are_returned_in_order_for_one_show_and_range(quota):
    other = await Books(quota.database, quota.ledger, managed=True).make()
    await insert(quota, [9, 3, 4, 5, 20])
    await insert(other, [6, 7])
    assert await allocations.tokens(quota.database, quota.show, 4, 19) == [4, 5, 9]
    assert await allocations.tokens(quota.database, quota.show, 10, 19) == []


async def test_rows_are_paged_by_charge_until_an_empty_page(quota):
    other = await Books(quota.database, quota.ledger, managed=True).make()
    await insert(quota, [1, 2, 5], cores=50)
    await insert(quota, [3, 4], gpus=1)
    await insert(other, [0, 6])
    pages, first = [], 0
    while True:
        groups, last = await allocations.page_groups(quota.database, quota.show, first, most=4)
        if last is None:
            assert groups == []
            break
        pages.append((dict(groups), last))
        first = last + 1
    half, gpu = quota.charge(cores=50), quota.charge(gpus=1)
    assert pages == [({half: [1, 2], gpu: [3, 4]}, 4), ({half: [5]}, 5)]


async def test_backend_killed_during_an_insert_leaves_nothing(quota):
    async with quota.database.transaction() as blocker:
        await blocker.value(SHARE, quota.show)
        blocking = asyncio.create_task(quota.database.value(RAISE, quota.show))
        await until(lambda: waiting(quota.database), what="the call to wait for the exclusive lock")
        inserting = asyncio.create_task(insert(quota, range(300)))
        [row] = await until(lambda: quota.database.rows(BUSY), what="the insert to start")
        os.kill(row["pid"], signal.SIGTERM)
        with pytest.raises(PostgresUnavailable) as lost:
            await inserting
    await blocking
    assert lost.value.facts["outcome"] == "unknown"
    assert await quota.tokens() == []
    assert (await insert(quota, range(300), fence=2)) == allocations.ProcInsertResult()


async def test_insert_in_a_snapshot_older_than_the_lock_is_refused(quota):
    with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
        async with quota.database.transaction("repeatable read") as tx:
            await insert(quota, [1], on=tx)


async def test_rolled_back_insert_leaves_neither_rows_nor_locks(quota):
    async def insert_and_fail():
        async with quota.database.transaction() as tx:
            await insert(quota, [1], on=tx)
            raise LookupError

    with pytest.raises(LookupError):
        await insert_and_fail()
    assert await quota.tokens() == []
    assert await quota.database.value(RAISE, quota.show) == 2


async def test_rows_keep_their_charge_when_their_job_is_moved(quota):
    folder = await quota.another_folder()
    await insert(quota, [1])
    await insert(quota, [2], folder=folder)
    charges = {proc.token: proc.charge for proc in await allocations.page(quota.database, quota.show)}
    assert charges == {1: quota.charge(), 2: quota.charge(folder=folder)}
    assert isinstance(charges[1], Charge)
