"""What the leader does: counts fold, slots turn, nothing is lost or miscounted on the way, and nobody waits for it."""

import asyncio
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.model.errors import StaleFence
from rota.queue import Failure, Pace, Queue, Upkeep, storage
from tests.ground.databases import cleaned_by, one_database
from tests.ground.queues import EMPTY, GENERATION, Dispatcher, Leader, agreed, entry, sql
from tests.ground.waiting import until

shared_database_url = one_database()
database_url = cleaned_by(EMPTY)

PENDING = sql("SELECT count(*) FROM rota.queue_terminal_count_deltas")
LIVE = sql("SELECT coalesce(sum(completed), 0)::int FROM rota.queue_terminal_live_counts")
PRUNED = sql("SELECT coalesce(sum(pruned_completed_count), 0)::int FROM rota.queue_terminal_rollups")
ROWS = sql("SELECT (SELECT count(*) FROM rota.ready_entries) + (SELECT count(*) FROM rota.queue_claims)")
SLOT_OF_ALL = sql("SELECT array_agg(DISTINCT ready_slot) FROM rota.ready_entries")
EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() WHERE name = $1")
DEAD = sql("SELECT n_tup_upd + n_tup_del FROM pg_stat_xact_all_tables WHERE relid = $1::text::regclass")


async def none_buried(tokens):
    return set()


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture
async def leader(queue):
    return await Leader.of(queue, Pace(slot_bytes=1, failed_retention_s=0.0))


async def completed(queue, dispatcher, frames, **more):
    await queue.enqueue([entry(frames=frames, **more)])
    await queue.complete(await dispatcher.tokens(frames))


@pytest.fixture
async def reader(database_url):
    """Somebody else's session, as of a report, that may be left in a transaction."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def test_folding_moves_deltas_and_changes_no_count(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 10)
    before = await agreed(database)
    assert (await queue.counts_fast())["film"].completed == 0
    assert [each.done for each in await leader.fold()] == ["folded"]
    assert await agreed(database) == before
    assert (await database.value(PENDING), await database.value(LIVE)) == (0, 10)
    assert (await queue.counts_fast())["film"].completed == 10
    assert await leader.fold() == []


async def test_with_an_old_snapshot_about_deltas_become_few_and_no_row_is_updated(
    queue, dispatcher, leader, database, reader, monkeypatch
):
    for _ in range(20):
        await completed(queue, dispatcher, 2)
    await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    monkeypatch.setattr(storage.pins, "__defaults__", (0.0,))
    before = await agreed(database)
    assert await database.value(PENDING) == 60
    assert [each.done for each in await leader.fold()] == ["compacted"]
    assert await database.value(PENDING) == 1
    assert await database.value(LIVE) == 0
    assert await agreed(database) == before
    await reader.execute("COMMIT")
    monkeypatch.undo()
    await leader.fold()
    assert (await database.value(PENDING), await database.value(LIVE)) == (0, 40)


async def test_a_producer_that_stays_in_its_transaction_does_not_keep_deltas_pending(
    queue, dispatcher, leader, database
):
    async with database.transaction() as tx:
        await queue.enqueue([entry(frames=7)], on=tx)
        for _ in range(5):
            await completed(queue, dispatcher, 3, priority=1)
        assert [each.done for each in await leader.fold()] == ["folded around a transaction"]
        assert await database.value(PENDING) == 0
        assert (await agreed(database))["film"]["completed"] == 15
    assert (await agreed(database))["film"]["waiting"] == 7


async def test_a_slot_whose_frames_have_all_ended_is_emptied_into_the_rollup(queue, dispatcher, leader, database):
    job = entry(frames=30)
    await queue.enqueue([job])
    await queue.cancel_waiting(job.job, frames=range(20, 30))
    tokens = await dispatcher.tokens(20)
    await queue.complete(tokens[:15])
    await queue.cancel_running(tokens[15:18])
    await queue.fail([Failure(token, "broke") for token in tokens[18:]])
    await leader.fold()
    before = await agreed(database)
    assert await leader.turn_ring() == "rotated"
    await leader.turn_ring()
    assert await agreed(database) == before
    assert (await database.value(PRUNED), await database.value(ROWS)) == (15, 0)
    assert (await queue.complete(tokens)).refused == frozenset(tokens)
    await completed(queue, dispatcher, 4)
    assert (await agreed(database))["film"]["completed"] == 19


async def test_lanes_go_on_counting_turns_after_their_slots_are_gone(queue, dispatcher, leader, database):
    for _ in range(20):
        await completed(queue, dispatcher, 3)
        await leader.turn_ring()
    assert await database.value(GENERATION) >= 20
    [placed] = await queue.enqueue([entry()])
    assert placed.first_seq == 60
    assert (await agreed(database))["film"]["completed"] == 60


async def test_a_lane_goes_on_where_it_was_when_a_slot_between_older_ones_is_gone(queue, dispatcher, leader, database):
    await queue.enqueue([entry(frames=5)])
    running = await dispatcher.tokens()
    await leader.turn_ring()
    await completed(queue, dispatcher, 5)
    await leader.turn_ring()
    await leader.fold()
    await leader.turn_ring()
    assert await database.value(SLOT_OF_ALL) == [0]
    [placed] = await queue.enqueue([entry(frames=2, payload=b"next")])
    assert placed.first_seq == 10
    assert [piece.payload for piece in await dispatcher.pieces()] == [b"next"]
    assert (await queue.complete(running)).accepted == 5


async def test_a_producer_that_stays_in_its_transaction_blocks_no_slot_it_has_nothing_in(
    queue, dispatcher, leader, database
):
    await completed(queue, dispatcher, 5)
    await leader.turn_ring()
    async with database.transaction() as tx:
        await queue.enqueue([entry("short")], on=tx)
        await leader.fold()
        async with database.transaction() as upkeep:
            assert await storage.prune(upkeep, 0) == "pruned"


async def test_a_drifted_counter_goes_with_its_slot_and_never_into_the_rollup(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 10)
    await leader.fold()
    await database.run(sql("UPDATE rota.queue_terminal_live_counts SET completed = completed + 989"))
    assert (await queue.counts_exact())["film"].completed == 999
    await leader.turn_ring()
    await leader.turn_ring()
    assert (await agreed(database))["film"]["completed"] == 10


async def test_counters_that_are_not_trusted_are_not_used_until_they_are_rebuilt(queue, dispatcher, database):
    await completed(queue, dispatcher, 7)
    await database.run(sql("UPDATE rota.queue_terminal_count_deltas SET completed = 999 WHERE completed > 0"))
    assert (await queue.counts_exact())["film"].completed == 999
    await database.run(sql("UPDATE rota.queue_storage SET counters_trusted = false"))
    assert (await queue.counts_exact())["film"].completed == 7
    await queue.rebuild_counts()
    assert (await queue.counts_exact())["film"].completed == 7
    await completed(queue, dispatcher, 1)
    assert (await agreed(database))["film"]["completed"] == 8


@pytest.mark.parametrize(("mode", "stripes"), [("upsert", 1), ("upsert", 16), ("scan", None)])
async def test_every_counter_mode_counts_the_same(queue, dispatcher, leader, database, mode, stripes):
    await completed(queue, dispatcher, 3)
    await queue.rebuild_counts(mode, stripes)
    job = entry(frames=10)
    await queue.enqueue([job])
    tokens = await dispatcher.tokens(6)
    await queue.complete(tokens[:2])
    await queue.retry(tokens[2:3], 60.0)
    await queue.fail([Failure(tokens[3], "broke")])
    assert await queue.cancel_waiting(job.job, frames=range(9, 10)) == 1
    assert await database.value(PENDING) == 0
    expected = {"waiting": 3, "running": 2, "deferred": 1, "completed": 5, "failed": 1, "cancelled": 1, "dead": 0}
    assert (await agreed(database))["film"] == expected
    await leader.turn_ring()
    assert (await agreed(database))["film"] == expected
    await queue.rebuild_counts("ledger")
    assert (await agreed(database))["film"] == expected


async def test_a_slot_with_something_that_waits_runs_or_was_given_back_is_not_pruned(
    queue, dispatcher, leader, database
):
    await queue.enqueue([entry(frames=3)])
    tokens = await dispatcher.tokens(2)
    for _ in range(3):
        await leader.turn_ring()
        assert await database.value(SLOT_OF_ALL) == [0]
    await queue.complete(await dispatcher.tokens(1))
    await queue.give_back(tokens)
    await leader.turn_ring()
    assert await database.value(SLOT_OF_ALL) == [0]
    await queue.complete(await dispatcher.tokens())
    await leader.turn_ring()
    assert await database.value(ROWS) == 0


async def test_a_reader_in_a_slot_blocks_its_reuse_and_nothing_else(
    queue, dispatcher, leader, database, reader, monkeypatch
):
    monkeypatch.setattr(storage, "LOCK_MS", 5)
    await completed(queue, dispatcher, 5)
    await reader.execute("BEGIN; SELECT count(*) FROM rota.ready_entries_0")
    for _ in range(9):
        await leader.turn_ring()
        await completed(queue, dispatcher, 5)
    assert await database.value(GENERATION) == 13, "the ring stops before the slot that is being read"
    assert (await agreed(database))["film"]["completed"] == 50
    await reader.execute("COMMIT")
    await leader.turn_ring()
    await leader.turn_ring()
    assert await database.value(GENERATION) == 14
    assert (await agreed(database))["film"]["completed"] == 50


async def test_what_outlives_the_ring_is_carried_once_and_keeps_its_tokens_and_order(
    queue, dispatcher, leader, database
):
    long = entry("slow", frames=600, payload=b"kept")
    await queue.enqueue([long, entry("slow")])
    lanes = [candidate.lane for candidate in await queue.candidates(["slow"])]
    [claim] = await queue.claim(lanes, 200, dispatcher.owner)
    await queue.complete(claim.tokens[:100])
    await queue.give_back(claim.tokens[190:])
    await queue.pause("slow")
    for _ in range(12):
        await completed(queue, dispatcher, 2)
        await leader.turn_ring()
    assert await database.value(GENERATION) > 14
    assert 7 in await database.value(SLOT_OF_ALL)
    expected = {"waiting": 411, "running": 90, "completed": 100, "deferred": 0, "failed": 0, "cancelled": 0, "dead": 0}
    assert (await agreed(database))["slow"] == expected

    assert (await queue.complete(claim.tokens)).refused == frozenset([*claim.tokens[:100], *claim.tokens[190:]])
    await queue.resume("slow")
    assert await queue.cancel_waiting(long.job, frames=range(300, 400)) == 100
    pieces = await dispatcher.pieces(1000)
    assert [piece.frames for piece in pieces[:2]] == [range(190, 200), range(200, 300)]
    assert pieces[2].frames.start == 400
    assert {piece.payload for piece in pieces[:-1]} == {b"kept"}
    [next_up] = await queue.enqueue([entry("slow")])
    assert next_up.first_seq == 601
    await queue.complete([token for piece in pieces for token in piece.tokens])
    await leader.shed()
    assert 7 not in await database.value(SLOT_OF_ALL)
    assert (await agreed(database))["slow"]["completed"] == 501


async def test_success_updates_and_deletes_no_row(queue, dispatcher, database):
    await queue.make("film")
    tables = [
        row["name"]
        for row in await database.rows(
            sql("SELECT relid::regclass::text AS name FROM pg_stat_user_tables WHERE relname ~ '^(queue|ready|done)'")
        )
    ]
    async with database.transaction() as tx:
        await queue.enqueue([entry(frames=10), entry(payload=b"x")], on=tx)
        assert sum([await tx.value(DEAD, table) or 0 for table in tables]) == 0
    tokens = await dispatcher.tokens()
    async with database.transaction() as tx:
        await queue.complete(tokens, on=tx)
        assert sum([await tx.value(DEAD, table) or 0 for table in tables]) == 0


async def test_a_dead_dispatchers_frames_go_back_unless_they_are_booked(queue, database, leader):
    doomed = await Dispatcher(database, "doomed").enlisted()
    living = await Dispatcher(database, "living").enlisted()
    await queue.enqueue([entry(frames=10)])
    mine, theirs = await doomed.tokens(6), await living.tokens(2)
    await queue.complete(mine[:1])
    assert await leader.return_orphans() == 0
    await database.run(EXPIRE, "dispatcher:doomed")
    booked = set(mine[4:])

    async def bury(tokens):
        return set(tokens) - booked

    leader.upkeep._bury = bury
    assert await leader.return_orphans() == 3
    assert (await agreed(database))["film"] == dict.fromkeys(("deferred", "failed", "cancelled", "dead"), 0) | {
        "waiting": 5,
        "running": 4,
        "completed": 1,
    }
    with pytest.raises(StaleFence):
        await doomed.claim()
    assert (await queue.complete(mine)).accepted == 2, "what was booked belongs to its worker"
    assert (await queue.complete(theirs)).accepted == 2
    assert [piece.frames for piece in await living.pieces()] == [range(1, 4), range(8, 10)]
    assert await leader.return_orphans() == 0


async def test_failed_frames_past_their_retention_are_forgotten_and_stay_counted(queue, dispatcher, leader, database):
    await queue.enqueue([entry(frames=3)])
    await queue.fail([Failure(token, "broke") for token in await dispatcher.tokens()])
    assert await leader.expire() == 3
    assert (await agreed(database))["film"]["failed"] == 3
    assert await database.value(sql("SELECT count(*) FROM rota.done_entries")) == 0


async def test_a_leader_that_lost_its_lease_changes_nothing(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 3)
    await queue.enqueue([entry(run_at=datetime.now(UTC) - timedelta(seconds=1))])
    pending, rows = await database.value(PENDING), await database.value(ROWS)
    await database.run(EXPIRE, "queue:upkeep")
    for step in ("promote", "fold", "turn_ring", "return_orphans", "expire"):
        with pytest.raises(StaleFence):
            await getattr(leader, step)()
    assert (await database.value(PENDING), await database.value(ROWS)) == (pending, rows)


async def test_the_service_promotes_folds_and_turns_by_itself(database, queue, dispatcher):
    upkeep = Upkeep(queue, Leases(database), none_buried, Pace(promote_s=0.01, fold_s=0.01, slot_bytes=1))
    supervisor = Supervisor()
    supervisor.add(Service("queue_upkeep", upkeep.run))
    async with supervisor.running():
        await completed(queue, dispatcher, 5)
        await queue.enqueue([entry(run_at=datetime.now(UTC))])
        tokens = await until(dispatcher.tokens, what="promotion")
        await queue.complete(tokens)

        async def is_pruned():
            return await database.value(PRUNED) == 6

        await until(is_pruned, what="pruning")
    assert (await agreed(database))["film"]["completed"] == 6


async def test_a_step_that_finds_somebody_in_its_way_is_taken_again(database, queue, dispatcher, monkeypatch):
    promote, failed = storage.promote, []

    async def busy_once(tx):
        if not failed:
            failed.append(True)
            raise asyncpg.LockNotAvailableError("somebody holds it")
        return await promote(tx)

    monkeypatch.setattr(storage, "promote", busy_once)
    upkeep = Upkeep(queue, Leases(database), none_buried, Pace(promote_s=0.01))
    supervisor = Supervisor()
    supervisor.add(Service("queue_upkeep", upkeep.run))
    async with supervisor.running():
        await queue.enqueue([entry(run_at=datetime.now(UTC))])
        assert await until(dispatcher.tokens, what="promotion")
    assert failed


async def test_counting_waits_for_a_fold_and_then_sees_both_of_its_sides(queue, dispatcher, database):
    """A snapshot from before the fold would miss its deltas, which are truncated, and its sums, which are younger."""
    await completed(queue, dispatcher, 10)
    async with database.transaction() as tx:
        await storage.fold(tx, pinned=False)
        counting = asyncio.create_task(queue.counts_exact())
        await until(lambda: database.value(WAITING_LOCKS), what="the reader's wait")
    assert (await counting)["film"].completed == 10


WAITING_LOCKS = sql(
    "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND NOT l.granted"
)
