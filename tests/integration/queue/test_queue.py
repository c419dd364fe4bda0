"""The operations of the queue one by one, and late reports, which are refused and change nothing (J3).

Coverage: each requirement with its tests, without `test_`. `maintenance`, `races`, `drivers`, `kills`, `report` and
`concurrency` are the files of this folder (`report` is test_storage_report.py); `model` is the state machine of
tests/property/test_queue_counts.py, `commands` tests/acceptance/cli/test_queue_commands.py, `soak`
tests/chaos/queue/test_soak.py, `bench` is `python -m bench queue`. Tests without a prefix are in this file; `...`
stands for the rest of a name.

Terminal counters

| requirement | tests |
|---|---|
| exact counts read tables bounded by slots and lanes | maintenance: exact_counts_read_no_slot... |
| | bench: exact_vs_count_star |
| completion increments | maintenance: fold_moves_deltas..., counter_modes_give_equal_counts; model |
| retry, move and discard decrement | failed_frames_are_kept_and_moved_once, queue_with_dlq_on_fail... |
| | concurrent_retry_and_move...; model |
| pruning moves live counts into the rollup and keeps the sum | maintenance: slot_with_only_ended_frames... |
| | maintenance: drifted_counter_is_dropped... |
| rebuild from the rows | maintenance: distrusted_counters...; races: rebuild_counts_and_complete... |
| | commands; model; concurrency: concurrent_operations... |
| skewed worst case against no counter | bench: ledger_cost |

Counts

| requirement | tests |
|---|---|
| counts equal the rows after every batch, on every path | model; concurrency: concurrent_operations... |
| the success path inserts rows and updates none | maintenance: success_path_updates... |
| drift, as of a row deleted by hand, ends with its slot | maintenance: drifted_counter_is_dropped...; model |
| wrong counters, distrust, and trust after a rebuild | maintenance: distrusted_counters... |
| folding: freely, with pinned rows, around a transaction | maintenance: fold_moves_deltas... |
| | maintenance: fold_under_an_old_snapshot..., producer_in_an_open_transaction..., count_waits_for_a_fold...; soak |
| repeated completion | repeated_or_unknown_completion... |
| fast counts lag by one fold and are then exact, in every mode | maintenance: fold_moves_deltas... |
| | maintenance: counter_modes_give_equal_counts |
| failed frames: kept for their retention, counted afterwards | failed_frames_are_kept_and_moved_once |
| | maintenance: failed_frames_past_retention... |
| modes and shards | maintenance: counter_modes_give_equal_counts; reduced_shards_apply... |
| an idle queue is not written to, a lap leaves nothing | maintenance: maintenance_of_an_idle_queue... |
| | maintenance: ring_rotations_keep_one_lap; soak |
| more frames than 32 bits count | maintenance: largest_queue_is_counted... |

Enqueue and claim

| requirement | tests |
|---|---|
| no frame is claimed twice, by any number of claimers | concurrency: concurrent_claimers... |
| | concurrency: concurrent_operations...; model |
| an earlier uncommitted entry is not passed; an abort leaves no gap | concurrency: uncommitted_enqueue... |
| | concurrency: aborted_enqueue... |
| lost reply of a claim: nothing to repair, cursors are derived | owner_finds_the_claim...; kills |
| cancelled positions before and after the cursor | waiting_part_of_a_range...; races: claim_ending_within... |
| | races: cancel_on_both_sides..., slot_of_cancelled_positions... |
| priorities; no ageing here, the dispatcher decides | higher_priority_is_claimed_first..., head_ages_report... |
| shards: own positions, a key stays on one, fewer of them drain | reduced_shards_apply..., key_keeps_its_order... |
| claims do not wait for rotation, no deadlocks | concurrency: claimer_skips_a_lane... |
| | concurrency: producer_in_an_open_transaction...; races: carry_over_waits..., rebuild_counts_and_complete... |
| a batch that waited for its lanes during a rotation | races: batch_that_waited..., cancel_reads_the_ring... |
| | races: park_reads_the_ring... |
| rolled back first use | rolled_back_first_use... |
| parked jobs | job_at_its_cap..., job_of_many_entries...; races: unpark_during_carry_over... |
| promotion during a cancel; a locked lane delays no other | races: cancel_finds_frames_being_promoted |
| | races: promotion_does_not_wait..., queue_blocked_for_promotion... |

Fences and orphans

| requirement | tests |
|---|---|
| late ends after retry, cancel, return, failure, completion, prune, carry-over | late_end_is_refused... |
| | maintenance: slot_with_only_ended_frames..., entries_older_than_the_ring... |
| retry and move have one winner | concurrent_retry_and_move... |
| claims of a dead dispatcher are returned unless booked | maintenance: frames_of_a_dead_dispatcher... |
| | races: dispatcher_declared_dead...; report: unbooked_tokens... |
| running and returned frames keep their slot | maintenance: slot_with_waiting_running... |
| heartbeats, deadlines and handlers belong to the worker, whose lease decides; unique keys do not exist | - |

Pruning and the ring

| requirement | tests |
|---|---|
| live slots stay; they are checked again under the lock | maintenance: slot_with_waiting_running... |
| | races: prune_checks_the_slot_again... |
| a session in a slot blocks only that slot, without an error | maintenance: reader_in_a_slot... |
| | maintenance: producer_in_an_open_transaction... |
| one leader rotates; one without its lease changes nothing | maintenance: maintenance_leader_without_its_lease... |
| | maintenance: ring_rotations_keep_one_lap |
| entries older than their slot: carried over once, in parts, any number | maintenance: entries_older_than_the_ring... |
| | maintenance: slot_is_carried_over_in_parts..., deep_backlog...; races: frames_claimed_while_the_carried_slot... |

Operators, failures and drivers

| requirement | tests |
|---|---|
| dead letters: there and back, all or nothing, no purge without a filter | queue_with_dlq_on_fail... |
| | dead_letter_is_unique_per_cause, invalid_calls_are_refused...; commands |
| cancel in every state and while frames are returned | cancel_finds_returned... |
| | races: concurrent_cancel_and_give_back... |
| failed rows keep payload and error | failed_frames_are_kept_and_moved_once |
| crash or lost reply at any failpoint; busy server; failing leader | kills; maintenance: blocked_maintenance_step... |
| | report: failed_maintenance_is_restarted... |
| PostgreSQL restarts, concurrent migrations | tests/integration/infra: test_database.py, test_migrate.py |
| enqueue in a transaction of asyncpg, psycopg, SQLAlchemy | frames_enqueued_on_other_drivers...; drivers |
| retried and failing frames among the others, at a rate | soak |
| cron, rate limits, weights and minimums | other packages |
"""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from rota.api.admin import DeadLetter
from rota.model.errors import InvalidInput, StaleFence
from rota.queue import (
    BATCH,
    CRITICAL,
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
    """Counts that are not zero."""
    return {field: number for field, number in (await agreed(database)).get(queue, {}).items() if number}


async def test_frames_are_claimed_in_enqueue_order(queue, dispatcher):
    entries = [entry(payload=str(number).encode()) for number in range(20)]
    for part in (entries[:7], entries[7:8], entries[8:]):
        await queue.enqueue(part)
    first = await dispatcher.pieces(13)
    rest = await dispatcher.pieces(100)
    assert [piece.payload for piece in first + rest] == [each.payload for each in entries]
    assert [piece.job for piece in first + rest] == [each.job for each in entries]


async def test_range_is_one_row_claimed_in_parts_with_consecutive_tokens(queue, dispatcher, database):
    layer = entry(frame=100, frames=100_000, payload=b"shared")
    await queue.enqueue([layer])
    assert await database.value(sql("SELECT count(*) FROM rota.ready_entries")) == 1
    first = await dispatcher.pieces(300)
    assert [(len(piece.tokens), piece.frames, piece.payload) for piece in first] == [(300, range(100, 400), b"shared")]
    second = await dispatcher.pieces(1024)
    assert [piece.frames for piece in second] == [range(400, 912), range(912, 1424)]
    assert await counts(database) == {"waiting": 98_676, "running": 1324}


async def test_higher_priority_is_claimed_first_and_a_paused_queue_not_at_all(queue, dispatcher):
    low, high, other = entry(priority=BATCH), entry(priority=CRITICAL), entry("short")
    await queue.enqueue([low, high, other])
    await queue.pause("short")
    assert [piece.job for piece in await dispatcher.pieces()] == [high.job, low.job]
    await queue.resume("short")
    assert [piece.job for piece in await dispatcher.pieces()] == [other.job]


async def test_lane_of_a_paused_queue_yields_nothing_even_when_named(queue, dispatcher):
    [placed] = await queue.enqueue([entry()])
    await queue.pause("film")
    assert await dispatcher.claim(lanes=[placed.lane]) == []


async def test_repeated_or_unknown_completion_is_refused_and_changes_nothing(queue, dispatcher, database):
    await queue.enqueue([entry(frames=5)])
    tokens = await dispatcher.tokens()
    assert (await queue.complete(tokens[:3])).refused == frozenset()
    again = await queue.complete(tokens)
    assert (again.refused, again.accepted) == (frozenset(tokens[:3]), 2)
    unknown = 512 * 8 * 10**6
    assert (await queue.complete([unknown, unknown + 1])).refused == {unknown, unknown + 1}
    assert (await queue.complete([tokens[-1] + 1])).refused == {tokens[-1] + 1}, "beyond the end of the claim"
    assert await counts(database) == {"completed": 5}


@pytest.mark.parametrize("meanwhile", ["retry", "cancel", "give_back", "fail", "complete"])
@pytest.mark.parametrize("late", ["complete", "fail", "retry", "cancel", "give_back"])
async def test_late_end_is_refused_and_changes_nothing(queue, dispatcher, database, meanwhile, late):
    async def end(how, tokens):
        match how:
            case "retry":
                return await queue.retry(tokens, 0.0)
            case "cancel":
                return await queue.cancel_running(tokens)
            case "fail":
                return await queue.fail([FrameFailure(token, "exception") for token in tokens])
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


async def test_returned_frames_keep_their_position_and_attempt(queue, dispatcher, database):
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


async def test_retry_waits_and_increments_the_attempt_and_defer_does_not(queue, dispatcher, database):
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


async def test_entry_with_run_at_waits_until_then(queue, dispatcher, database):
    soon, later = entry(frames=2), entry(run_at=datetime.now(UTC) + timedelta(hours=1))
    await queue.enqueue([later, soon])
    assert await counts(database) == {"waiting": 2, "deferred": 1}
    assert [piece.job for piece in await dispatcher.pieces()] == [soon.job]
    assert await promoted(database) == 1
    assert [piece.job for piece in await dispatcher.pieces()] == [later.job]


async def test_waiting_part_of_a_range_is_cancelled(queue, dispatcher, database):
    job = entry(frame=10, frames=1000)
    await queue.enqueue([job])
    assert await queue.cancel_waiting(job.job, frames=range(12, 700)) == 688
    assert await queue.cancel_waiting(job.job, frames=range(690, 710)) == 10
    assert await counts(database) == {"waiting": 302, "cancelled": 698}
    claims = await dispatcher.claim(4)
    pieces = [piece for claim in claims for piece in claim.ranges()]
    assert [(piece.frames.start, piece.frames.stop) for piece in pieces] == [(10, 12), (710, 712)]
    assert (await queue.complete([token for claim in claims for token in claim.tokens])).accepted == 4
    assert (await queue.complete(claims[0].skipped)).refused == set(claims[0].skipped)
    assert await counts(database) == {"waiting": 298, "completed": 4, "cancelled": 698}


async def test_cancel_finds_returned_and_deferred_frames_and_those_of_one_layer(queue, dispatcher, database):
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


async def test_job_at_its_cap_is_parked_and_the_lane_continues(queue, dispatcher, database):
    big, small = entry(frames=50_000), entry()
    [placed] = await queue.enqueue([big])
    tokens = await dispatcher.tokens(100)
    await queue.enqueue([small])
    parked = await queue.park(tokens[10:], big.job, rest_of=[placed.lane])
    assert parked.accepted == 90
    assert await database.value(sql("SELECT count(*) FROM rota.queue_returned")) == 2
    assert await counts(database) == {"waiting": 49_991, "running": 10}
    assert [piece.job for piece in await dispatcher.pieces()] == [small.job]
    assert await dispatcher.pieces() == []
    assert await queue.unpark(big.job, 95) == 95
    assert [piece.frames for piece in await dispatcher.pieces(95)] == [range(10, 100), range(100, 105)]
    assert await queue.unpark(big.job, 10**6) == 49_895
    assert await queue.unpark(big.job, 1) == 0


async def test_job_of_many_entries_is_parked_as_one_row(queue, dispatcher, database):
    job, other = entry(), entry(payload=b"other")
    [placed] = await queue.enqueue([*(entry(job=job.job, frame=frame) for frame in range(2000)), other])
    await queue.cancel_waiting(job.job, frames=range(1000, 1010))
    await queue.park([], job.job, rest_of=[placed.lane])
    assert await database.value(sql("SELECT count(*) FROM rota.queue_returned")) == 2, (
        "one row on each side of the cancelled frames"
    )
    assert [piece.payload for piece in await dispatcher.pieces()] == [b"other"]
    assert await counts(database) == {"waiting": 1990, "running": 1, "cancelled": 10}
    assert await queue.unpark(job.job, 1500) == 1500
    frames = [frame for piece in await dispatcher.pieces(4000) for frame in piece.frames]
    assert frames == [*range(1000), *range(1010, 1510)]


async def test_reduced_shards_apply_immediately_and_the_others_drain(queue, dispatcher, database):
    await queue.ensure_queue("film", shards=3)
    async with database.transaction() as first, database.transaction() as second:
        for tx in (first, second, None):
            [placed] = await queue.enqueue([entry(frames=2)], on=tx)
            assert placed.first_seq == 0, "each shard has its own positions"
    assert len({candidate.lane for candidate in await queue.candidates()}) == 3
    await queue.ensure_queue("film", shards=1)
    lanes = {(await queue.enqueue([entry(key=str(number))]))[0].lane for number in range(8)}
    assert len(lanes) == 1
    assert len(await dispatcher.tokens()) == 6 + 8
    assert await counts(database) == {"running": 14}


async def test_rolled_back_first_use_leaves_the_queue_usable(queue, database, dispatcher):
    async def used():
        async with database.transaction() as tx:
            await queue.enqueue([entry("new")], on=tx)
            raise LookupError

    with pytest.raises(LookupError):
        await used()
    assert (await queue.enqueue([entry("new")]))[0].first_seq == 0
    assert len(await dispatcher.tokens()) == 1


async def test_failed_frames_are_kept_and_moved_once(queue, dispatcher, database):
    job = entry(frames=4, payload=b"p")
    await queue.enqueue([job])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(token, "signal", "killed") for token in tokens])
    assert await counts(database) == {"failed": 4}
    [first, *_] = await queue.failed.find(FailedFilter(job=job.job))
    assert (first.reason, first.error, first.frame, first.payload) == ("signal", "killed", 0, b"p")

    assert await queue.failed.retry(FailedFilter(tokens=tokens[:1])) == tokens[:1]
    assert await queue.failed.move_to_dead_letters(FailedFilter(tokens=tokens[:2])) == tokens[1:2]
    assert await queue.failed.discard(FailedFilter(tokens=tokens[:3])) == tokens[2:3]
    assert await counts(database) == {"failed": 1, "deferred": 1, "dead": 1}
    assert await queue.failed.expire(3600.0) == []
    assert await queue.failed.expire(0.0) == tokens[3:]
    assert await counts(database) == {"failed": 1, "deferred": 1, "dead": 1}, "expired frames stay counted"
    assert await queue.failed.find(FailedFilter()) == []


async def test_concurrent_retry_and_move_of_failed_frames_have_one_winner(queue, dispatcher, database):
    await queue.enqueue([entry(frames=50)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(token, "exception") for token in tokens])
    which = FailedFilter(queue="film")
    retried, moved = await asyncio.gather(queue.failed.retry(which), queue.failed.move_to_dead_letters(which))
    assert sorted([*retried, *moved]) == tokens
    assert await counts(database) == {
        field: len(some) for field, some in (("deferred", retried), ("dead", moved)) if some
    }


async def test_queue_with_dlq_on_fail_moves_failures_to_dead_letters_and_back(queue, dispatcher, database):
    await queue.ensure_queue("film", dlq_on_fail=True)
    await queue.enqueue([entry(frames=3)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(token, "exception") for token in tokens])
    assert await counts(database) == {"dead": 3}
    which = DeadLetterFilter(kind="frame", reason="exception", queue="film")
    assert await queue.dead_letters.count(which) == 3
    [first, second, third] = await queue.dead_letters.find(which)
    assert await queue.dead_letters.retry(DeadLetterFilter(ids=[first.id])) == [first.id]
    assert await queue.dead_letters.purge(which) == [second.id, third.id]
    assert await counts(database) == {"deferred": 1}
    await promoted(database)
    assert [piece.attempt for piece in await dispatcher.pieces()] == [1]


async def test_dead_letter_is_unique_per_cause(queue):
    letter = DeadLetter(kind="message", reason="unreadable_message", cause="m1", payload=b"?")
    assert (
        await queue.dead_letters.add([letter, DeadLetter(kind="saga", reason="saga_compensation_failed", cause="m1")])
        == 2
    )
    assert await queue.dead_letters.add([letter]) == 0
    [kept] = await queue.dead_letters.find(DeadLetterFilter(kind="message"))
    assert (kept.cause, kept.payload) == ("m1", b"?")
    assert await queue.dead_letters.retry(DeadLetterFilter(kind="message")) == [], "only frames can return to a queue"


async def test_key_keeps_its_order_while_others_use_other_shards(queue, database, dispatcher):
    async with database.transaction() as tx:
        await queue.enqueue([entry()], on=tx)
        [other] = await queue.enqueue([entry(payload=b"other shard")])
    keyed = [entry(key="k", payload=bytes([number])) for number in range(5)]
    lanes = {(await queue.enqueue([each]))[0].lane for each in keyed}
    assert len(lanes) == 1
    assert len({other.lane, *(candidate.lane for candidate in await queue.candidates())}) >= 2
    payloads = [piece.payload for piece in await dispatcher.pieces()]
    assert [payload for payload in payloads if payload and len(payload) == 1] == [each.payload for each in keyed]


async def test_frames_enqueued_on_other_drivers_follow_their_transaction(database_url, queue, database):
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


async def test_dispatcher_with_an_ended_lease_claims_nothing(queue, dispatcher, database):
    await queue.enqueue([entry()])
    await database.run(sql("UPDATE rota.queue_owners SET dead = true"))
    with pytest.raises(StaleFence):
        await dispatcher.claim()
    assert await counts(database) == {"waiting": 1}


async def test_owner_finds_the_claim_whose_reply_was_lost(queue, dispatcher, database):
    await queue.enqueue([entry(frames=600)])
    received = await dispatcher.tokens(100)
    lost = await dispatcher.tokens(500)
    await queue.complete([*received[50:], *lost[10:]])
    assert await queue.open_tokens(dispatcher.owner) == [*received[:50], *lost[:10]]
    await queue.give_back(set(await queue.open_tokens(dispatcher.owner)) - set(received))
    assert await counts(database) == {"waiting": 10, "running": 50, "completed": 540}


async def test_head_ages_report_how_long_the_next_frame_has_waited(queue, dispatcher, database):
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
async def test_invalid_entry_is_refused_with_its_whole_batch(queue, database, bad):
    with pytest.raises(InvalidInput):
        await queue.enqueue([entry(), BAD[bad]])
    assert await counts(database) == {}


async def test_invalid_calls_are_refused_and_change_nothing(queue, dispatcher, database):
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


async def test_retry_including_a_frame_that_did_not_fail_retries_none(queue, dispatcher, database):
    await queue.enqueue([entry(frames=2)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(tokens[0], "exception")])
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
    "fail": lambda queue, tx: queue.fail([FrameFailure(512, "exception")], on=tx),
    "cancel running": lambda queue, tx: queue.cancel_running([512], on=tx),
    "cancel waiting": lambda queue, tx: queue.cancel_waiting(uuid4(), on=tx),
    "retry failed": lambda queue, tx: queue.failed.retry(FailedFilter(), on=tx),
    "move failed": lambda queue, tx: queue.failed.move_to_dead_letters(FailedFilter(), on=tx),
    "retry dead": lambda queue, tx: queue.dead_letters.retry(DeadLetterFilter(), on=tx),
    "rebuild": lambda queue, tx: queue.rebuild_counts(on=tx),
    "count": lambda queue, tx: tx.rows(EXACT),
}


@pytest.mark.parametrize("use", IN_A_TRANSACTION)
async def test_queue_refuses_a_snapshot_older_than_its_locks(queue, database, use):
    with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
        async with database.transaction("repeatable read") as tx:
            await IN_A_TRANSACTION[use](queue, tx)
