"""Jobs of one queue take turns: a short job does not wait for all frames of a long one before it."""

import asyncio
from uuid import uuid4

import pytest

from rota.queue import Queue
from tests.support.queue import Dispatcher, agreed, entry, sql
from tests.support.waiting import until

QUANTUM = 64
LOCK_LANE = sql("SELECT pg_advisory_xact_lock(1903519026, $1::integer)")
ROTATE = sql("INSERT INTO rota.queue_ring_rotations (generation) SELECT rota.queue_generation() + 1")
LOCK_OWNER = sql("SELECT pg_advisory_xact_lock(1903519028, $1::integer)")
WAITS_FOR_OWNER = sql("SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
ASIDE = sql("SELECT count(*) FROM rota.queue_returned WHERE turn_of IS NOT NULL")


async def runs(dispatcher, want):
    """What a claim of so many frames gets, as job and number of frames, in order."""
    merged = []
    for piece in await dispatcher.pieces(want):
        if merged and merged[-1][0] == piece.job:
            merged[-1][1] += len(piece.frames)
        else:
            merged.append([piece.job, len(piece.frames)])
    return [tuple(each) for each in merged]


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture
def jobs():
    return [uuid4() for _ in range(3)]


async def test_short_job_has_its_turn_after_a_quantum_of_a_long_one(queue, dispatcher, database, jobs):
    long, short, _ = jobs
    await queue.enqueue([entry(job=long, frames=10_000), entry(job=short, frames=5)])
    assert await runs(dispatcher, 300) == [(long, QUANTUM), (short, 5), (long, 300 - QUANTUM - 5)]
    assert (await agreed(database))["film"]["waiting"] == 10_005 - 300


async def test_short_job_that_comes_later_is_next(queue, dispatcher, jobs):
    """Slots become free one by one, as on a full farm."""
    long, short, other = jobs
    await queue.enqueue([entry(job=long, frames=10_000)])
    assert await runs(dispatcher, 100) == [(long, 100)]
    await queue.enqueue([entry(job=short, frames=3), entry(job=other)])
    order = [(await runs(dispatcher, 1))[0][0] for _ in range(8)]
    assert order == [long, short, other, long, short, long, short, long]


async def test_long_job_alone_is_claimed_at_once(queue, dispatcher, database, jobs):
    await queue.enqueue([entry(job=jobs[0], frames=2_000)])
    assert [claim.n for claim in await dispatcher.claim(1_000)] == [512, 488]
    assert await database.value(ASIDE) == 0


async def test_long_jobs_share_what_is_free(queue, dispatcher, database, jobs):
    await queue.enqueue([entry(job=job, frames=1_000) for job in jobs])
    got = dict.fromkeys(jobs, 0)
    for job, frames in await runs(dispatcher, 600):
        got[job] += frames
    assert max(got.values()) - min(got.values()) <= QUANTUM
    while taken := await runs(dispatcher, 100):
        for job, frames in taken:
            got[job] += frames
    assert set(got.values()) == {1_000}
    assert (await agreed(database))["film"]["running"] == 3_000


async def test_frames_of_a_job_keep_their_order(queue, dispatcher, jobs):
    await queue.enqueue([entry(job=job, frames=500) for job in jobs])
    seen = {job: [] for job in jobs}
    while pieces := await dispatcher.pieces(90):
        for piece in pieces:
            seen[piece.job] += piece.frames
    assert all(frames == sorted(frames) and len(frames) == 500 for frames in seen.values())


async def test_job_of_many_entries_takes_turns_as_one(queue, dispatcher, database, jobs):
    """A map has an entry per item."""
    long, short, _ = jobs
    await queue.enqueue([*(entry(job=long, frame=frame, payload=b"x") for frame in range(700)), entry(job=short)])
    assert await runs(dispatcher, 200) == [(long, QUANTUM), (short, 1), (long, 200 - QUANTUM - 1)]
    assert await database.value(ASIDE) == 1


async def test_retried_frames_of_a_long_job_hide_nobody(queue, dispatcher, jobs):
    """They are queued behind the short job, so the last entry of the lane is of the long one."""
    long, short, _ = jobs
    await queue.enqueue([*(entry(job=long, frame=frame) for frame in range(700)), entry(job=short)])
    await queue.enqueue([entry(job=long, frame=frame, attempt=1) for frame in range(700, 720)])
    assert (await runs(dispatcher, 100))[1] == (short, 1)


async def test_frames_given_back_do_not_hold_up_other_jobs(queue, dispatcher, database, jobs):
    """A quota refused most of a large claim, so that they are ahead of everything."""
    long, short, _ = jobs
    await queue.enqueue([entry(job=long, frames=2_000)])
    tokens = await dispatcher.tokens(512)
    await queue.give_back(tokens[1:])
    await queue.enqueue([entry(job=short, frames=2)])
    order = [(await runs(dispatcher, 1))[0][0] for _ in range(5)]
    assert order == [long, short, long, long, short], "the long job has a turn for each of its two parts"
    assert (await agreed(database))["film"]["waiting"] == 2_002 - 6


async def test_short_job_in_another_shard_has_its_turn(queue, dispatcher, database, jobs):
    """A producer that met another one fills another lane."""
    long, short, _ = jobs
    await queue.ensure_queue("film", shards=2)
    async with database.transaction() as tx:
        await queue.enqueue([entry(job=long, frames=3_000)], on=tx)
        await queue.enqueue([entry(job=short, frames=2)])
    order = [job for _ in range(6) for job, _ in await runs(dispatcher, 1)]
    assert sorted(order[:2]) == sorted([long, short])
    assert order.count(short) == 2


async def test_parked_job_gives_up_its_turns(queue, dispatcher, database, jobs):
    long, short, _ = jobs
    [placed] = await queue.enqueue([entry(job=long, frames=1_000), entry(job=short, frames=200)])
    await runs(dispatcher, 2 * QUANTUM)
    assert await database.value(ASIDE) == 2
    await queue.park([], long, rest_of=[placed.lane])
    assert await runs(dispatcher, 400) == [(short, 200 - QUANTUM)]
    assert await queue.unpark(long, 1_000) == 1_000 - QUANTUM
    assert await runs(dispatcher, 100) == [(long, 100)]
    assert await queue.cancel_waiting(long) == 1_000 - QUANTUM - 100
    assert (await agreed(database))["film"]["waiting"] == 0


async def test_entries_with_a_key_keep_their_order(queue, dispatcher, jobs):
    """Their order is promised, so no job of such a queue passes another."""
    long, short, _ = jobs
    await queue.enqueue([entry(job=long, frames=1_000, key="a"), entry(job=short, key="a")])
    assert await runs(dispatcher, 1_001) == [(long, 1_000), (short, 1)]


async def test_two_dispatchers_share_the_turns(queue, database, dispatcher, jobs):
    long, short, _ = jobs
    other = await Dispatcher(database, "other").enlisted()
    await queue.enqueue([entry(job=long, frames=1_000), entry(job=short, frames=2)])
    order = [(await runs(each, 1))[0][0] for each in (dispatcher, other, dispatcher, other)]
    assert order == [long, short, long, short]


async def test_job_of_many_fragments_is_claimed_at_once(queue, dispatcher, database, jobs):
    """A claim must not touch all of them for each that it takes."""
    long, short, _ = jobs
    await queue.enqueue([entry(job=long, frames=2_000), entry(job=short)])
    for frame in range(100, 2_000, 2):
        await queue.cancel_waiting(long, frames=range(frame, frame + 1))
    await runs(dispatcher, 1)
    assert await database.value(ASIDE) > 900
    async with asyncio.timeout(10):
        assert sum(frames for _, frames in await runs(dispatcher, 60)) == 60


async def test_requests_for_many_lanes_get_what_each_would_get_by_itself(queue, dispatcher, database, jobs):
    """Requests with one lane are served together. Lanes with more than appended entries are not: a long job has its
    turn, frames that were returned are next, and cancelled ones are skipped."""
    long, cancelled, other = jobs
    names = ("plain", "empty", "turns", "returned", "cancelled", "rotated")
    batches = {
        "plain": [entry("plain"), entry("plain", frames=3)],
        "empty": [entry("empty")],
        "turns": [entry("turns", job=long, frames=200), entry("turns")],
        "returned": [entry("returned", frames=5)],
        "cancelled": [entry("cancelled", job=cancelled, frames=4), entry("cancelled", job=other, frames=2)],
        "rotated": [entry("rotated", frames=2)],
    }
    placed = await queue.enqueue([each for name in names for each in batches[name]])
    lanes = {each.queue: each.lane for each in placed}
    await dispatcher.claim(1, lanes=[lanes["empty"]])
    [first] = await dispatcher.claim(2, lanes=[lanes["returned"]])
    await queue.give_back(first.tokens)
    await queue.cancel_waiting(cancelled, frames=range(1, 4))
    await database.run(ROTATE)
    await queue.enqueue([entry("rotated", frames=2)])

    results = await dispatcher.claim_each(100, lanes=[lanes[name] for name in names])
    got = {
        name: [(len(piece.frames), piece.frames.start) for claim in result.claims for piece in claim.ranges()]
        for name, result in zip(names, results, strict=True)
    }
    assert got == {
        "plain": [(1, 0), (3, 0)],
        "empty": [],
        "turns": [(QUANTUM, 0), (1, 0), (100 - QUANTUM - 1, QUANTUM)],
        "returned": [(2, 0), (3, 2)],
        "cancelled": [(1, 0), (2, 0)],
        "rotated": [(2, 0), (2, 0)],
    }
    await agreed(database)


async def test_lane_of_two_requests_is_claimed_once(queue, dispatcher, database):
    [placed] = await queue.enqueue([entry(frames=10)])
    results = await dispatcher.claim_each(6, lanes=[placed.lane, placed.lane])
    assert [result.frames for result in results] == [6, 4]
    await agreed(database)


async def test_locked_lane_among_many_is_reported_and_skipped(queue, dispatcher, database):
    placed = await queue.enqueue([entry("one"), entry("two"), entry("three")])
    async with database.transaction() as tx:
        await tx.rows(LOCK_LANE, placed[1].lane)
        results = await dispatcher.claim_each(1, lanes=[each.lane for each in placed])
    assert [(result.frames, result.locked) for result in results] == [(1, False), (0, True), (1, False)]


async def test_ring_that_turns_before_a_claim_of_many_lanes_has_its_locks_hands_nothing_out_twice(
    queue, dispatcher, database
):
    """With the generation of before, the newest slot would seem to be the oldest, and its claims would not be found."""
    other = await Dispatcher(database, "two").enlisted()
    [film] = await queue.enqueue([entry("film", frames=10)])
    await dispatcher.claim(10, lanes=[film.lane])
    [new] = await queue.enqueue([entry("new")])
    async with database.transaction() as tx:
        await tx.rows(LOCK_OWNER, dispatcher.owner & 2**31 - 1)
        claiming = asyncio.create_task(dispatcher.claim_each(50, lanes=[film.lane, new.lane]))
        await until(lambda: database.value(WAITS_FOR_OWNER), what="the claim to wait")
        await database.rows(ROTATE)
        await queue.enqueue([entry("film", frames=20)])
        [taken] = await other.claim(20, lanes=[film.lane])
    results = await claiming
    assert (taken.frames, [result.frames for result in results]) == (20, [0, 1])
    await agreed(database)


async def test_groups_of_different_keys_in_one_lane_have_positions_of_their_own(queue, dispatcher, database):
    """More keys than shards, so that some share a lane."""
    placed = await queue.enqueue([entry(key=str(number), frames=3) for number in range(9)])
    assert len({each.lane for each in placed}) < 9
    assert len({(each.lane, each.first_seq) for each in placed}) == 9
    assert len(await dispatcher.tokens(100)) == 27
    await agreed(database)
