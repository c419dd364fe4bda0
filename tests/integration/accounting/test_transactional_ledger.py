"""What is particular to the ledger of unmanaged shows: its place between flips, recomputes and crashes."""

import asyncio
import os
import signal
from itertools import count
from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.transactional import TransactionalLedger
from rota.infra import failpoints
from rota.infra.postgres import query
from rota.model.errors import PostgresUnavailable
from rota.model.quota import Level, Usage
from tests.contract.ledger_suite import Books, everywhere, outcome_of, sql
from tests.support.waiting import until

FLIP = sql("SELECT was, fence FROM rota.show_set_managed($1, $2)")
HOLD = sql("SELECT 1 FROM rota.point WHERE pk_show = $1 FOR UPDATE")
HOLD_SHOW = sql("SELECT rota.show_shared($1)")
BOOK = query("rota.accounting", "ledger_book")
ROWS = sql("SELECT (SELECT count(*) FROM rota.job_resource) + (SELECT count(*) FROM rota.layer_resource)")
SPOIL = sql(
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
async def books(database):
    return await Books(database, TransactionalLedger(database)).make()


async def flip(books, managed):
    return await books.database.row(FLIP, books.show, managed)


async def test_a_managed_show_is_declined_and_what_is_booked_is_still_told(books):
    await books.book([1])
    await flip(books, True)
    assert await books.book([1, 2]) == outcome_of(already=[1], declined={2: DeclineReason.MANAGED})


async def test_flips_under_load_keep_tables_and_procs_equal(books):
    numbers = count()
    await books.limit(Level.SUBSCRIPTION, cores=3000)

    async def worker(rounds=25):
        for _ in range(rounds):
            first = next(numbers) * 3
            await books.book(range(first, first + 3))
            fence = await books.database.value(sql("SELECT int_fence FROM rota.show WHERE pk_show = $1"), books.show)
            await allocations.insert(
                books.database, books.show, fence, [books.group(range(10**6 + first, 10**6 + first + 1))]
            )
            await books.ledger.release(books.show, [first, 10**6 + first])

    async def flipper():
        for turn in range(15):
            await flip(books, turn % 2 == 0)
        await flip(books, False)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(worker())
        group.create_task(flipper())
    assert await books.agree() > 0
    assert await books.ledger.recompute(books.show) == {}


async def test_coming_back_from_redis_the_tables_are_exact_at_once(books):
    await flip(books, True)
    job, layer = uuid4(), uuid4()
    await allocations.insert(
        books.database, books.show, 2, [books.group(range(5), cores=50, gpus=1, job=job, layer=layer)]
    )
    assert await books.ledger.counters(books.show) == {}
    await flip(books, False)
    assert await books.agree() == 250


async def test_recompute_heals_what_hands_did_and_says_where(books):
    await books.book(range(3), gpus=1)
    await books.database.run(SPOIL)
    assert await books.ledger.recompute_all() == {books.show: {Level.SUBSCRIPTION: 1, Level.LAYER: 1, Level.POINT: 1}}
    assert await books.counted() == everywhere(300, 3)
    assert await books.ledger.recompute_all() == {}


async def test_recompute_sets_drained_keys_to_0_and_leaves_managed_shows_alone(books):
    other = await Books(books.database, books.ledger, managed=True).make()
    await books.database.run(SPOIL)
    assert books.show in await books.ledger.recompute_all()
    assert await books.counted() == everywhere(0)
    assert await other.ledger.recompute(other.show) == {}
    assert (await other.counted())[Level.SUBSCRIPTION].cores == 77777


async def test_recompute_waits_for_a_booking_under_way_and_counts_it(books):
    group = [books.group([1, 2])]
    async with books.database.transaction() as tx:
        await tx.rows(BOOK, books.show, False, *allocations.group_columns(group), *allocations.range_columns(group))
        recomputing = asyncio.create_task(books.ledger.recompute(books.show))
        await until(lambda: books.database.value(WAITING), what="the wait of the recompute")
    assert await recomputing == {}
    assert await books.agree() == 200


async def test_recompute_removes_rows_of_jobs_and_layers_that_say_nothing(books):
    held, capped, ranked, idle = (uuid4() for _ in range(4))
    for token, job in enumerate((held, capped, ranked, idle)):
        await books.book([token], job=job, layer=job)
    await books.ledger.release(books.show, [1, 2, 3])
    await books.database.run(sql("UPDATE rota.job_resource SET int_max_gpus = 4 WHERE pk_job = $1"), capped)
    await books.database.run(sql("UPDATE rota.layer_resource SET int_max_cores = 400 WHERE pk_layer = $1"), capped)
    await books.database.run(sql("UPDATE rota.job_resource SET int_priority = 7 WHERE pk_job = $1"), ranked)
    assert await books.ledger.recompute(books.show) == {}
    jobs = {row["pk_job"] for row in await books.database.rows(sql("SELECT pk_job FROM rota.job_resource"))}
    layers = {row["pk_layer"] for row in await books.database.rows(sql("SELECT pk_layer FROM rota.layer_resource"))}
    assert (jobs, layers) == ({held, capped, ranked}, {held, capped})
    assert (await books.book([9], job=idle, layer=idle)).booked == [9]
    assert await books.agree() == 200


async def test_rewrite_shows_what_a_managed_show_uses_and_makes_no_rows(books):
    await flip(books, True)
    job, layer = uuid4(), uuid4()
    await allocations.insert(
        books.database, books.show, 2, [books.group([1, 2], gpus=1), books.group([3], job=job, layer=layer)]
    )
    assert await books.ledger.refresh_managed_tables(books.show) == dict.fromkeys(Level, 1)
    counted = await books.counted()
    assert (counted[Level.SUBSCRIPTION], counted[Level.JOB]) == (Usage(300, 2), Usage(200, 2))
    assert await books.database.value(ROWS) == 2
    assert await books.ledger.refresh_managed_tables(books.show) == {}
    await allocations.delete(books.database, books.show, [1, 2, 3])
    assert await books.ledger.refresh_managed_tables(books.show) == dict.fromkeys(Level, 1)
    assert await books.counted() == everywhere(0)


async def test_rewrite_leaves_an_unmanaged_show_alone(books):
    await books.book([1])
    await books.database.run(SPOIL)
    assert await books.ledger.refresh_managed_tables(books.show) == {}
    assert (await books.counted())[Level.SUBSCRIPTION].cores == 77777


async def test_rewrite_spoils_nothing_when_the_show_is_given_back_under_it(books):
    await flip(books, True)
    await allocations.insert(books.database, books.show, 2, [books.group([1])])
    group = [books.group([2, 3])]
    async with books.database.transaction() as tx:
        await tx.row(FLIP, books.show, False)
        rewriting = asyncio.create_task(books.ledger.refresh_managed_tables(books.show))
        await until(lambda: books.database.value(WAITING), what="the wait of the rewrite")
        await tx.rows(BOOK, books.show, False, *allocations.group_columns(group), *allocations.range_columns(group))
    assert await rewriting == {}
    assert await books.agree() == 300


async def test_recompute_under_load_loses_nothing(books):
    async def worker(number):
        for turn in range(20):
            token = number * 1000 + turn
            await books.book([token])
            if turn % 2:
                await books.ledger.release(books.show, [token])

    async def recomputer():
        return [await books.ledger.recompute(books.show) for _ in range(20)]

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(worker(number))
        wrong = group.create_task(recomputer())
    assert not any(wrong.result())
    assert await books.agree() == 4000


async def test_a_counter_that_is_too_low_does_not_keep_anything_from_being_released(books):
    await books.book(range(3))
    await books.database.run(SPOIL)
    await books.ledger.release(books.show, range(3))
    assert (await books.tokens(), (await books.counted())[Level.POINT].cores) == ([], 0)


async def test_a_backend_that_dies_in_the_middle_of_a_booking_leaves_nothing(books):
    async with books.database.transaction() as tx:
        await tx.value(HOLD, books.show)
        booking = asyncio.create_task(books.book(range(20)))
        # It waits for the last of the five levels, with all others held and nothing written yet.
        [row] = await until(lambda: books.database.rows(BUSY), what="the booking's wait")
        os.kill(row["pid"], signal.SIGTERM)
        with pytest.raises(PostgresUnavailable):
            await booking
    assert (await books.tokens(), await books.counted()) == ([], everywhere(0))
    assert (await books.book(range(20))).booked == list(range(20))


async def test_a_lost_reply_is_had_again(books, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            failpoints,
            "after_send",
            failpoints.FaultPlan.parse({"LOST_REPLY_AT": "ledger.book"}).after_send,
        )
        with pytest.raises(ConnectionError):
            await books.book(range(3))
    assert await books.book(range(3)) == outcome_of(already=[0, 1, 2])
    assert await books.counted() == everywhere(300)


async def test_rows_of_jobs_layers_and_points_are_made_on_the_way(books):
    job, layer = uuid4(), uuid4()
    await books.database.run(sql("DELETE FROM rota.point"))
    assert (await books.book([1, 2], job=job, layer=layer)).booked == [1, 2]
    assert await books.agree() == 200


@pytest.mark.parametrize(
    ("field", "why"), [("folder", DeclineReason.UNKNOWN_FOLDER), ("dept", DeclineReason.UNKNOWN_DEPT)]
)
async def test_what_cannot_be_counted_anywhere_is_declined_and_the_rest_of_the_batch_booked(books, field, why):
    lost, good = await books.ledger.book(books.show, [books.group([1], **{field: uuid4()}), books.group([2])])
    assert (dict(lost.declined), list(good.booked)) == ({1: why}, [2])
    assert await books.agree() == 100


async def test_a_folder_or_job_of_another_show_is_declined(books):
    other = await Books(books.database, books.ledger).make()
    assert (await books.book([1], folder=other.folder)).declined == {1: DeclineReason.UNKNOWN_FOLDER}
    assert (await books.book([1], job=other.job)).declined == {1: DeclineReason.UNKNOWN_JOB}
    assert await other.counted() == everywhere(0)


async def test_the_same_token_on_other_keys_at_the_same_moment_is_booked_once(books):
    pools = [await books.another_pool() for _ in range(6)]
    folders = [await books.another_folder() for _ in range(6)]
    outcomes = await asyncio.gather(
        *(
            books.book(range(10), alloc=pool, folder=folder, job=uuid4(), layer=uuid4())
            for pool, folder in zip(pools, folders, strict=True)
        )
    )
    assert sum(len(outcome.booked) for outcome in outcomes) == 10
    assert await books.agree() == 1000


async def test_a_flip_waits_for_a_booking_under_way(books):
    async with books.database.transaction() as tx:
        await tx.value(HOLD_SHOW, books.show)
        flipping = asyncio.create_task(flip(books, True))
        await until(lambda: books.database.value(WAITING), what="the flip's wait")
        assert not flipping.done()
    assert (await flipping)["fence"] == 2
