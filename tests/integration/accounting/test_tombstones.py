"""A token has at most one row in its life: deleted rows leave tombstones, which store ranges of tokens."""

import asyncio
from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.transactional import TransactionalLedger
from tests.contract.ledger_suite import Books, outcome_of, sql
from tests.support.waiting import until

TOMBSTONES = sql("SELECT token_first, token_last, int_fence FROM rota.proc_grave WHERE pk_show = $1 ORDER BY 1")
RAISE = sql("SELECT rota.show_raise_fence($1)")
DELETE_SHOW = sql("DELETE FROM rota.show WHERE pk_show = $1")
MANUAL_INSERT = sql(
    "INSERT INTO rota.proc SELECT $1, $2, pk, pk, pk, pk, pk, pk, 100, 0, 1, now() FROM (SELECT $3::uuid AS pk) AS own"
)
# The server is shared with other tests, so only this database counts.
WAITING = sql("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")


@pytest.fixture
async def quota(database):
    return await Books(database, TransactionalLedger(database), managed=True).make()


@pytest.fixture
async def unmanaged(database):
    return await Books(database, TransactionalLedger(database)).make()


async def insert(quota, tokens, *, fence=1, on=None, **charge):
    return await allocations.insert(on or quota.database, quota.show, fence, [quota.group(tokens, **charge)])


async def delete(quota, tokens, on=None):
    return await allocations.delete(on or quota.database, quota.show, tokens)


async def tombstone_rows(quota):
    return [tuple(row) for row in await quota.database.rows(TOMBSTONES, quota.show)]


async def until_blocked(quota):
    await until(lambda: quota.database.rows(WAITING), what="a session to wait for a lock")


async def test_deleted_row_tombstones_its_token(quota):
    await insert(quota, range(4))
    await delete(quota, [1, 2])
    assert await insert(quota, range(6)) == allocations.ProcInsertResult(
        [0, 3], {1: DeclineReason.TOMBSTONED, 2: DeclineReason.TOMBSTONED}
    )
    assert await quota.tokens() == [0, 3, 4, 5]


async def test_tombstone_has_no_effect_under_a_higher_fence(quota):
    await insert(quota, [1])
    await delete(quota, [1])
    fence = await quota.database.value(RAISE, quota.show)
    assert (await insert(quota, [1, 2])).refused == {1: DeclineReason.STALE_FENCE, 2: DeclineReason.STALE_FENCE}
    assert await allocations.tombstoned(quota.database, quota.show, [1]) == set()
    assert (
        await allocations.insert(quota.database, quota.show, fence, [quota.group([1])])
        == allocations.ProcInsertResult()
    )
    await delete(quota, [1])
    assert await allocations.tombstoned(quota.database, quota.show, [1]) == {1}


@pytest.mark.parametrize("managed", [True, False])
async def test_consecutive_frames_share_a_tombstone_whatever_their_charge(database, managed):
    quota = await Books(database, TransactionalLedger(database), managed=managed).make()
    groups = [quota.group([token], job=uuid4(), layer=uuid4()) for token in range(256)]
    if managed:
        await allocations.insert(database, quota.show, 1, groups)
    else:
        await quota.ledger.book(quota.show, groups)
    deleted = await delete(quota, range(256))
    assert (len(deleted.released), deleted.managed, deleted.fence) == (256, managed, 1)
    assert await tombstone_rows(quota) == [(0, 255, 1)]


async def test_tombstones_store_ranges_of_deleted_tokens(quota):
    await insert(quota, [1, 2, 3, 7, 8, 20])
    await quota.database.value(RAISE, quota.show)
    assert (await delete(quota, [20, *range(2, 10)])).fence == 2
    assert await tombstone_rows(quota) == [(2, 3, 2), (7, 8, 2), (20, 20, 2)]
    assert await allocations.tombstoned(quota.database, quota.show, range(30)) == {2, 3, 7, 8, 20}


async def test_rolled_back_deletion_creates_no_tombstone(quota):
    async def delete_and_fail():
        async with quota.database.transaction() as tx:
            await delete(quota, [1], on=tx)
            raise LookupError

    await insert(quota, [1])
    with pytest.raises(LookupError):
        await delete_and_fail()
    assert (await tombstone_rows(quota), await insert(quota, [1])) == ([], allocations.ProcInsertResult(already=[1]))


async def test_insert_waiting_for_the_deletion_of_its_rows_adds_no_second_rows(quota):
    await insert(quota, [1, 2])
    async with quota.database.transaction() as tx:
        await delete(quota, [1, 2], on=tx)
        late = asyncio.create_task(insert(quota, range(1, 5)))
        await until_blocked(quota)
        assert not late.done()
    assert await late == allocations.ProcInsertResult(
        refused={1: DeclineReason.TOMBSTONED, 2: DeclineReason.TOMBSTONED}
    )
    assert await quota.tokens() == [3, 4]


async def test_insert_waiting_for_a_rolled_back_deletion_finds_its_rows(quota):
    await insert(quota, [1])
    late = None

    async def delete_and_fail():
        nonlocal late
        async with quota.database.transaction() as tx:
            await delete(quota, [1], on=tx)
            late = asyncio.create_task(insert(quota, [1, 2]))
            await until_blocked(quota)
            raise LookupError

    with pytest.raises(LookupError):
        await delete_and_fail()
    assert await late == allocations.ProcInsertResult(already=[1])
    assert await quota.tokens() == [1, 2]


async def test_booking_waiting_for_a_release_of_its_token_is_declined(unmanaged):
    await unmanaged.book([1, 2])
    async with unmanaged.database.transaction() as tx:
        await delete(unmanaged, [1], on=tx)
        late = asyncio.create_task(unmanaged.book([1, 2, 3]))
        await until_blocked(unmanaged)
    assert await late == outcome_of(already=[2], booked=[3], declined={1: DeclineReason.TOMBSTONED})
    assert await unmanaged.agree() == 200


async def test_booking_overlapping_the_whole_life_of_its_token_on_other_keys_is_declined(unmanaged):
    async with unmanaged.database.transaction() as tx:
        await tx.run(MANUAL_INSERT, 1, unmanaged.show, uuid4())
        late = asyncio.create_task(unmanaged.book([1, 2]))
        await until_blocked(unmanaged)
        await delete(unmanaged, [1], on=tx)
    assert await late == outcome_of(booked=[2], declined={1: DeclineReason.TOMBSTONED})
    assert await unmanaged.agree() == 100


async def test_concurrent_deletions_and_inserts_of_the_same_tokens_add_no_second_row(quota):
    await insert(quota, range(60))

    async def churn(first):
        await delete(quota, range(first, first + 20))
        return await insert(quota, range(60))

    results = await asyncio.gather(*(churn(first) for first in (0, 10, 40, 30, 20)))
    for each in results:
        assert sorted([*each.already, *each.refused]) == list(range(60))
    assert set(results[-1].refused.values()) == {DeclineReason.TOMBSTONED}
    assert await quota.tokens() == []
    assert await allocations.tombstoned(quota.database, quota.show, range(60)) == set(range(60))


async def test_repeated_tombstone_adds_no_rows_and_returns_the_same_tokens(quota):
    await insert(quota, [5, 9])
    await delete(quota, [5])
    assert await allocations.tombstone(quota.database, quota.show, [8, 4, 5, 6, 6, 9]) == {4, 5, 6, 8}
    assert await tombstone_rows(quota) == [(4, 4, 1), (5, 5, 1), (6, 6, 1), (8, 8, 1)]
    assert await allocations.tombstone(quota.database, quota.show, range(4, 10)) == {4, 5, 6, 7, 8}
    assert (4, 4, 1) in await tombstone_rows(quota)
    assert await allocations.tombstone(quota.database, quota.show, []) == set()
    assert [row["token"] for row in await quota.database.rows(allocations.TOMBSTONE, quota.show, [6, 6])] == [6]


async def test_unknown_show_gets_no_tombstones(quota):
    unknown_show = uuid4()
    assert await allocations.tombstone(quota.database, unknown_show, [1]) == set()
    assert await allocations.tombstoned(quota.database, unknown_show, [1]) == set()


async def test_tombstoned_tokens_are_found_at_range_edges_and_between_ranges(quota):
    await allocations.tombstone(quota.database, quota.show, [*range(10, 20), *range(21, 30), 40])
    expected = {*range(10, 20), *range(21, 30), 40}
    assert await allocations.tombstoned(quota.database, quota.show, range(50)) == expected
    for token in range(50):
        assert await allocations.tombstoned(quota.database, quota.show, [token]) == expected & {token}
    assert await allocations.tombstoned(quota.database, quota.show, []) == set()


async def test_tombstone_of_one_show_does_not_affect_another(quota, unmanaged):
    await allocations.tombstone(quota.database, quota.show, range(5))
    assert await allocations.tombstoned(quota.database, unmanaged.show, range(5)) == set()
    assert (await unmanaged.book(range(5))).booked == list(range(5))


async def test_tombstones_of_the_current_fence_are_counted_and_older_ones_pruned(quota, unmanaged):
    await allocations.tombstone(quota.database, quota.show, [1, 3])
    await unmanaged.book([5])
    await unmanaged.ledger.release(unmanaged.show, [5])
    assert await allocations.count_tombstones(quota.database) == {quota.show: 2, unmanaged.show: 1}
    await quota.database.value(RAISE, quota.show)
    await allocations.tombstone(quota.database, quota.show, [7])
    assert await allocations.count_tombstones(quota.database) == {quota.show: 1, unmanaged.show: 1}
    assert await allocations.prune_tombstones(quota.database, most=1) == 2
    assert await allocations.prune_tombstones(quota.database) == 0
    assert (await tombstone_rows(quota), await tombstone_rows(unmanaged)) == ([(7, 7, 2)], [(5, 5, 1)])


async def test_tombstones_of_a_deleted_show_are_pruned(quota):
    await allocations.tombstone(quota.database, quota.show, [1])
    await quota.database.run(DELETE_SHOW, quota.show)
    assert await allocations.count_tombstones(quota.database) == {}
    assert await allocations.prune_tombstones(quota.database) == 1


async def test_manually_inserted_row_of_a_tombstoned_token_is_a_duplicate_and_deletable(quota):
    await allocations.tombstone(quota.database, quota.show, [4, 5, 6])
    await quota.database.run(MANUAL_INSERT, 6, quota.show, uuid4())
    await quota.database.run(MANUAL_INSERT, 7, uuid4(), uuid4())
    assert (await insert(quota, [6])).refused == {6: DeclineReason.DUPLICATE}
    assert [list(each.tokens) for each in (await delete(quota, [6])).released] == [[6]]
    assert await tombstone_rows(quota) == [(4, 6, 1)]


async def test_rows_of_a_deleted_show_can_be_deleted(quota):
    await insert(quota, [1])
    await quota.database.run(DELETE_SHOW, quota.show)
    deleted = await delete(quota, [1])
    assert (len(deleted.released), deleted.managed, deleted.fence) == (1, False, 0)
    assert await quota.tokens() == []
