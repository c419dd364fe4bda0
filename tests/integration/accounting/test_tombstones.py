"""A token has one row in its life: deleted rows leave their tokens buried, in graves that hold runs of tokens."""

import asyncio
from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.transactional import TransactionalLedger
from tests.contract.ledger_suite import Books, outcome_of, sql
from tests.support.waiting import until

GRAVES = sql("SELECT token_first, token_last, int_fence FROM rota.proc_grave WHERE pk_show = $1 ORDER BY 1")
RAISE = sql("SELECT rota.show_raise_fence($1)")
DELETE_SHOW = sql("DELETE FROM rota.show WHERE pk_show = $1")
BY_HAND = sql(
    "INSERT INTO rota.proc SELECT $1, $2, pk, pk, pk, pk, pk, pk, 100, 0, 1, now() FROM (SELECT $3::uuid AS pk) AS own"
)
# The server is shared with other tests, so only this database counts.
WAITING = sql("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")


@pytest.fixture
async def books(database):
    return await Books(database, TransactionalLedger(database), managed=True).make()


@pytest.fixture
async def unmanaged(database):
    return await Books(database, TransactionalLedger(database)).make()


async def insert(books, tokens, *, fence=1, on=None, **charge):
    return await allocations.insert(on or books.database, books.show, fence, [books.group(tokens, **charge)])


async def delete(books, tokens, on=None):
    return await allocations.delete(on or books.database, books.show, tokens)


async def graves(books):
    return [tuple(row) for row in await books.database.rows(GRAVES, books.show)]


async def somebody_waits(books):
    await until(lambda: books.database.rows(WAITING), what="a wait for a lock")


async def test_a_deleted_row_leaves_its_token_buried(books):
    await insert(books, range(4))
    await delete(books, [1, 2])
    assert await insert(books, range(6)) == allocations.ProcInsertResult(
        [0, 3], {1: DeclineReason.TOMBSTONED, 2: DeclineReason.TOMBSTONED}
    )
    assert await books.tokens() == [0, 3, 4, 5]


async def test_a_grave_bars_nobody_under_a_higher_fence(books):
    await insert(books, [1])
    await delete(books, [1])
    fence = await books.database.value(RAISE, books.show)
    assert (await insert(books, [1, 2])).refused == {1: DeclineReason.STALE_FENCE, 2: DeclineReason.STALE_FENCE}
    assert await allocations.tombstoned(books.database, books.show, [1]) == set()
    assert (
        await allocations.insert(books.database, books.show, fence, [books.group([1])])
        == allocations.ProcInsertResult()
    )
    await delete(books, [1])
    assert await allocations.tombstoned(books.database, books.show, [1]) == {1}


@pytest.mark.parametrize("managed", [True, False])
async def test_consecutive_frames_share_a_grave_whatever_they_are_charged_to(database, managed):
    books = await Books(database, TransactionalLedger(database), managed=managed).make()
    groups = [books.group([token], job=uuid4(), layer=uuid4()) for token in range(256)]
    if managed:
        await allocations.insert(database, books.show, 1, groups)
    else:
        await books.ledger.book(books.show, groups)
    deleted = await delete(books, range(256))
    assert (len(deleted.released), deleted.managed, deleted.fence) == (256, managed, 1)
    assert await graves(books) == [(0, 255, 1)]


async def test_graves_hold_what_was_there_in_runs(books):
    await insert(books, [1, 2, 3, 7, 8, 20])
    await books.database.value(RAISE, books.show)
    assert (await delete(books, [20, *range(2, 10)])).fence == 2
    assert await graves(books) == [(2, 3, 2), (7, 8, 2), (20, 20, 2)]
    assert await allocations.tombstoned(books.database, books.show, range(30)) == {2, 3, 7, 8, 20}


async def test_a_rolled_back_deletion_buries_nothing(books):
    async def delete_and_fail():
        async with books.database.transaction() as tx:
            await delete(books, [1], on=tx)
            raise LookupError

    await insert(books, [1])
    with pytest.raises(LookupError):
        await delete_and_fail()
    assert (await graves(books), await insert(books, [1])) == ([], allocations.ProcInsertResult(already=[1]))


async def test_an_insert_that_waits_for_the_deletion_of_its_rows_makes_no_second_ones(books):
    await insert(books, [1, 2])
    async with books.database.transaction() as tx:
        await delete(books, [1, 2], on=tx)
        late = asyncio.create_task(insert(books, range(1, 5)))
        await somebody_waits(books)
        assert not late.done()
    assert await late == allocations.ProcInsertResult(
        refused={1: DeclineReason.TOMBSTONED, 2: DeclineReason.TOMBSTONED}
    )
    assert await books.tokens() == [3, 4]


async def test_an_insert_that_waits_for_a_deletion_which_is_rolled_back_finds_its_rows(books):
    await insert(books, [1])
    late = None

    async def delete_and_fail():
        nonlocal late
        async with books.database.transaction() as tx:
            await delete(books, [1], on=tx)
            late = asyncio.create_task(insert(books, [1, 2]))
            await somebody_waits(books)
            raise LookupError

    with pytest.raises(LookupError):
        await delete_and_fail()
    assert await late == allocations.ProcInsertResult(already=[1])
    assert await books.tokens() == [1, 2]


async def test_a_booking_that_waits_for_a_release_of_its_token_is_declined(unmanaged):
    await unmanaged.book([1, 2])
    async with unmanaged.database.transaction() as tx:
        await delete(unmanaged, [1], on=tx)
        late = asyncio.create_task(unmanaged.book([1, 2, 3]))
        await somebody_waits(unmanaged)
    assert await late == outcome_of(already=[2], booked=[3], declined={1: DeclineReason.TOMBSTONED})
    assert await unmanaged.agree() == 200


async def test_a_booking_is_declined_that_overlaps_the_whole_life_of_its_token_on_other_keys(unmanaged):
    async with unmanaged.database.transaction() as tx:
        await tx.run(BY_HAND, 1, unmanaged.show, uuid4())
        late = asyncio.create_task(unmanaged.book([1, 2]))
        await somebody_waits(unmanaged)
        await delete(unmanaged, [1], on=tx)
    assert await late == outcome_of(booked=[2], declined={1: DeclineReason.TOMBSTONED})
    assert await unmanaged.agree() == 100


async def test_deletions_and_inserts_of_the_same_tokens_at_once_make_no_second_row(books):
    await insert(books, range(60))

    async def churn(first):
        await delete(books, range(first, first + 20))
        return await insert(books, range(60))

    told = await asyncio.gather(*(churn(first) for first in (0, 10, 40, 30, 20)))
    for each in told:
        assert sorted([*each.already, *each.refused]) == list(range(60))
    assert set(told[-1].refused.values()) == {DeclineReason.TOMBSTONED}
    assert await books.tokens() == []
    assert await allocations.tombstoned(books.database, books.show, range(60)) == set(range(60))


async def test_burying_again_digs_nothing_and_answers_the_same(books):
    await insert(books, [5, 9])
    await delete(books, [5])
    assert await allocations.tombstone(books.database, books.show, [8, 4, 5, 6, 6, 9]) == {4, 5, 6, 8}
    assert await graves(books) == [(4, 4, 1), (5, 5, 1), (6, 6, 1), (8, 8, 1)]
    assert await allocations.tombstone(books.database, books.show, range(4, 10)) == {4, 5, 6, 7, 8}
    assert (4, 4, 1) in await graves(books)
    assert await allocations.tombstone(books.database, books.show, []) == set()
    assert [row["token"] for row in await books.database.rows(allocations.TOMBSTONE, books.show, [6, 6])] == [6]


async def test_an_unknown_show_buries_nothing(books):
    stranger = uuid4()
    assert await allocations.tombstone(books.database, stranger, [1]) == set()
    assert await allocations.tombstoned(books.database, stranger, [1]) == set()


async def test_what_lies_in_a_grave_is_found_at_its_edges_and_between_its_neighbours(books):
    await allocations.tombstone(books.database, books.show, [*range(10, 20), *range(21, 30), 40])
    wanted = {*range(10, 20), *range(21, 30), 40}
    assert await allocations.tombstoned(books.database, books.show, range(50)) == wanted
    for token in range(50):
        assert await allocations.tombstoned(books.database, books.show, [token]) == wanted & {token}
    assert await allocations.tombstoned(books.database, books.show, []) == set()


async def test_a_grave_of_one_show_says_nothing_about_another(books, unmanaged):
    await allocations.tombstone(books.database, books.show, range(5))
    assert await allocations.tombstoned(books.database, unmanaged.show, range(5)) == set()
    assert (await unmanaged.book(range(5))).booked == list(range(5))


async def test_graves_of_the_present_fence_are_counted_and_older_ones_pruned(books, unmanaged):
    await allocations.tombstone(books.database, books.show, [1, 3])
    await unmanaged.book([5])
    await unmanaged.ledger.release(unmanaged.show, [5])
    assert await allocations.count_tombstones(books.database) == {books.show: 2, unmanaged.show: 1}
    await books.database.value(RAISE, books.show)
    await allocations.tombstone(books.database, books.show, [7])
    assert await allocations.count_tombstones(books.database) == {books.show: 1, unmanaged.show: 1}
    assert await allocations.prune_tombstones(books.database, most=1) == 1
    assert await allocations.prune_tombstones(books.database) == 1
    assert (await graves(books), await graves(unmanaged)) == ([(7, 7, 2)], [(5, 5, 1)])


async def test_graves_of_a_show_that_is_gone_are_pruned(books):
    await allocations.tombstone(books.database, books.show, [1])
    await books.database.run(DELETE_SHOW, books.show)
    assert await allocations.count_tombstones(books.database) == {}
    assert await allocations.prune_tombstones(books.database) == 1


async def test_a_row_made_by_hand_for_a_buried_token_is_told_as_there_and_can_be_deleted(books):
    await allocations.tombstone(books.database, books.show, [4, 5, 6])
    await books.database.run(BY_HAND, 6, books.show, uuid4())
    await books.database.run(BY_HAND, 7, uuid4(), uuid4())
    assert (await insert(books, [6])).refused == {6: DeclineReason.DUPLICATE}
    assert [list(each.tokens) for each in (await delete(books, [6])).released] == [[6]]
    assert await graves(books) == [(4, 6, 1)]


async def test_rows_of_a_show_that_is_gone_can_be_deleted(books):
    await insert(books, [1])
    await books.database.run(DELETE_SHOW, books.show)
    deleted = await delete(books, [1])
    assert (len(deleted.released), deleted.managed, deleted.fence) == (1, False, 0)
    assert await books.tokens() == []
