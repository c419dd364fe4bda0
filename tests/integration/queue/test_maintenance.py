"""Maintenance by the leader: it loses and miscounts nothing, and blocks no other session."""

import asyncio
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.model.errors import StaleFence
from rota.queue import FailedFilter, FrameFailure, MaintenanceIntervals, Queue, QueueMaintenance, maintenance, storage
from rota.testing.clock import MovableClock
from tests.support.harness.statements import count_statements
from tests.support.queue import GENERATION, Dispatcher, Leader, agreed, entry, sql
from tests.support.waiting import until

PENDING = sql("SELECT count(*) FROM rota.queue_terminal_count_deltas")
LIVE = sql("SELECT coalesce(sum(completed), 0)::int FROM rota.queue_terminal_live_counts")
PRUNED = sql("SELECT coalesce(sum(pruned_completed_count), 0)::int FROM rota.queue_terminal_rollups")
ROWS = sql("SELECT (SELECT count(*) FROM rota.ready_entries) + (SELECT count(*) FROM rota.queue_claims)")
SLOT_OF_ALL = sql("SELECT array_agg(DISTINCT ready_slot) FROM rota.ready_entries")
EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() WHERE name = $1")
LIVE_ROWS = sql("SELECT count(*) FROM rota.queue_terminal_live_counts")
READ = sql(
    "SELECT DISTINCT c.relname AS name FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
    " WHERE l.pid = pg_backend_pid() AND c.relnamespace = 'rota'::regnamespace AND c.relkind IN ('r', 'p')"
)
WRITTEN = sql(
    "SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::int FROM pg_stat_xact_user_tables"
    " WHERE schemaname = 'rota' AND relname <> 'lease'"
)
DEAD = sql("SELECT n_tup_upd + n_tup_del FROM pg_stat_xact_all_tables WHERE relid = $1::text::regclass")


async def tombstone_nothing(tokens):
    return set()


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture
async def leader(queue):
    return await Leader.of(queue, MaintenanceIntervals(slot_bytes=1, prune_delay_s=0.0, failed_retention_s=0.0))


async def completed(queue, dispatcher, frames, **more):
    await queue.enqueue([entry(frames=frames, **more)])
    await queue.complete(await dispatcher.tokens(frames))


@pytest.fixture
async def reader(database_url):
    """A session of another application, such as a report, that may stay in a transaction."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def test_fold_moves_deltas_and_changes_no_count(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 10)
    before = await agreed(database)
    assert (await queue.counts_fast())["film"].completed == 0
    assert [each.done for each in await leader.fold()] == ["folded"]
    assert await agreed(database) == before
    assert (await database.value(PENDING), await database.value(LIVE)) == (0, 10)
    assert (await queue.counts_fast())["film"].completed == 10
    assert await leader.fold() == []


async def test_fold_under_an_old_snapshot_merges_deltas_and_updates_no_row(
    queue, dispatcher, leader, database, reader, monkeypatch
):
    for _ in range(20):
        await completed(queue, dispatcher, 2)
    await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    monkeypatch.setattr(storage.pinning_sessions, "__defaults__", (0.0,))
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


async def test_fold_under_an_old_snapshot_deletes_no_delta_that_a_reader_locks(
    queue, dispatcher, leader, database, reader, monkeypatch
):
    for _ in range(20):
        await completed(queue, dispatcher, 2)
    await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM rota.queue_terminal_count_deltas")
    monkeypatch.setattr(storage.pinning_sessions, "__defaults__", (0.0,))
    before = await agreed(database)
    assert [each.done for each in await leader.fold()] == ["in use"]
    assert await database.value(PENDING) == 60, "deleted deltas would be dead rows until the reader ends"
    assert await agreed(database) == before
    await reader.execute("COMMIT")
    monkeypatch.undo()
    await leader.fold()
    assert (await database.value(PENDING), await database.value(LIVE)) == (0, 40)


async def test_producer_in_an_open_transaction_does_not_keep_deltas_pending(queue, dispatcher, leader, database):
    async with database.transaction() as tx:
        await queue.enqueue([entry(frames=7)], on=tx)
        for _ in range(5):
            await completed(queue, dispatcher, 3, priority=1)
        assert [each.done for each in await leader.fold()] == ["folded around a transaction"]
        assert await database.value(PENDING) == 0
        assert (await agreed(database))["film"]["completed"] == 15
    assert (await agreed(database))["film"]["waiting"] == 7


async def test_slot_with_only_ended_frames_is_pruned_into_the_rollup(queue, dispatcher, leader, database):
    job = entry(frames=30)
    await queue.enqueue([job])
    await queue.cancel_waiting(job.job, frames=range(20, 30))
    tokens = await dispatcher.tokens(20)
    await queue.complete(tokens[:15])
    await queue.cancel_running(tokens[15:18])
    await queue.fail([FrameFailure(token, "exception") for token in tokens[18:]])
    await leader.fold()
    before = await agreed(database)
    assert await leader.turn_ring() == "rotated"
    await leader.turn_ring()
    assert await agreed(database) == before
    assert (await database.value(PRUNED), await database.value(ROWS)) == (15, 0)
    assert (await queue.complete(tokens)).refused == frozenset(tokens)
    await completed(queue, dispatcher, 4)
    assert (await agreed(database))["film"]["completed"] == 19


async def test_ended_frames_stay_known_for_a_while_because_their_logs_come_later(queue, dispatcher):
    leader = await Leader.of(queue, MaintenanceIntervals(slot_bytes=1, prune_delay_s=3600.0))
    await queue.enqueue([entry(frames=3)])
    tokens = await dispatcher.tokens(3)
    await queue.complete(tokens)
    for _ in range(3):
        await leader.turn_ring()
    assert set(await queue.lookup_tokens(tokens)) == set(tokens)
    leader.maintenance.intervals = MaintenanceIntervals(slot_bytes=1, prune_delay_s=0.0)
    await leader.turn_ring()
    assert await queue.lookup_tokens(tokens) == {}


async def test_lane_positions_continue_after_its_slots_are_pruned(queue, dispatcher, leader, database):
    for _ in range(20):
        await completed(queue, dispatcher, 3)
        await leader.turn_ring()
    assert await database.value(GENERATION) >= 20
    [placed] = await queue.enqueue([entry()])
    assert placed.first_seq == 60
    assert (await agreed(database))["film"]["completed"] == 60


async def test_lane_positions_continue_after_a_slot_between_older_ones_is_pruned(queue, dispatcher, leader, database):
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


async def test_producer_in_an_open_transaction_blocks_only_slots_it_wrote_to(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 5)
    await leader.turn_ring()
    async with database.transaction() as tx:
        await queue.enqueue([entry("short")], on=tx)
        await leader.fold()
        async with database.transaction() as pruning:
            assert await storage.prune(pruning, 0) == "pruned"


async def test_drifted_counter_is_dropped_with_its_slot_and_not_added_to_the_rollup(
    queue, dispatcher, leader, database
):
    await completed(queue, dispatcher, 10)
    await leader.fold()
    await database.run(sql("UPDATE rota.queue_terminal_live_counts SET completed = completed + 989"))
    assert (await queue.counts_exact())["film"].completed == 999
    await leader.turn_ring()
    await leader.turn_ring()
    assert (await agreed(database))["film"]["completed"] == 10


async def test_exact_counts_read_no_slot_and_at_most_slots_times_lanes_rows(queue, dispatcher, leader, database):
    """A transaction locks every table it reads, so its locks show which tables were read for the counts."""
    for _ in range(12):
        await completed(queue, dispatcher, 5)
        await queue.enqueue([entry(frames=2)])
        await queue.fail([FrameFailure(token, "exception") for token in await dispatcher.tokens(2)])
        await leader.turn_ring()
    await leader.fold()
    async with database.transaction() as tx:
        counted = await tx.row(sql("SELECT * FROM rota.queue_counts_exact()"))
        read = {row["name"] for row in await tx.rows(READ)}
    assert (counted["completed"], counted["failed"]) == (60, 24)
    assert read == {
        *("queue_terminal_count_deltas", *(f"queue_terminal_count_deltas_{turn}" for turn in range(4))),
        *("queue_storage", "queue_terminal_live_counts", "queue_terminal_rollups", "queue_lanes", "queues"),
    }
    rows, lanes = await database.value(LIVE_ROWS), await database.value(sql("SELECT count(*) FROM rota.queue_lanes"))
    assert rows <= (storage.RING_SLOTS + 2) * lanes


async def test_distrusted_counters_are_unused_until_rebuilt(queue, dispatcher, database):
    await completed(queue, dispatcher, 7)
    await database.run(sql("UPDATE rota.queue_terminal_count_deltas SET completed = 999 WHERE completed > 0"))
    assert (await queue.counts_exact())["film"].completed == 999
    await database.run(sql("UPDATE rota.queue_storage SET counters_trusted = false"))
    assert (await queue.counts_exact())["film"].completed == 7
    await queue.rebuild_counts()
    assert (await queue.counts_exact())["film"].completed == 7
    await completed(queue, dispatcher, 1)
    assert (await agreed(database))["film"]["completed"] == 8


async def test_counter_modes_give_equal_counts(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 3)
    await queue.rebuild_counts("scan")
    job = entry(frames=10)
    await queue.enqueue([job])
    tokens = await dispatcher.tokens(6)
    await queue.complete(tokens[:2])
    await queue.retry(tokens[2:3], 60.0)
    await queue.fail([FrameFailure(tokens[3], "exception")])
    assert await queue.cancel_waiting(job.job, frames=range(9, 10)) == 1
    assert await database.value(PENDING) == 0
    assert (await queue.counts_fast()) == (await queue.counts_exact())
    expected = {"waiting": 3, "running": 2, "deferred": 1, "completed": 5, "failed": 1, "cancelled": 1, "dead": 0}
    assert (await agreed(database))["film"] == expected
    await leader.turn_ring()
    assert (await agreed(database))["film"] == expected
    await queue.rebuild_counts("ledger")
    assert (await agreed(database))["film"] == expected


async def test_slot_with_waiting_running_or_returned_frames_is_not_pruned(queue, dispatcher, leader, database):
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


async def test_reader_in_a_slot_blocks_only_the_reuse_of_that_slot(
    queue, dispatcher, leader, database, reader, monkeypatch
):
    monkeypatch.setattr(storage, "LOCK_TIMEOUT_MS", 5)
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


async def test_entries_older_than_the_ring_are_carried_over_once_with_tokens_and_order(
    queue, dispatcher, leader, database
):
    long = entry("slow", frames=600, payload=b"kept")
    await queue.enqueue([long])
    lanes = [candidate.lane for candidate in await queue.candidates(["slow"])]
    [claim] = await queue.claim(lanes, 200, dispatcher.owner)
    await queue.enqueue([entry("slow")])
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


async def test_slot_is_carried_over_in_parts_that_split_no_claim(queue, dispatcher, leader, database, monkeypatch):
    """Between two parts, entries, claims, returns and cancellations of one lane are both in the ring and outside it."""
    monkeypatch.setattr(storage, "CARRY_MAX", 2)
    monkeypatch.setattr(maintenance, "CARRIES_MAX", 1)
    jobs = [entry("slow", frames=5, payload=bytes([number])) for number in range(6)]
    long = [entry("slow", job=jobs[-1].job, frame=frame, frames=5, payload=b"\5") for frame in (5, 10, 15, 20)]
    await queue.enqueue([*jobs, *long, *(entry("slow", priority=priority) for priority in (1, 9))])
    lanes = [candidate.lane for candidate in await queue.candidates(["slow"]) if candidate.priority == 5]
    [first, second] = [(await queue.claim(lanes, want, dispatcher.owner))[0] for want in (12, 3)]
    await queue.give_back(first.tokens[3:8])
    await queue.complete(first.tokens[:2])
    await queue.cancel_waiting(jobs[-1].job, frames=range(3, 22))
    before = (await agreed(database))["slow"]
    await queue.pause("slow")
    outcomes = []
    while "carrying" not in outcomes or outcomes[-1] != "rotated":
        await completed(queue, dispatcher, 1)
        outcomes.append(await leader.turn_ring())
        assert await queue.cancel_waiting(jobs[-1].job, frames=range(3, 22)) == 0
        if outcomes == ["rotated"] * 6 + ["carrying"]:
            assert (await queue.retry([first.tokens[2], first.tokens[8]], 3600.0)).accepted == 2
            before |= {"running": before["running"] - 2, "deferred": 2}
        assert (await agreed(database))["slow"] == before
    assert outcomes.count("carrying") >= 3
    assert before["deferred"] == 2
    assert (await queue.complete([*first.tokens[9:], *second.tokens])).refused == frozenset()
    await queue.resume("slow")
    pieces = []
    while more := await dispatcher.pieces(7):
        pieces += more
    frames = [(piece.job, frame) for piece in pieces for frame in piece.frames]
    assert len(frames) == len(set(frames)) == before["waiting"]
    ours = [frame for frame in frames if frame[0] in (jobs[0].job, jobs[1].job)]
    assert ours == [(jobs[0].job, 3), (jobs[0].job, 4), *((jobs[1].job, frame) for frame in range(3))]
    assert all(piece.payload == bytes([jobs.index(job)]) for piece in pieces for job in jobs if job.job == piece.job)
    await queue.complete([token for piece in pieces for token in piece.tokens])
    await leader.shed()
    assert 7 not in (await database.value(SLOT_OF_ALL) or [])
    assert (await agreed(database))["slow"]["completed"] == before["completed"] + before["waiting"] + before["running"]


async def test_ended_slot_is_pruned_even_if_the_folded_counts_are_outdated(queue, dispatcher, leader, database):
    """While a session pins old rows nothing is folded; an ended slot is still truncated, not deleted row by row."""
    await queue.enqueue([entry(frames=5)])
    await leader.fold()
    await queue.complete(await dispatcher.tokens())
    outcomes = []
    while outcomes[-1:] in ([], ["rotated"]):
        outcomes.append(await leader.turn_ring())
        await completed(queue, dispatcher, 1)
    assert outcomes == ["rotated"] * 6 + ["pruned"]
    assert (await agreed(database))["film"]["completed"] == 12


async def test_deep_backlog_does_not_prevent_rotation(queue, dispatcher, leader, database, monkeypatch):
    monkeypatch.setattr(storage, "CARRY_MAX", 100)
    await queue.enqueue([entry("slow") for _ in range(2000)])
    await queue.pause("slow")
    for _ in range(20):
        await completed(queue, dispatcher, 1)
        await leader.turn_ring()
    assert await database.value(GENERATION) > 7 + storage.RING_SLOTS
    assert (await agreed(database))["slow"]["waiting"] == 2000


async def test_largest_queue_is_counted_folded_and_carried_over(queue, dispatcher, leader, database):
    """Three billion frames in one lane, more than 32 bits can count."""
    most = 10_000_000
    await queue.enqueue([entry("huge", frames=most) for _ in range(300)])
    await queue.pause("huge")
    async with database.transaction() as tx:
        await storage.fold(tx, pinned=True)
    for _ in range(9):
        await completed(queue, dispatcher, 1)
        await leader.turn_ring()
    assert 7 in await database.value(SLOT_OF_ALL)
    assert (await agreed(database))["huge"]["waiting"] == 300 * most


async def test_maintenance_of_an_idle_queue_writes_nothing(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 3)
    for _ in range(3):
        await leader.fold()
        await leader.turn_ring()
    async with database.transaction() as tx:
        before = await tx.value(WRITTEN)
        await storage.promote(tx)
        await storage.fold(tx, pinned=False)
        for slot in range(storage.RING_SLOTS):
            assert await storage.prune(tx, slot) == "not needed"
        await storage.rotate(tx)
        await storage.purge_oldest(tx)
        await storage.purge_carried(tx)
        assert await tx.value(WRITTEN) == before


async def test_ring_rotations_keep_one_lap(queue, dispatcher, leader, database):
    for _ in range(20):
        await completed(queue, dispatcher, 1)
        await leader.turn_ring()
    assert await database.value(sql("SELECT count(*) FROM rota.queue_ring_rotations")) <= storage.RING_SLOTS + 2


async def test_success_path_updates_and_deletes_no_row(queue, dispatcher, database):
    await queue.ensure_queue("film")
    tables = [
        row["name"]
        for row in await database.rows(
            sql("SELECT relid::regclass::text AS name FROM pg_stat_user_tables WHERE relname ~ '^(queue|ready|done)'")
        )
    ]

    async def dead(tx):
        """Rows that this session updated or deleted, including those it has not reported yet."""
        return sum([await tx.value(DEAD, table) or 0 for table in tables])

    async with database.transaction() as tx:
        before = await dead(tx)
        await queue.enqueue([entry(frames=10), entry(payload=b"x")], on=tx)
        assert await dead(tx) == before
    tokens = await dispatcher.tokens()
    async with database.transaction() as tx:
        before = await dead(tx)
        await queue.complete(tokens, on=tx)
        assert await dead(tx) == before


async def test_frames_of_a_dead_dispatcher_are_returned_unless_booked(queue, database, leader):
    doomed = await Dispatcher(database, "doomed").enlisted()
    living = await Dispatcher(database, "living").enlisted()
    await queue.enqueue([entry(frames=10)])
    mine, theirs = await doomed.tokens(6), await living.tokens(2)
    await queue.complete(mine[:1])
    assert await leader.return_orphans() == 0
    await database.run(EXPIRE, "dispatcher:doomed")
    booked = set(mine[4:])

    async def tombstone(tokens):
        return set(tokens) - booked

    leader.maintenance._tombstone = tombstone
    assert await leader.return_orphans() == 3
    assert (await agreed(database))["film"] == dict.fromkeys(("deferred", "failed", "cancelled", "dead"), 0) | {
        "waiting": 5,
        "running": 4,
        "completed": 1,
    }
    with pytest.raises(StaleFence):
        await doomed.claim()
    assert (await queue.complete(mine)).accepted == 2, "booked frames belong to their worker"
    assert (await queue.complete(theirs)).accepted == 2
    assert [piece.frames for piece in await living.pieces()] == [range(1, 4), range(8, 10)]
    assert await leader.return_orphans() == 0


async def test_failed_frames_past_retention_are_deleted_and_stay_counted(
    queue, dispatcher, leader, database, monkeypatch
):
    """In batches, and by the clock of PostgreSQL, which also recorded when they failed."""
    monkeypatch.setattr(maintenance, "REMOVE_MAX", 2)
    leader.maintenance.intervals = MaintenanceIntervals(failed_retention_s=3600.0)
    await queue.enqueue([entry(frames=7)])
    [fresh, *tokens] = await dispatcher.tokens()
    await queue.fail([FrameFailure(token, "exception") for token in tokens])
    await database.run(sql("UPDATE rota.done_entries SET failed_at = failed_at - interval '1 h'"))
    await queue.fail([FrameFailure(fresh, "exception")])
    assert await leader.expire() == 6
    assert (await agreed(database))["film"]["failed"] == 7
    assert [frame.token for frame in await queue.failed.find(FailedFilter())] == [fresh]


async def test_maintenance_leader_without_its_lease_changes_nothing(queue, dispatcher, leader, database):
    await completed(queue, dispatcher, 3)
    await queue.enqueue([entry(run_at=datetime.now(UTC) - timedelta(seconds=1))])
    pending, rows = await database.value(PENDING), await database.value(ROWS)
    await database.run(EXPIRE, "queue:upkeep")
    for step in ("promote", "fold", "turn_ring", "return_orphans", "expire"):
        with pytest.raises(StaleFence):
            await getattr(leader, step)()
    assert (await database.value(PENDING), await database.value(ROWS)) == (pending, rows)


async def test_maintenance_service_promotes_folds_and_prunes_by_itself(database, queue, dispatcher):
    queue_service = QueueMaintenance(
        queue,
        Leases(database),
        tombstone_nothing,
        MaintenanceIntervals(promote_s=0.01, fold_s=0.01, slot_bytes=1, prune_delay_s=0.0),
    )
    supervisor = Supervisor()
    supervisor.add(Service("queue_upkeep", queue_service.run))
    async with supervisor.running():
        await completed(queue, dispatcher, 5)
        await queue.enqueue([entry(run_at=datetime.now(UTC))])
        tokens = await until(dispatcher.tokens, what="promotion")
        await queue.complete(tokens)

        async def is_pruned():
            return await database.value(PRUNED) == 6

        await until(is_pruned, what="pruning")
    assert (await agreed(database))["film"]["completed"] == 6


async def test_round_of_an_idle_queue_is_two_statements(database, queue, dispatcher, monkeypatch):
    """Slots are looked at after a fold, because only then frames can have ended, and now and then."""
    clock = MovableClock()
    leases = Leases(database, clock=clock)
    [lease] = (await leases.acquire(["queue:upkeep"], kind="leader", ttl_s=60.0)).granted
    pace = MaintenanceIntervals(slot_age_s=86_400.0)  # no rotation, however old the database is
    loop = QueueMaintenance(queue, leases, tombstone_nothing, pace)
    frequent = ("promote", "return_orphans", "fold", "turn_ring")
    steps = [step for step in loop.begin_term(lease) if step.name in frequent]
    statements = count_statements(database, monkeypatch)

    async def statements_of_a_round(after_s=1.0):
        clock.advance(after_s)
        statements.clear()
        for step in steps:
            await loop.run_step(step)
        return [name.removeprefix("rota.queue.") for name in statements]

    await statements_of_a_round()
    assert await statements_of_a_round() == ["frames_due", "storage_due"]
    await completed(queue, dispatcher, 3)
    assert await statements_of_a_round() == ["frames_due", "storage_due", "pins", "prunable"]
    assert await statements_of_a_round() == ["frames_due", "storage_due"]
    assert await statements_of_a_round(maintenance.PRUNABLE_INTERVAL_S) == ["frames_due", "storage_due", "prunable"]


async def test_blocked_maintenance_step_is_retried(database, queue, dispatcher, monkeypatch):
    promote, failed = storage.promote, []

    async def busy_once(tx):
        if not failed:
            failed.append(True)
            raise asyncpg.LockNotAvailableError("lock not available")
        return await promote(tx)

    monkeypatch.setattr(storage, "promote", busy_once)
    queue_service = QueueMaintenance(queue, Leases(database), tombstone_nothing, MaintenanceIntervals(promote_s=0.01))
    supervisor = Supervisor()
    supervisor.add(Service("queue_upkeep", queue_service.run))
    async with supervisor.running():
        await queue.enqueue([entry(run_at=datetime.now(UTC))])
        assert await until(dispatcher.tokens, what="promotion")
    assert failed


async def test_count_waits_for_a_fold_and_sees_deltas_and_sums_consistently(queue, dispatcher, database):
    """A snapshot from before the fold would miss its deltas, which are truncated, and its sums, which are newer."""
    await completed(queue, dispatcher, 10)
    async with database.transaction() as tx:
        await storage.fold(tx, pinned=False)
        counting = asyncio.create_task(queue.counts_exact())
        await until(lambda: database.value(WAITING_LOCKS), what="the reader to wait")
    assert (await counting)["film"].completed == 10


WAITING_LOCKS = sql(
    "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND NOT l.granted"
)
