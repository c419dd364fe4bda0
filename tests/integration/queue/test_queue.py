"""The ways of a frame through the queue, one by one; and late comers, who change nothing and are told so (J3).

What a queue of this kind must be tested for, and by which tests, named by their first words. `upkeep`, `races`,
`drivers`, `kills` and `report` are the files test_queue_*.py beside this one, `storm` is test_queue_concurrency.py,
`model` the state machine of tests/property/test_queue_counts.py, `commands`
tests/acceptance/cli/test_queue_commands.py,
`soak` tests/chaos/queue/test_soak.py, `bench` `python -m bench queue`; all others are here.

What the live terminal counter has to show:

| criterion | tests |
|---|---|
| exact counts read tables bounded by slots and lanes | upkeep: exact_counts_read; bench: exact_vs_count_star |
| completing counts up | upkeep: folding_moves, every_counter_mode; model |
| retry, move (one, many, on failing), discard count down | failed_frames_are_kept, a_queue_may_send |
| | a_retry_and_a_move; model |
| pruning turns live counts into the rollup, the sum stays | upkeep: a_slot_whose_frames_have_all_ended |
| | upkeep: a_drifted_counter |
| rebuilding from the rows | upkeep: counters_that_are_not_trusted; races: rebuilding_counts |
| | commands: rebuilding_counts_mends; model; storm |
| the skewed worst case, against no counter at all | bench: ledger_cost |

Counters

| what | tests |
|---|---|
| counts are those of the rows after every batch, whatever path | model; the storm |
| the success path is the short one: rows are written and none is touched again | upkeep: success_updates |
| a drift, as of a row deleted by hand, goes with its slot | upkeep: a_drifted_counter; model |
| poisoned counters, distrust, and trust after a rebuild | upkeep: counters_that_are_not_trusted |
| folding: freely, under a pin, around a transaction | upkeep: folding_moves, with_an_old_snapshot |
| | upkeep: a_producer_that_stays, counting_waits; soak |
| completing twice | completing_again |
| fast counts lag by a fold and are then exact, in every mode | upkeep: folding_moves, every_counter_mode |
| failed frames: kept for their time, counted after it | failed_frames_are_kept; upkeep: failed_frames_past |
| stripes and shards | upkeep: every_counter_mode; fewer_shards |
| an idle queue is not written to, a lap leaves nothing behind | upkeep: upkeep_of_an_idle_queue, the_ring_remembers |
| | soak |
| more frames than 32 bits count | upkeep: as_many_frames |

Queueing and claiming

| what | tests |
|---|---|
| no frame is claimed twice, by any number of claimers | storm: two_claimers, a_storm; model |
| an earlier uncommitted entry is not passed; an abort leaves no gap | storm: an_enqueue_that_is_not_committed |
| | storm: an_aborted_enqueue |
| a lost reply after a claim: nothing to repair, cursors being derived | an_owner_finds; kills |
| cancelled turns, wherever they are to the cursor | part_of_a_range; races: a_claim_that_ends_within |
| | races: cancelling_on_both_sides, a_slot_of_cancelled_turns |
| priorities; they do not age here, since who picks decides | higher_priority, ages_tell |
| shards: own numbers, a key keeps to one, fewer of them drain | fewer_shards, a_key_keeps |
| claims wait for no rotation, nobody waits in a circle | storm: a_claimer_passes_by, a_producer_that_stays |
| | races: who_empties_a_slot, rebuilding_counts |
| a batch whose lanes were waited for while the ring turned | races: a_batch_that_waited, cancelling_looks |
| | races: parking_looks |
| a first use that is rolled back | a_first_use |
| parked jobs | a_job_at_its_cap, a_job_of_many_entries; races: unparking_while |
| promotion: meets cancelling, a held lane is in nobody's way | races: cancelling_finds, promotion_waits |
| | races: a_queue_that_cannot_be_promoted_to |

Fences and rescue

| what | tests |
|---|---|
| late ends after retry, cancel, return, failure, completion, prune, carry | a_late_end; upkeep: a_slot_whose_frames |
| | upkeep: what_outlives |
| retry and move have one winner | a_retry_and_a_move |
| a dead dispatcher's claims come back, unless booked | upkeep: a_dead_dispatchers |
| | races: a_dispatcher_that_is_declared_dead; report: what_a_dead_dispatcher |
| what runs, was given back or comes back from a rescue keeps its slot | upkeep: a_slot_with_something |
| heartbeats, deadlines and handlers are the worker's, whose lease decides; unique keys do not exist here | - |

Pruning and the ring

| what | tests |
|---|---|
| live slots stay, with a second look after the lock | upkeep: a_slot_with_something; races: a_prune_that_waited |
| somebody in a slot blocks that slot alone, and no error comes of it | upkeep: a_reader_in_a_slot |
| | upkeep: a_producer_that_stays |
| one leader turns the ring; one that lost its lease changes nothing | upkeep: a_leader_that_lost, the_ring_remembers |
| what outlives its slot: moved once, in parts, however much | upkeep: what_outlives, a_slot_is_carried |
| | upkeep: a_deep_backlog; races: what_is_claimed |

People, failures and neighbours

| what | tests |
|---|---|
| dead letters: there and back, all or nothing, no purge without a filter | a_queue_may_send, one_cause |
| | calls_that_make_no_sense; commands |
| cancelling in every state; while frames are given back | cancelling_finds; races: of_cancelling |
| failed rows keep their payload and error | failed_frames_are_kept |
| dying or losing a reply anywhere; a busy server; a leader that fails | kills; upkeep: a_step_that_finds |
| | report: upkeep_that_fails |
| restarts of PostgreSQL, several starters of a schema | test_database.py, test_migrate.py |
| enqueueing in a transaction of asyncpg, psycopg, SQLAlchemy | frames_queued_on_other_drivers; drivers |
| retried and failing frames among the others, at a rate | soak |
| cron, rate limits, weights and floors | rooms of their own |
"""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from rota.model.errors import InvalidInput, StaleFence
from rota.queue import (
    BATCH,
    CRITICAL,
    DeadLetter,
    DeadLetterFilter,
    FailedFilter,
    FrameFailure,
    Queue,
    enqueue_on,
    enqueue_on_sync,
    storage,
)
from tests.support.queue import EXACT, Dispatcher, agreed, entry, sql

DUE = sql("UPDATE rota.deferred_jobs SET run_at = clock_timestamp()")


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


async def promoted(database):
    await database.run(DUE)
    async with database.transaction() as tx:
        return await storage.promote(tx)


async def counts(database, queue="film"):
    """What is not zero."""
    return {field: number for field, number in (await agreed(database)).get(queue, {}).items() if number}


async def test_frames_are_claimed_in_the_order_they_were_queued(queue, dispatcher):
    entries = [entry(payload=str(number).encode()) for number in range(20)]
    for part in (entries[:7], entries[7:8], entries[8:]):
        await queue.enqueue(part)
    first = await dispatcher.pieces(13)
    rest = await dispatcher.pieces(100)
    assert [piece.payload for piece in first + rest] == [each.payload for each in entries]
    assert [piece.job for piece in first + rest] == [each.job for each in entries]


async def test_a_range_is_one_row_and_is_claimed_in_parts_with_consecutive_tokens(queue, dispatcher, database):
    layer = entry(frame=100, frames=100_000, payload=b"shared")
    await queue.enqueue([layer])
    assert await database.value(sql("SELECT count(*) FROM rota.ready_entries")) == 1
    first = await dispatcher.pieces(300)
    assert [(len(piece.tokens), piece.frames, piece.payload) for piece in first] == [(300, range(100, 400), b"shared")]
    second = await dispatcher.pieces(1024)
    assert [piece.frames for piece in second] == [range(400, 912), range(912, 1424)]
    assert await counts(database) == {"waiting": 98_676, "running": 1324}


async def test_higher_priority_comes_first_and_a_paused_queue_not_at_all(queue, dispatcher):
    low, high, other = entry(priority=BATCH), entry(priority=CRITICAL), entry("short")
    await queue.enqueue([low, high, other])
    await queue.pause("short")
    assert [piece.job for piece in await dispatcher.pieces()] == [high.job, low.job]
    await queue.resume("short")
    assert [piece.job for piece in await dispatcher.pieces()] == [other.job]


async def test_a_lane_of_a_paused_queue_gives_nothing_even_if_it_is_named(queue, dispatcher):
    [placed] = await queue.enqueue([entry()])
    await queue.pause("film")
    assert await dispatcher.claim(lanes=[placed.lane]) == []


async def test_completing_again_or_something_else_is_refused_and_changes_nothing(queue, dispatcher, database):
    await queue.enqueue([entry(frames=5)])
    tokens = await dispatcher.tokens()
    assert (await queue.complete(tokens[:3])).refused == frozenset()
    again = await queue.complete(tokens)
    assert (again.refused, again.accepted) == (frozenset(tokens[:3]), 2)
    unknown = 512 * 8 * 10**6
    assert (await queue.complete([unknown, unknown + 1])).refused == {unknown, unknown + 1}
    assert (await queue.complete([tokens[-1] + 1])).refused == {tokens[-1] + 1}, "beyond the claim's end"
    assert await counts(database) == {"completed": 5}


@pytest.mark.parametrize("meanwhile", ["retry", "cancel", "give_back", "fail", "complete"])
@pytest.mark.parametrize("late", ["complete", "fail", "retry", "cancel", "give_back"])
async def test_a_late_end_changes_nothing_and_says_so(queue, dispatcher, database, meanwhile, late):
    async def end(how, tokens):
        match how:
            case "retry":
                return await queue.retry(tokens, 0.0)
            case "cancel":
                return await queue.cancel_running(tokens)
            case "fail":
                return await queue.fail([FrameFailure(token, "broke") for token in tokens])
            case _:
                return await getattr(queue, how)(tokens)

    await queue.enqueue([entry(frames=3)])
    tokens = await dispatcher.tokens()
    assert (await end(meanwhile, tokens)).accepted == 3
    await promoted(database)
    again = await dispatcher.tokens()
    assert set(again).isdisjoint(tokens)
    before = await counts(database)
    assert (await end(late, tokens)).refused == frozenset(tokens)
    assert await counts(database) == before
    assert (await queue.complete(again)).accepted == len(again)


async def test_what_is_given_back_keeps_its_place_and_its_attempt(queue, dispatcher, database):
    job = entry(frames=10)
    await queue.enqueue([job, entry()])
    tokens = await dispatcher.tokens(10)
    await queue.give_back([*tokens[2:4], tokens[8]])
    assert await counts(database) == {"waiting": 4, "running": 7}
    back = await dispatcher.pieces(3)
    assert [(piece.frames, piece.attempt) for piece in back] == [(range(2, 4), 1), (range(8, 9), 1)]
    await queue.complete(tokens)
    await queue.complete([token for piece in back for token in piece.tokens])
    assert await counts(database) == {"waiting": 1, "completed": 10}


async def test_a_retry_waits_and_counts_its_attempt_and_a_deferral_does_not(queue, dispatcher, database):
    await queue.enqueue([entry(frames=6, payload=b"p")])
    tokens = await dispatcher.tokens()
    await queue.retry([*tokens[:2], *tokens[3:]][:4], 60.0)
    await queue.defer([tokens[2]], 60.0)
    assert await counts(database) == {"running": 1, "deferred": 5}
    assert await dispatcher.pieces() == []
    assert await promoted(database) == 5
    pieces = await dispatcher.pieces()
    assert sorted((piece.frames.start, piece.frames.stop, piece.attempt) for piece in pieces) == [
        (0, 2, 2),
        (2, 3, 1),
        (3, 5, 2),
    ]
    assert {piece.payload for piece in pieces} == {b"p"}


async def test_an_entry_with_a_time_waits_for_it(queue, dispatcher, database):
    soon, later = entry(frames=2), entry(run_at=datetime.now(UTC) + timedelta(hours=1))
    await queue.enqueue([later, soon])
    assert await counts(database) == {"waiting": 2, "deferred": 1}
    assert [piece.job for piece in await dispatcher.pieces()] == [soon.job]
    assert await promoted(database) == 1
    assert [piece.job for piece in await dispatcher.pieces()] == [later.job]


async def test_part_of_a_range_is_cancelled_while_it_waits(queue, dispatcher, database):
    job = entry(frame=10, frames=1000)
    await queue.enqueue([job, entry()])
    assert await queue.cancel_waiting(job.job, frames=range(12, 700)) == 688
    assert await queue.cancel_waiting(job.job, frames=range(690, 710)) == 10
    assert await counts(database) == {"waiting": 303, "cancelled": 698}
    claims = await dispatcher.claim(4)
    pieces = [piece for claim in claims for piece in claim.ranges()]
    assert [(piece.frames.start, piece.frames.stop) for piece in pieces] == [(10, 12), (710, 712)]
    assert (await queue.complete([token for claim in claims for token in claim.tokens])).accepted == 4
    assert (await queue.complete(claims[0].skipped)).refused == set(claims[0].skipped)
    assert await counts(database) == {"waiting": 299, "completed": 4, "cancelled": 698}


async def test_cancelling_finds_what_was_given_back_deferred_and_of_one_layer(queue, dispatcher, database):
    one = entry(frames=10)
    other = entry(job=one.job, layer=uuid4(), frames=4)
    await queue.enqueue([one, other])
    tokens = await dispatcher.tokens(8)
    await queue.give_back(tokens[:2])
    await queue.retry(tokens[2:6], 60.0)
    assert await queue.cancel_waiting(one.job, one.layer, range(1, 5)) == 4
    assert await counts(database) == {"waiting": 7, "running": 2, "deferred": 1, "cancelled": 4}
    assert await queue.cancel_waiting(one.job) == 8
    assert await counts(database) == {"running": 2, "cancelled": 12}
    assert (await queue.cancel_running(tokens)).accepted == 2
    assert await counts(database) == {"cancelled": 14}


async def test_a_job_at_its_cap_is_parked_and_the_lane_moves_on(queue, dispatcher, database):
    big, small = entry(frames=50_000), entry()
    [placed] = await queue.enqueue([big, small])
    tokens = await dispatcher.tokens(100)
    parked = await queue.park(tokens[10:], big.job, rest_of=[placed.lane])
    assert parked.accepted == 90
    assert await database.value(sql("SELECT count(*) FROM rota.queue_returned")) == 2
    assert await counts(database) == {"waiting": 49_991, "running": 10}
    assert [piece.job for piece in await dispatcher.pieces()] == [small.job]
    assert await dispatcher.pieces() == []
    assert await queue.unpark(big.job, 95) == 95
    await queue.enqueue([entry()])
    assert [piece.frames for piece in await dispatcher.pieces(95)] == [range(10, 100), range(100, 105)]
    assert await queue.unpark(big.job, 10**6) == 49_895
    assert await queue.unpark(big.job, 1) == 0


async def test_a_job_of_many_entries_is_parked_as_one_row(queue, dispatcher, database):
    job, other = entry(), entry(payload=b"other")
    [placed] = await queue.enqueue([*(entry(job=job.job, frame=frame) for frame in range(2000)), other])
    await queue.cancel_waiting(job.job, frames=range(1000, 1010))
    await queue.park([], job.job, rest_of=[placed.lane])
    assert await database.value(sql("SELECT count(*) FROM rota.queue_returned")) == 2, (
        "on both sides of what is cancelled"
    )
    assert [piece.payload for piece in await dispatcher.pieces()] == [b"other"]
    assert await counts(database) == {"waiting": 1990, "running": 1, "cancelled": 10}
    assert await queue.unpark(job.job, 1500) == 1500
    frames = [frame for piece in await dispatcher.pieces(4000) for frame in piece.frames]
    assert frames == [*range(1000), *range(1010, 1510)]


async def test_fewer_shards_are_used_at_once_and_the_others_are_drained(queue, dispatcher, database):
    await queue.ensure_queue("film", shards=3)
    async with database.transaction() as first, database.transaction() as second:
        for tx in (first, second, None):
            [placed] = await queue.enqueue([entry(frames=2)], on=tx)
            assert placed.first_seq == 0, "each shard numbers its own turns"
    assert len({candidate.lane for candidate in await queue.candidates()}) == 3
    await queue.ensure_queue("film", shards=1)
    lanes = {(await queue.enqueue([entry(key=str(number))]))[0].lane for number in range(8)}
    assert len(lanes) == 1
    assert len(await dispatcher.tokens()) == 6 + 8
    assert await counts(database) == {"running": 14}


async def test_a_first_use_that_is_rolled_back_leaves_the_queue_usable(queue, database, dispatcher):
    async def used():
        async with database.transaction() as tx:
            await queue.enqueue([entry("new")], on=tx)
            raise LookupError

    with pytest.raises(LookupError):
        await used()
    assert (await queue.enqueue([entry("new")]))[0].first_seq == 0
    assert len(await dispatcher.tokens()) == 1


async def test_failed_frames_are_kept_and_move_once(queue, dispatcher, database):
    job = entry(frames=4, payload=b"p")
    await queue.enqueue([job])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(token, "out_of_memory", "killed") for token in tokens])
    assert await counts(database) == {"failed": 4}
    [first, *_] = await queue.failed.find(FailedFilter(job=job.job))
    assert (first.reason, first.error, first.frame, first.payload) == ("out_of_memory", "killed", 0, b"p")

    assert await queue.failed.retry(FailedFilter(tokens=tokens[:1])) == tokens[:1]
    assert await queue.failed.move_to_dead_letters(FailedFilter(tokens=tokens[:2])) == tokens[1:2]
    assert await queue.failed.discard(FailedFilter(tokens=tokens[:3])) == tokens[2:3]
    assert await counts(database) == {"failed": 1, "deferred": 1, "dead": 1}
    assert await queue.failed.expire(3600.0) == []
    assert await queue.failed.expire(0.0) == tokens[3:]
    assert await counts(database) == {"failed": 1, "deferred": 1, "dead": 1}, "expired frames stay counted"
    assert await queue.failed.find(FailedFilter()) == []


async def test_a_retry_and_a_move_that_meet_have_one_winner(queue, dispatcher, database):
    await queue.enqueue([entry(frames=50)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(token, "broke") for token in tokens])
    which = FailedFilter(queue="film")
    retried, moved = await asyncio.gather(queue.failed.retry(which), queue.failed.move_to_dead_letters(which))
    assert sorted([*retried, *moved]) == tokens
    assert await counts(database) == {
        field: len(some) for field, some in (("deferred", retried), ("dead", moved)) if some
    }


async def test_a_queue_may_send_failures_straight_to_the_dead_letters_and_back(queue, dispatcher, database):
    await queue.ensure_queue("film", dlq_on_fail=True)
    await queue.enqueue([entry(frames=3)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(token, "broke") for token in tokens])
    assert await counts(database) == {"dead": 3}
    which = DeadLetterFilter(kind="frame", reason="broke", queue="film")
    assert await queue.dead_letters.count(which) == 3
    [first, second, third] = await queue.dead_letters.find(which)
    assert await queue.dead_letters.retry(DeadLetterFilter(ids=[first.id])) == [first.id]
    assert await queue.dead_letters.purge(which) == [second.id, third.id]
    assert await counts(database) == {"deferred": 1}
    await promoted(database)
    assert [piece.attempt for piece in await dispatcher.pieces()] == [1]


async def test_one_cause_is_one_dead_letter(queue):
    letter = DeadLetter(kind="message", reason="poison", cause="m1", payload=b"?")
    assert await queue.dead_letters.add([letter, DeadLetter(kind="saga", reason="stuck", cause="m1")]) == 2
    assert await queue.dead_letters.add([letter]) == 0
    [kept] = await queue.dead_letters.find(DeadLetterFilter(kind="message"))
    assert (kept.cause, kept.payload) == ("m1", b"?")
    assert await queue.dead_letters.retry(DeadLetterFilter(kind="message")) == [], "only frames go back to a queue"


async def test_a_key_keeps_its_order_while_others_use_other_shards(queue, database, dispatcher):
    async with database.transaction() as tx:
        await queue.enqueue([entry()], on=tx)
        [other] = await queue.enqueue([entry(payload=b"other shard")])
    keyed = [entry(key="k", payload=bytes([number])) for number in range(5)]
    lanes = {(await queue.enqueue([each]))[0].lane for each in keyed}
    assert len(lanes) == 1
    assert len({other.lane, *(candidate.lane for candidate in await queue.candidates())}) >= 2
    payloads = [piece.payload for piece in await dispatcher.pieces()]
    assert [payload for payload in payloads if payload and len(payload) == 1] == [each.payload for each in keyed]


async def test_frames_queued_on_other_drivers_come_and_go_with_their_transaction(database_url, queue, database):
    job = entry(frames=3, payload=b"p")
    connection = await asyncpg.connect(database_url)
    rolled_back = connection.transaction()
    await rolled_back.start()
    await enqueue_on(connection, [job])
    await rolled_back.rollback()
    async with connection.transaction():
        [placed] = await enqueue_on(connection, [job, entry("short", run_at=datetime.now(UTC) + timedelta(hours=1))])
    assert (placed.queue, placed.first_seq) == ("film", 0)
    await connection.close()
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await enqueue_on(connection, [job])
        assert await counts(database) == {"waiting": 3}
    with psycopg.connect(database_url) as connection:
        assert enqueue_on_sync(connection, [job, entry(priority=1)])[1].first_seq == 6
        connection.rollback()
        enqueue_on_sync(connection, [job])
    assert await counts(database) == {"waiting": 9}
    assert await counts(database, "short") == {"deferred": 1}
    with pytest.raises(InvalidInput, match="cannot be queued on a object"):
        await enqueue_on(object(), [job])


async def test_a_dispatcher_whose_lease_has_ended_claims_nothing(queue, dispatcher, database):
    await queue.enqueue([entry()])
    await database.run(sql("UPDATE rota.queue_owners SET dead = true"))
    with pytest.raises(StaleFence):
        await dispatcher.claim()
    assert await counts(database) == {"waiting": 1}


async def test_an_owner_finds_the_claim_whose_reply_it_lost(queue, dispatcher, database):
    await queue.enqueue([entry(frames=600)])
    heard = await dispatcher.tokens(100)
    unheard = await dispatcher.tokens(500)
    await queue.complete([*heard[50:], *unheard[10:]])
    assert await queue.open_tokens(dispatcher.owner) == [*heard[:50], *unheard[:10]]
    await queue.give_back(set(await queue.open_tokens(dispatcher.owner)) - set(heard))
    assert await counts(database) == {"waiting": 10, "running": 50, "completed": 540}


async def test_ages_tell_for_how_long_the_next_frame_has_been_waiting(queue, dispatcher, database):
    [placed] = await queue.enqueue([entry(frames=2)])
    await database.run(sql("UPDATE rota.ready_entries SET enqueued_at = enqueued_at - interval '90 s'"))
    await queue.enqueue([entry()])
    assert 90 <= (await queue.head_ages_s([placed.lane]))[placed.lane] < 100
    tokens = await dispatcher.tokens(2)
    assert (await queue.head_ages_s([placed.lane]))[placed.lane] < 10
    await queue.give_back(tokens)
    assert (await queue.head_ages_s([placed.lane, 10**6]))[placed.lane] >= 90


BAD = {
    "no name": entry(""),
    "long name": entry("q" * 201),
    "unprintable name": entry("a\nb"),
    "priority 0": entry(priority=0),
    "priority 10": entry(priority=10),
    "no frames": entry(frames=0),
    "too many frames": entry(frames=10**8),
    "negative frame": entry(frame=-1),
    "attempt 0": entry(attempt=0),
    "large payload": entry(payload=b"x" * 65_537),
    "time without zone": entry(run_at=datetime(2030, 1, 1)),  # noqa: DTZ001
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_entry_is_refused_with_everything_else_of_its_batch(queue, database, bad):
    with pytest.raises(InvalidInput):
        await queue.enqueue([entry(), BAD[bad]])
    assert await counts(database) == {}


async def test_calls_that_make_no_sense_are_refused_and_change_nothing(queue, dispatcher, database):
    await queue.enqueue([entry(frames=3)])
    [token, *_] = await dispatcher.tokens(1)
    before = await counts(database)
    bad = [
        lambda: queue.enqueue([entry()] * 10_001),
        lambda: queue.claim([1], 0, dispatcher.owner),
        lambda: queue.claim([1], -1, dispatcher.owner),
        lambda: queue.claim([1], 5000, dispatcher.owner),
        lambda: queue.claim([], 1, dispatcher.owner),
        lambda: queue.complete([-1]),
        lambda: queue.complete(range(10_000)),
        lambda: queue.retry([token], -1.0),
        lambda: queue.retry([token], float("nan")),
        lambda: queue.fail([FrameFailure(token, "")]),
        lambda: queue.cancel_waiting(uuid4(), frames=range(5, 5)),
        lambda: queue.unpark(uuid4(), 0),
        lambda: queue.pause("nowhere"),
        lambda: queue.counts_exact(["film", "nowhere"]),
        lambda: queue.ensure_queue("film", shards=65),
        lambda: queue.rebuild_counts("guess"),
        lambda: queue.failed.retry(FailedFilter(tokens=[token])),
        lambda: queue.failed.discard(FailedFilter()),
        lambda: queue.failed.find(FailedFilter(), most=0),
        lambda: queue.dead_letters.purge(DeadLetterFilter()),
        lambda: queue.dead_letters.add([DeadLetter(kind="frame", reason="r", cause="c")]),
    ]
    for call in bad:
        with pytest.raises(InvalidInput) as refused:
            await call()
        assert len(refused.value.sentence) > 20
    assert await counts(database) == before


async def test_a_retry_of_several_of_which_one_has_not_failed_retries_none(queue, dispatcher, database):
    await queue.enqueue([entry(frames=2)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(tokens[0], "broke")])
    with pytest.raises(InvalidInput, match="not a failed frame"):
        await queue.failed.retry(FailedFilter(tokens=tokens))
    assert await counts(database) == {"running": 1, "failed": 1}


IN_A_TRANSACTION = {
    "enqueue": lambda queue, tx: queue.enqueue([entry()], on=tx),
    "enqueue later": lambda queue, tx: queue.enqueue([entry(run_at=datetime.now(UTC))], on=tx),
    "complete": lambda queue, tx: queue.complete([512], on=tx),
    "give back": lambda queue, tx: queue.give_back([512], on=tx),
    "park": lambda queue, tx: queue.park([], uuid4(), rest_of=[1], on=tx),
    "unpark": lambda queue, tx: queue.unpark(uuid4(), 1, on=tx),
    "retry": lambda queue, tx: queue.retry([512], 0.0, on=tx),
    "fail": lambda queue, tx: queue.fail([FrameFailure(512, "broke")], on=tx),
    "cancel running": lambda queue, tx: queue.cancel_running([512], on=tx),
    "cancel waiting": lambda queue, tx: queue.cancel_waiting(uuid4(), on=tx),
    "retry failed": lambda queue, tx: queue.failed.retry(FailedFilter(), on=tx),
    "move failed": lambda queue, tx: queue.failed.move_to_dead_letters(FailedFilter(), on=tx),
    "retry dead": lambda queue, tx: queue.dead_letters.retry(DeadLetterFilter(), on=tx),
    "rebuild": lambda queue, tx: queue.rebuild_counts(on=tx),
    "count": lambda queue, tx: tx.rows(EXACT),
}


@pytest.mark.parametrize("use", IN_A_TRANSACTION)
async def test_the_queue_is_not_used_in_a_snapshot_older_than_its_locks(queue, database, use):
    with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
        async with database.transaction("repeatable read") as tx:
            await IN_A_TRANSACTION[use](queue, tx)
