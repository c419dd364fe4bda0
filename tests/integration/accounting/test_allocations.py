"""Rows of `proc` for a show that Redis keeps: who may insert them, when, and what is told otherwise."""

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
async def books(database):
    return await Books(database, TransactionalLedger(database), managed=True).make()


async def insert(books, tokens, *, fence=1, on=None, **charge):
    return await allocations.insert(on or books.database, books.show, fence, [books.group(tokens, **charge)])


async def waiting(database):
    return await database.value(WAITING)


async def test_a_batch_is_inserted_under_the_fence_it_was_booked_under(books):
    assert await insert(books, [*range(5), 9, 7]) == allocations.ProcInsertResult()
    assert await books.tokens() == [0, 1, 2, 3, 4, 7, 9]
    [proc, *_] = await allocations.page(books.database, books.show)
    assert proc == allocations.Proc(0, books.charge(), books.host, 1)


async def test_a_risen_fence_refuses_the_batch(books):
    await books.database.value(RAISE, books.show)
    assert (await insert(books, [1, 2])).refused == {1: DeclineReason.STALE_FENCE, 2: DeclineReason.STALE_FENCE}
    assert await insert(books, [1, 2], fence=2) == allocations.ProcInsertResult()


async def test_a_show_that_is_not_managed_refuses_the_batch(books):
    await books.database.row(FLIP, books.show, False)
    assert (await insert(books, [1], fence=2)).refused == {1: DeclineReason.NOT_MANAGED}
    assert await books.tokens() == []


async def test_a_repeat_is_told_as_already_there(books):
    await insert(books, range(4))
    assert await insert(books, range(4)) == allocations.ProcInsertResult(already=[0, 1, 2, 3])
    assert await insert(books, range(2, 6)) == allocations.ProcInsertResult(already=[2, 3])
    assert await books.tokens() == list(range(6))


async def test_a_row_that_is_there_is_never_called_refused_since_redis_would_give_it_back(books):
    await insert(books, [1])
    await books.database.value(RAISE, books.show)
    told = await insert(books, [1, 2])
    assert (told.already, told.refused) == ([1], {2: DeclineReason.STALE_FENCE})
    await books.database.row(FLIP, books.show, False)
    assert (await insert(books, [1])).already == [1]


async def test_a_token_with_another_charge_is_a_duplicate(books):
    await insert(books, [1])
    told = await insert(books, [1, 2], cores=200)
    assert (told.already, told.refused) == ([], {1: DeclineReason.DUPLICATE})
    assert [proc.charge.cores for proc in await allocations.page(books.database, books.show)] == [100, 200]


async def test_a_buried_token_never_gets_a_row_and_one_with_a_row_is_not_buried(books):
    await insert(books, [1])
    assert await allocations.tombstone(books.database, books.show, [1, 2]) == {2}
    assert await allocations.tombstone(books.database, books.show, [2]) == {2}
    assert (await insert(books, [2, 7])) == allocations.ProcInsertResult(refused={2: DeclineReason.TOMBSTONED})
    assert (await insert(books, range(4))) == allocations.ProcInsertResult(
        already=[1], refused={2: DeclineReason.TOMBSTONED}
    )
    assert await books.tokens() == [0, 1, 3, 7]


async def test_tombstones_are_pruned_only_when_the_fence_has_risen_above_them(books):
    await allocations.tombstone(books.database, books.show, [1])
    assert await allocations.prune_tombstones(books.database) == 0
    await books.database.value(RAISE, books.show)
    assert await allocations.prune_tombstones(books.database) == 1
    assert (await insert(books, [1])).refused == {1: DeclineReason.STALE_FENCE}


async def test_burying_waits_for_an_insert_under_way_and_then_finds_its_row(books):
    async with books.database.transaction() as tx:
        await insert(books, [1], on=tx)
        burial = asyncio.create_task(allocations.tombstone(books.database, books.show, [1]))
        await until(lambda: waiting(books.database), what="the burial's wait")
        assert not burial.done()
    assert await burial == set()


async def test_an_insert_that_waited_for_the_fence_to_rise_is_refused(books):
    async with books.database.transaction() as tx:
        await tx.value(RAISE, books.show)
        late = asyncio.create_task(insert(books, [1]))
        await until(lambda: waiting(books.database), what="the insert's wait")
    assert (await late).refused == {1: DeclineReason.STALE_FENCE}


async def test_a_fence_raised_by_hand_waits_for_inserts_under_way(books):
    by_hand = sql("UPDATE rota.show SET int_fence = int_fence + 1 WHERE pk_show = $1")
    async with books.database.transaction() as tx:
        await insert(books, [1], on=tx)
        raising = asyncio.create_task(books.database.run(by_hand, books.show))
        await until(lambda: waiting(books.database), what="the wait of the update")
    await raising


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("resource", ["cores", "gpus"])
async def test_a_lowered_limit_raises_the_fence_and_a_raised_one_does_not(books, level, resource):
    async def fence_after(value):
        await books.limit(level, **{resource: value})
        return await books.database.value(FENCE, books.show)

    start = await fence_after(5_000_000)
    assert await fence_after(6_000_000) == start
    assert await fence_after(5_999_999) == start + 1
    if level is not Level.SUBSCRIPTION or resource == "gpus":
        assert await fence_after(-1) == start + 1
        assert await fence_after(7_000_000) == start + 2


async def test_inserts_of_the_same_tokens_at_once_insert_each_once(books):
    told = await asyncio.gather(*(insert(books, range(50)) for _ in range(6)))
    assert sorted(len(each.already) for each in told) == [0, 50, 50, 50, 50, 50]
    assert not any(each.refused for each in told)


async def test_overlapping_batches_at_once_insert_each_token_once(books):
    told = await asyncio.gather(*(insert(books, range(start, start + 40)) for start in range(0, 100, 10)))
    assert not any(each.refused for each in told)
    assert await books.tokens() == list(range(130))
    assert sum(40 - len(each.already) for each in told) == 130


async def test_a_delete_tells_what_was_held_and_leaves_the_tables_of_a_managed_show_alone(books):
    await insert(books, [1, 2, 3], gpus=1)
    deleted = await allocations.delete(books.database, books.show, [3, 1, 77])
    assert deleted == allocations.ProcDeleteResult(
        [ReleasedTokens(books.charge(gpus=1), [1, 3])], managed=True, fence=1
    )
    assert await books.counted() == everywhere(0)
    assert await allocations.delete(books.database, books.show, [1, 3]) == allocations.ProcDeleteResult(
        [], managed=False, fence=0
    )


async def test_sums_and_pages_show_what_is_booked(books):
    other = await Books(books.database, books.ledger, managed=True).make()
    await insert(books, range(10), cores=50)
    await insert(other, range(100, 103), gpus=2)
    totals = {each.show: each for each in await allocations.sums(books.database, [books.show, other.show])}
    assert (totals[books.show].usage, totals[books.show].procs) == (Usage(500, 0), 10)
    assert (totals[other.show].usage, totals[other.show].dept) == (Usage(300, 6), other.dept)
    assert [proc.token for proc in await allocations.page(books.database, books.show, 3, 150, most=4)] == [3, 4, 5, 6]
    assert [proc.token for proc in await allocations.page(books.database, books.show, 8, 150)] == [8, 9]


async def test_tokens_with_a_row_are_told_in_order_for_one_show_and_range(books):
    other = await Books(books.database, books.ledger, managed=True).make()
    await insert(books, [9, 3, 4, 5, 20])
    await insert(other, [6, 7])
    assert await allocations.tokens(books.database, books.show, 4, 19) == [4, 5, 9]
    assert await allocations.tokens(books.database, books.show, 10, 19) == []


async def test_rows_are_paged_by_charge_until_an_empty_page(books):
    other = await Books(books.database, books.ledger, managed=True).make()
    await insert(books, [1, 2, 5], cores=50)
    await insert(books, [3, 4], gpus=1)
    await insert(other, [0, 6])
    pages, first = [], 0
    while True:
        groups, last = await allocations.page_groups(books.database, books.show, first, most=4)
        if last is None:
            assert groups == []
            break
        pages.append((dict(groups), last))
        first = last + 1
    half, gpu = books.charge(cores=50), books.charge(gpus=1)
    assert pages == [({half: [1, 2], gpu: [3, 4]}, 4), ({half: [5]}, 5)]


async def test_a_backend_that_dies_in_the_middle_leaves_nothing(books):
    async with books.database.transaction() as blocker:
        await blocker.value(SHARE, books.show)
        blocking = asyncio.create_task(books.database.value(RAISE, books.show))
        await until(lambda: waiting(books.database), what="the wait for the exclusive lock")
        inserting = asyncio.create_task(insert(books, range(300)))
        [row] = await until(lambda: books.database.rows(BUSY), what="the insert's start")
        os.kill(row["pid"], signal.SIGTERM)
        with pytest.raises(PostgresUnavailable) as lost:
            await inserting
    await blocking
    assert lost.value.facts["outcome"] == "unknown"
    assert await books.tokens() == []
    assert (await insert(books, range(300), fence=2)) == allocations.ProcInsertResult()


async def test_the_books_are_not_written_in_a_snapshot_older_than_the_lock(books):
    with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
        async with books.database.transaction("repeatable read") as tx:
            await insert(books, [1], on=tx)


async def test_a_rolled_back_transaction_leaves_neither_rows_nor_locks(books):
    async def insert_and_fail():
        async with books.database.transaction() as tx:
            await insert(books, [1], on=tx)
            raise LookupError

    with pytest.raises(LookupError):
        await insert_and_fail()
    assert await books.tokens() == []
    assert await books.database.value(RAISE, books.show) == 2


async def test_rows_keep_what_they_were_charged_to_when_their_job_is_moved(books):
    folder = await books.another_folder()
    await insert(books, [1])
    await insert(books, [2], folder=folder)
    charges = {proc.token: proc.charge for proc in await allocations.page(books.database, books.show)}
    assert charges == {1: books.charge(), 2: books.charge(folder=folder)}
    assert isinstance(charges[1], Charge)
