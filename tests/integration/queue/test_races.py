"""Interleavings that could break the queue, run step by step; locks, not timing, decide which call waits."""

import asyncio
from uuid import uuid4

import pytest

from rota.infra.postgres import Database, PostgresTarget
from rota.queue import MaintenanceIntervals, Queue, storage
from tests.support.queue import Dispatcher, Leader, agreed, entry, sql
from tests.support.waiting import until

WAITING_LOCKS = sql(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
TAKE_LANE = sql("SELECT pg_advisory_xact_lock(1903519026, $1)")
CLAIM = sql("SELECT claim_id, n FROM rota.queue_claim($1::int[], $2, $3)")
OVERLAPS = sql("""
SELECT count(*) FROM rota.ready_entries a JOIN rota.ready_entries b
ON a.lane_id = b.lane_id AND (a.ready_slot, a.lane_seq) < (b.ready_slot, b.lane_seq)
AND a.lane_seq < b.lane_seq + b.n AND b.lane_seq < a.lane_seq + a.n""")


@pytest.fixture
async def database(database_url):
    """With a connection for every task."""
    opened = await Database.open(PostgresTarget(url=database_url, pool_max=16))
    yield opened
    await opened.close()


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture
async def leader(queue):
    return await Leader.of(queue, MaintenanceIntervals(slot_bytes=1, prune_delay_s=0.0))


async def blocked(database, call):
    """Start `call`; returns its task once it waits for a lock."""
    task = asyncio.create_task(call)
    await until(lambda: database.value(WAITING_LOCKS), what="a session to wait for a lock")
    assert not task.done()
    return task


async def counts(database, queue="film"):
    return {field: number for field, number in (await agreed(database)).get(queue, {}).items() if number}


async def finish(queue, dispatcher):
    """Claim and complete everything; returns the frames."""
    done = []
    while pieces := await dispatcher.pieces(4000):
        done += [(piece.job, frame) for piece in pieces for frame in piece.frames]
        await queue.complete([token for piece in pieces for token in piece.tokens])
    return done


async def test_claim_ending_within_cancelled_positions_leaves_the_rest_cancelled(queue, dispatcher, leader, database):
    job = entry(frames=10)
    await queue.enqueue([job])
    await queue.cancel_waiting(job.job, frames=range(2, 10))
    await queue.complete(await dispatcher.tokens(4))
    assert await counts(database) == {"completed": 2, "cancelled": 8}
    for _ in range(10):
        await leader.turn_ring()
    assert await counts(database) == {"completed": 2, "cancelled": 8}
    assert await dispatcher.pieces() == []
    await queue.enqueue([entry(payload=b"next")])
    assert [piece.payload for piece in await dispatcher.pieces()] == [b"next"]


async def test_cancel_on_both_sides_of_the_cursor_counts_each_frame_once(queue, dispatcher, leader, database):
    job = entry(frames=20)
    await queue.enqueue([job])
    await queue.give_back((await dispatcher.tokens(10))[5:])
    await queue.cancel_waiting(job.job, frames=range(5, 20))
    assert await counts(database) == {"running": 5, "cancelled": 15}
    for _ in range(14):
        await queue.enqueue([entry("other")])
        await leader.turn_ring()
    await leader.shed()
    assert await counts(database) == {"running": 5, "cancelled": 15}
    assert await dispatcher.queue.candidates(["film"]) == []


async def test_slot_of_cancelled_positions_is_pruned_only_when_all_before_are_claimed(
    queue, dispatcher, leader, database
):
    first, second, third = entry(frames=3), entry(frames=4), entry(frames=5)
    await queue.ensure_queue("film", shards=1)
    for each in (first, second, third):
        await queue.enqueue([each])
        await leader.turn_ring()
    await queue.cancel_waiting(second.job)
    await leader.fold()
    await leader.turn_ring()
    assert await counts(database) == {"waiting": 8, "cancelled": 4}
    done = await finish(queue, dispatcher)
    assert done == [*((first.job, at) for at in range(3)), *((third.job, at) for at in range(5))]
    await leader.fold()
    for _ in range(3):
        await leader.turn_ring()
    assert await counts(database) == {"completed": 8, "cancelled": 4}
    assert await database.value(sql("SELECT count(*) FROM rota.ready_tombstones")) == 0


async def test_batch_that_waited_for_a_lane_during_rotation_continues_numbering(queue, database, leader, dispatcher):
    """A batch may write its lanes to different slots: later positions of a lane are never in an older slot."""
    for name in ("a", "b"):
        await queue.ensure_queue(name, shards=1, priorities=[5])
    async with database.transaction() as first:
        await queue.enqueue([entry("b", frames=3)], on=first)
        batch = await blocked(database, queue.enqueue([entry("a"), entry("b", frames=4)]))
        await queue.enqueue([entry("c")])
        assert await leader.turn_ring() == "rotated"
        await queue.enqueue([entry("b", frames=5)], on=first)
    await batch
    [placed] = await queue.enqueue([entry("b", frames=2)])
    assert placed.first_seq == 14 - 2
    assert await database.value(OVERLAPS) == 0
    assert len(await finish(queue, dispatcher)) == 1 + 1 + 14
    await agreed(database)


async def test_cancel_reads_the_ring_after_waiting_for_its_lock(queue, database, leader, dispatcher):
    job = entry(frames=5)
    [placed] = await queue.enqueue([job])
    await dispatcher.tokens(2)
    async with database.transaction() as claiming:
        await claiming.value(TAKE_LANE, placed.lane)
        cancelling = await blocked(database, queue.cancel_waiting(job.job))
        assert await leader.turn_ring() == "rotated"
        await queue.enqueue([entry(job=job.job, frame=5, frames=5)])
        await claiming.rows(CLAIM, [placed.lane], 7, dispatcher.owner)
    assert await cancelling == 1
    assert await counts(database) == {"running": 9, "cancelled": 1}


async def test_park_reads_the_ring_after_waiting_for_its_lock(queue, database, leader, dispatcher):
    job = entry(frames=5)
    [placed] = await queue.enqueue([job])
    await dispatcher.tokens(2)
    async with database.transaction() as claiming:
        await claiming.value(TAKE_LANE, placed.lane)
        parking = await blocked(database, queue.park([], job.job, rest_of=[placed.lane]))
        assert await leader.turn_ring() == "rotated"
        await queue.enqueue([entry(job=job.job, frame=5, frames=5)])
        await claiming.rows(CLAIM, [placed.lane], 7, dispatcher.owner)
    await parking
    assert await counts(database) == {"waiting": 1, "running": 9}
    assert await queue.unpark(job.job, 100) == 1
    assert [piece.frames for piece in await dispatcher.pieces()] == [range(9, 10)]


async def carried(queue, leader, database, *entries):
    """Enqueue entries and have them carried over to slot 7, outside the ring; returns their lanes."""
    placed = await queue.enqueue(entries)
    await queue.pause("film")
    for _ in range(8):
        await queue.enqueue([entry("other")])
        await leader.turn_ring()
    await queue.resume("film")
    assert await database.value(sql("SELECT count(*) FROM rota.ready_entries_7")) >= len(entries)
    return [each.lane for each in placed]


async def test_frames_claimed_while_the_carried_slot_is_purged_keep_their_payload(queue, database, leader, dispatcher):
    [lane] = await carried(queue, leader, database, entry(frames=5, payload=b"kept"))
    async with database.transaction() as claiming:
        await claiming.run(sql("LOCK TABLE ONLY rota.queue_claims_3 IN ACCESS EXCLUSIVE MODE"))
        shedding = await blocked(database, leader.shed())
        [row] = await claiming.rows(CLAIM, [lane], 5, dispatcher.owner)
    await shedding
    tokens = range(row["claim_id"] * 512, row["claim_id"] * 512 + 5)
    assert (await queue.retry(tokens[:3], 0.0)).accepted == 3
    assert (await queue.give_back(tokens[3:])).accepted == 2
    assert await counts(database) == {"waiting": 2, "deferred": 3}
    await leader.promote()
    pieces = await dispatcher.pieces()
    assert sum(len(piece.frames) for piece in pieces if piece.payload == b"kept") == 5


async def test_cancel_finds_frames_being_promoted(queue, database, dispatcher):
    job = entry(frames=5)
    await queue.enqueue([job])
    await queue.retry(await dispatcher.tokens(), 0.0)
    async with database.transaction() as promoting:
        assert await storage.promote(promoting) == 5
        cancelling = await blocked(database, queue.cancel_waiting(job.job))
    assert await cancelling == 5
    assert await counts(database) == {"cancelled": 5}


async def test_promotion_does_not_wait_for_a_cancel(queue, database, dispatcher, leader):
    first, second = entry(frames=2), entry(frames=3)
    await queue.enqueue([first, second])
    await queue.retry(await dispatcher.tokens(), 0.0)
    async with database.transaction() as cancelling, asyncio.timeout(5):
        assert await queue.cancel_waiting(first.job, on=cancelling) == 2
        assert await leader.promote() == 3
    assert await counts(database) == {"waiting": 3, "cancelled": 2}


async def test_queue_blocked_for_promotion_delays_no_other(queue, database, dispatcher, monkeypatch):
    monkeypatch.setattr(storage.promote, "__defaults__", (3,))
    await queue.ensure_queue("film", shards=1)
    await queue.enqueue([*(entry() for _ in range(5)), entry("short")])
    await queue.retry(await dispatcher.tokens(5), 0.0)
    await queue.retry(await dispatcher.tokens(), 0.0)
    async with database.transaction() as producing:
        await queue.enqueue([entry()], on=producing)
        async with database.transaction() as tx:
            assert await storage.promote(tx) == 1
        assert await counts(database, "short") == {"waiting": 1}
    assert await counts(database) == {"waiting": 1, "deferred": 5}


@pytest.mark.parametrize(("at_once", "freed"), [(100, 4), (1, 3)])
async def test_unpark_during_carry_over_frees_each_frame_once(queue, database, leader, dispatcher, at_once, freed):
    """The whole job is carried over, or only its first entry, which splits the parked positions there."""
    job = entry(frames=3)
    [placed] = await queue.enqueue([job, *(entry(job=job.job, frame=frame, frames=3) for frame in (3, 6))])
    await queue.park([], job.job, rest_of=[placed.lane])
    for _ in range(6):
        await leader.turn_ring()
        await queue.enqueue([entry("other")])
    async with database.transaction() as holding:
        await holding.run(sql("UPDATE rota.queue_returned SET returned_at = returned_at"))
        unparking = await blocked(database, queue.unpark(job.job, 4))
        await holding.value(storage.CARRY_OVER, 50, at_once)
    assert await unparking == freed
    assert await counts(database) == {"waiting": 9}
    assert [frame for piece in await dispatcher.pieces(freed) for frame in piece.frames] == list(range(freed))
    assert await queue.unpark(job.job, 100) == 9 - freed
    assert len(await finish(queue, dispatcher)) == 9 - freed + 6
    await agreed(database)


async def test_rebuild_counts_and_complete_do_not_deadlock(queue, database, dispatcher):
    await queue.enqueue([entry(frames=3)])
    [one], [two] = await dispatcher.tokens(1), await dispatcher.tokens(1)
    async with database.transaction() as first:
        await queue.complete([one], on=first)
        rebuilding = await blocked(database, queue.rebuild_counts())
        late = asyncio.create_task(queue.complete([two]))
        await until(lambda: two_sessions_wait(database), what="both sessions to wait")
    await rebuilding
    assert (await late).accepted == 1
    assert await counts(database) == {"waiting": 1, "completed": 2}


async def two_sessions_wait(database):
    return await database.value(WAITING_LOCKS) >= 2


async def test_scanned_counts_wait_for_a_prune_and_see_rows_and_rollup_consistently(
    queue, database, leader, dispatcher
):
    """Without counters, too, deleted rows and the rollup that counts them are read at one instant."""
    await queue.rebuild_counts("scan")
    await queue.enqueue([entry(frames=5)])
    await queue.complete(await dispatcher.tokens())
    assert await leader.turn_ring() == "rotated"
    async with database.transaction() as pruning:
        assert await storage.prune(pruning, 0) == "pruned"
        counting = await blocked(database, queue.counts_exact())
    assert (await counting)["film"].completed == 5


async def test_prune_checks_the_slot_again_after_waiting(queue, database, leader, dispatcher):
    """A producer commits into the slot while prune waits for the lock: its frames must not be pruned."""
    await queue.ensure_queue("film", shards=1)
    await queue.enqueue([entry(frames=2)])
    await queue.complete(await dispatcher.tokens())
    async with database.transaction() as producing:
        await queue.enqueue([entry(frames=3)], on=producing)
        assert await leader.turn_ring() == "rotated"
        async with database.transaction() as pruning:
            await pruning.run(sql("SET LOCAL lock_timeout = '20s'"))
            waiting = await blocked(database, pruning.value(sql("SELECT rota.queue_prune(0, 20000)")))
            await producing.run(sql("COMMIT"))
            assert await waiting == "live"
        await producing.run(sql("BEGIN"))
    assert await counts(database) == {"waiting": 3, "completed": 2}
    assert len(await finish(queue, dispatcher)) == 3


async def test_carry_over_waits_for_claims_without_deadlock(queue, database, leader, dispatcher):
    """A claim reads the cursor from the claims and then the entries; every caller takes the locks in this order."""
    [placed] = await queue.enqueue([entry(frames=3)])
    for _ in range(6):
        await leader.turn_ring()
        await queue.enqueue([entry("other")])
    async with database.transaction() as claiming:
        await claiming.rows(sql("SELECT * FROM rota.queue_cursor($1, rota.queue_generation())"), placed.lane)
        async with database.transaction() as carrying:
            emptying = await blocked(database, carrying.value(storage.CARRY_OVER, 20_000, 100))
            async with asyncio.timeout(5):
                [row] = await claiming.rows(CLAIM, [placed.lane], 3, dispatcher.owner)
            await claiming.run(sql("COMMIT"))
            assert await emptying == "carried"
        await claiming.run(sql("BEGIN"))
    assert row["n"] == 3
    assert await counts(database) == {"running": 3}


async def test_dispatcher_declared_dead_during_its_claim_loses_the_claimed_frames(queue, database, leader):
    doomed = await Dispatcher(database, "doomed").enlisted()
    [placed] = await queue.enqueue([entry(frames=4)])
    async with database.transaction() as claiming:
        await claiming.rows(CLAIM, [placed.lane], 4, doomed.owner)
        await database.run(sql("UPDATE rota.lease SET expires_at = clock_timestamp() WHERE name = 'dispatcher:doomed'"))
        returning = await blocked(database, leader.return_orphans())
    assert await returning == 4
    assert await counts(database) == {"waiting": 4}


async def test_concurrent_cancel_and_give_back_lose_no_frame(queue, database, dispatcher):
    job = entry(frames=6)
    await queue.enqueue([job])
    tokens = await dispatcher.tokens(4)
    async with database.transaction() as returning:
        await queue.give_back(tokens[:2], on=returning)
        assert await queue.cancel_waiting(job.job) == 2, (
            "frames returned later wait again: cancel applies only to frames that wait now"
        )
    assert await counts(database) == {"waiting": 2, "running": 2, "cancelled": 2}
    assert await queue.cancel_waiting(job.job) == 2


async def test_park_and_cancel_do_not_deadlock(queue, database, dispatcher):
    """Both need the lane and a claim with frames of both jobs; a caller that needs both locks the lane first."""
    cancelled, capped = entry(frames=4), entry(frames=4)
    [placed] = await queue.enqueue([cancelled, capped])
    tokens = await dispatcher.tokens(6)
    async with database.transaction() as ending:
        await queue.cancel_waiting(cancelled.job, on=ending)
        await ending.value(TAKE_LANE, placed.lane)
        parking = await blocked(database, queue.park(tokens[4:], capped.job, rest_of=[placed.lane]))
        assert (await queue.cancel_running(tokens[:4], on=ending)).accepted == 4
    assert (await parking).accepted == 2
    assert await counts(database) == {"waiting": 4, "cancelled": 4}


async def test_two_jobs_cancelled_layer_by_layer_do_not_deadlock(queue, database):
    """A job is cancelled layer by layer; the first call locks the lanes of all its layers."""
    first, second = uuid4(), uuid4()
    layers = {(job, name): entry(name, job=job, layer=uuid4()) for job in (first, second) for name in ("a", "b")}
    await queue.enqueue(list(layers.values()))
    async with database.transaction() as one:
        assert await queue.cancel_waiting(first, layers[first, "a"].layer, on=one) == 1
        async with database.transaction() as two:
            waiting = await blocked(database, queue.cancel_waiting(second, layers[second, "b"].layer, on=two))
            assert await queue.cancel_waiting(first, layers[first, "b"].layer, on=one) == 1
            await one.run(sql("COMMIT"))
            assert await waiting == 1
            assert await queue.cancel_waiting(second, layers[second, "a"].layer, on=two) == 1
        await one.run(sql("BEGIN"))
    assert await counts(database, "a") == await counts(database, "b") == {"cancelled": 2}
