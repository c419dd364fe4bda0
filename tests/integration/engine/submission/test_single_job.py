"""A job that is submitted alone has a statement of its own, and is written exactly as in a batch."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from rota.engine.admission.decision import DeferAll
from rota.engine.admission.precheck import AdmissionPrecheck
from rota.engine.queries.jobs import JobQueries
from rota.engine.submission import statements
from rota.engine.submission.statements import SubmissionBatch
from rota.engine.submission.submitter import Submitter, submit_on_async
from rota.model.errors import IdempotencyConflict, InvalidInput
from rota.model.job_states import JobState
from rota.model.jobs.submission import Budget, RetrySpec
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.kernels import Table
from tests.support.queue import Dispatcher, agreed, sql
from tests.support.waiting import until

TOMORROW = datetime.now(UTC) + timedelta(days=1)
YESTERDAY = datetime.now(UTC) - timedelta(days=1)
ALONE = {
    "bare": task(),
    "input": task(value={"scene": "a.blend"}),
    "frames": task(layer={"frames": 1000}),
    "frames with a step": task(layer={"frames": "10-100x5"}),
    "command": task("", layer={"argv": ("true",), "retries": RetrySpec(most=2)}),
    "named": task(name="comp", labels={"team": "fx", "node.rack": "7"}, requires=("cuda",), workflow_id="w:1:s"),
    "limits": task(budget=Budget(deadline_ms=60_000), max_wait_s=30.0, priority=3),
    "details": task(context={"x": 1}, capability="read", env={"A": "b"}),
    "key": task(idempotency_key="k"),
    "elsewhere": task(folder="shots", dept="fx", topic="sim.gpu"),
}
TOGETHER = {
    "frame list": task(layer={"frames": "1,5,9-20"}),
    "items": task(layer={"items": [1, 2]}),
    "large input": task(value="x" * 100_000),
    "caps": task(max_cores=4),
    "layer caps": task(layer={"max_gpus": 2}),
    "later": task(run_at=TOMORROW),
    "since": task(run_at=YESTERDAY),
}
WRONG = {
    "show": task(show="flim"),
    "folder": task(folder="shot"),
    "dept": task(dept="efx"),
}
TIMES = ("ts_submitted", "ts_updated", "ts_deadline", "ts_wait_until")
IDS = ("pk_job", "pk_layer", "job_id", "layer_id", "deferred_id")
NEVER_EQUAL = (*TIMES, *IDS, "lane_seq", "enqueued_at", "ts_created", "history", "int_version")
OF_JOB = {
    "job": "pk_job",
    "layer": "pk_job",
    "ready_entries": "job_id",
    "deferred_jobs": "job_id",
    "job_resource": "pk_job",
    "layer_resource": "pk_job",
    "idempotency_key": "pk_job",
}
ROWS = {
    table: sql(f"SELECT * FROM rota.{table} WHERE {column} = $1::uuid ORDER BY 1, 2, 3")
    for table, column in OF_JOB.items()
}
DELTAS = sql("DELETE FROM rota.queue_terminal_count_deltas RETURNING *")
FORGET = sql("DELETE FROM rota.idempotency_key")
ROTATE = sql("INSERT INTO rota.queue_ring_rotations SELECT max(generation) + 1 FROM rota.queue_ring_rotations")
REQUIRE_POLICY = sql("UPDATE rota.policy_guard SET asks = $1::boolean")
LOCK_LANES = sql("SELECT pg_advisory_xact_lock(1903519025, lane_id) FROM rota.queue_lanes WHERE enqueue_shard <= 1")
SHARDS = sql("SELECT DISTINCT l.enqueue_shard FROM rota.ready_entries e JOIN rota.queue_lanes l USING (lane_id)")
WAITERS = sql("SELECT count(*) FROM pg_locks WHERE NOT granted")
ANALYZE = sql("ANALYZE")
READ_HERE = """SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::integer FROM pg_stat_xact_user_tables
               WHERE schemaname = 'rota'"""
COPIES = 5_000
GROW = (
    """INSERT INTO rota.idempotency_key SELECT pk_show, 'key' || n, gen_random_uuid(), 'x'
       FROM rota.show, generate_series(1, $1::integer) AS n""",
    """INSERT INTO rota.folder SELECT gen_random_uuid(), pk_show, 'folder' || n
       FROM rota.show, generate_series(1, $1::integer) AS n""",
    """INSERT INTO rota.placement_class (digest, topic, cores, gpus, memory_mb)
       SELECT ('n' || n)::bytea, 'x', 1, 0, 0 FROM generate_series(1, $1::integer) AS n""",
    """INSERT INTO rota.queues (queue) SELECT 'queue' || n FROM generate_series(1, $1::integer) AS n""",
    """INSERT INTO rota.queue_lanes (queue, priority, enqueue_shard)
       SELECT queue, 5, 0 FROM rota.queues WHERE queue LIKE 'queue%' LIMIT $1::integer""",
    """INSERT INTO rota.queue_class SELECT 'queue' || n, gen_random_uuid(), gen_random_uuid(), gen_random_uuid(),
                                           (SELECT min(class_id) FROM rota.placement_class)
       FROM generate_series(1, $1::integer) AS n""",
    """INSERT INTO rota.queue_lane_bases SELECT 1000000 + n, 0, 0 FROM generate_series(1, $1::integer) AS n""",
    "INSERT INTO rota.folder SELECT gen_random_uuid(), pk_show, 'last' FROM rota.show",
)
SQL_IN_CHECKS = sql("""
SELECT c.conname, p.proname FROM pg_constraint c
JOIN pg_depend d ON d.classid = 'pg_constraint'::regclass AND d.objid = c.oid AND d.refclassid = 'pg_proc'::regclass
JOIN pg_proc p ON p.oid = d.refobjid JOIN pg_language l ON l.oid = p.prolang
WHERE c.contype = 'c' AND l.lanname = 'sql'""")


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Submitter(database, NO_EVENTS)


@pytest.fixture
def batched(monkeypatch):
    """Submissions are written by the statement for many, even those that come alone."""

    def enable():
        monkeypatch.setattr(statements, "fits_one_row", lambda _plan, _decision: False)

    return enable


@pytest.fixture
def inserts(monkeypatch):
    """Names of the statements that were to write jobs."""
    seen, real = [], SubmissionBatch._insert

    def record(self):
        insert = real(self)
        seen.append(insert.query.name.rpartition(".")[2])
        return insert

    monkeypatch.setattr(SubmissionBatch, "_insert", record)
    return seen


async def rows_of(database, job):
    """The rows of a job, without what is never the same twice; times as offsets from the submission."""
    found = {table: [dict(row) for row in await database.rows(query, job)] for table, query in ROWS.items()}
    [of] = found["job"]
    since = [of[name] and round((of[name] - of["ts_submitted"]).total_seconds(), 3) for name in TIMES]
    states = [(entry.state, entry.reason) for entry in (await JobQueries(database).get(job)).history]
    for row in (row for rows in found.values() for row in rows):
        for name in NEVER_EQUAL:
            row.pop(name, None)
    return found, since, states


async def written(submitter, submission):
    """What a submission alone writes to a queue that exists."""
    database = submitter.database
    await submitter.submit([submission])
    await database.run(FORGET)
    await database.rows(DELTAS)
    [submitted] = await submitter.submit([submission])
    deltas = [tuple(row) for row in await database.rows(DELTAS)]
    return submitted.state, submitted.already, deltas, await rows_of(database, submitted.job)


@pytest.mark.parametrize("shape", [*ALONE, *TOGETHER])
async def test_job_submitted_alone_is_written_as_by_the_statement_for_many(submitter, inserts, batched, shape):
    submission = (ALONE | TOGETHER)[shape]
    single = await written(submitter, submission)
    assert set(inserts) == {"submit_insert_one" if shape in ALONE else "submit_insert"}
    batched()
    assert await written(submitter, submission) == single
    assert inserts[-1] == "submit_insert"


async def test_refused_jobs_get_the_same_answers_as_from_the_statement_for_many(submitter, inserts, batched):
    async def answers():
        errors = []
        for wrong in (*WRONG.values(), task("other", idempotency_key="k")):
            with pytest.raises((InvalidInput, IdempotencyConflict)) as refused:
                await submitter.submit([wrong])
            errors.append((type(refused.value), refused.value.sentence, refused.value.facts))
        return errors, await submitter.submit([task(idempotency_key="k")]), await left(submitter.database)

    [first] = await submitter.submit([task(idempotency_key="k")])
    alone = await answers()
    assert (alone[1][0].job, alone[1][0].already, alone[1][0].state) == (first.job, True, JobState.SCHEDULED)
    assert "submit_insert" not in inserts
    batched()
    assert await answers() == alone


async def test_positions_follow_each_other_over_slots_with_exact_counts(submitter, database):
    dispatcher = await Dispatcher(database).enlisted()
    jobs = []
    for _ in range(3):
        for frames in (1, 5):
            jobs += await submitter.submit([task(layer={"frames": frames})])
        await database.run(ROTATE)
    jobs += await submitter.submit([task(), task()])
    jobs += await submitter.submit([task()])
    pieces = await dispatcher.pieces()
    assert [piece.job for piece in pieces] == [one.job for one in jobs]
    assert [counts["running"] for counts in (await agreed(database)).values()] == [21]


async def roll_back(submitter):
    rolled_back = RuntimeError("rolled back")
    with suppress(RuntimeError):
        async with submitter.database.transaction() as tx:
            await submitter.submit([task(idempotency_key="k")], on=tx)
            raise rolled_back


async def test_locked_lanes_are_passed_over_and_a_rolled_back_job_leaves_nothing(submitter, database):
    await submitter.submit([task()])
    async with database.transaction() as tx:
        await tx.rows(LOCK_LANES)
        await submitter.submit([task()])
    await roll_back(submitter)
    assert {row["enqueue_shard"] for row in await database.rows(SHARDS)} == {0, 2}
    assert await left(database) == {"jobs": 2, "layers": 2, "entries": 2}
    assert [counts["waiting"] for counts in (await agreed(database)).values()] == [2]


async def submit_serializable(submitter):
    async with submitter.database.transaction("serializable") as tx:
        await submitter.submit([task()], on=tx)


async def test_serializable_transaction_is_refused(submitter, database):
    await submitter.submit([task()])
    with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
        await submit_serializable(submitter)
    assert (await left(database))["jobs"] == 1


async def test_job_without_a_decision_waits_while_servers_require_a_policy(submitter, database, inserts):
    await database.run(REQUIRE_POLICY, True)
    try:
        [one] = await submitter.submit([task(idempotency_key="k")])
        async with database.transaction() as tx:
            [two] = await submitter.submit([task(idempotency_key="l")], on=tx)
    finally:
        await database.run(REQUIRE_POLICY, False)
    assert (one.state, two.state) == (JobState.PENDING, JobState.PENDING)
    assert inserts == ["submit_insert_one", "submit_insert"] * 2
    assert await left(database) == {"jobs": 2, "layers": 2, "keys": 2, "messages": 2}


async def test_waiting_for_the_key_expires_the_decision_of_a_job_alone(submitter, database, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.precheck.DECISION_TTL_S", 0.3)
    asking = Submitter(database, NO_EVENTS, gate=DeferAll(), ahead=AdmissionPrecheck(database, Table()))
    [before] = await asking.submit([task()])
    assert before.state is JobState.SCHEDULED
    expired = sql("SELECT clock_timestamp() > $1::timestamptz + interval '0.3 s'")
    async with database.transaction() as tx:
        await submitter.submit([task(idempotency_key="k")], on=tx)
        other = asyncio.create_task(asking.submit([task(idempotency_key="k")]))
        await until(lambda: is_waiting(database), what="the second submitter to wait for the key")
        now = await database.value(sql("SELECT clock_timestamp()"))
        await until(lambda: database.value(expired, now), what="the decision to expire")
        await tx.run(FORGET)
        await tx.run(sql("DELETE FROM rota.job WHERE pk_job <> $1::uuid"), before.job)
    [answer] = await other
    assert (answer.state, answer.already) == (JobState.PENDING, False)


async def is_waiting(database):
    return await database.value(WAITERS) > 0


async def test_statement_of_a_job_alone_planned_for_tiny_tables_reads_no_other_rows(submitter, database, database_url):
    await submitter.submit([task(idempotency_key="first")])
    await database.run(ANALYZE)
    session = await asyncpg.connect(database_url)
    try:
        for number in range(24):  # a plan is kept after five executions; every other key is known
            async with session.transaction():
                await submit_on_async(session, [task(idempotency_key=f"small{number // 2}")])
        for statement in GROW:
            await session.execute(statement.replace("$1::integer", str(COPIES)))
        await submitter.submit([task(folder="last", topic="last")])  # whose rows come last
        for _ in ("new", "already there"):
            async with session.transaction():
                before = await session.fetchval(READ_HERE) or 0
                await submit_on_async(session, [task(folder="last", topic="last", idempotency_key="last")])
                assert await session.fetchval(READ_HERE) - before < 100
    finally:
        await session.close()


async def test_constraints_call_no_function_that_is_parsed_in_each_statement(database):
    """PostgreSQL inlines SQL functions of constraints, and keeps no plan of a constraint."""
    assert await database.rows(SQL_IN_CHECKS) == []
