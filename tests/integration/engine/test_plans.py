"""Statements that were planned for tiny tables are planned again when these have grown.

The statements of a server are repeated until PostgreSQL keeps their plans; then the tables grow, and the same work is
done again. What it read is counted by PostgreSQL: a statement that reads a large table from end to end stands out.
"""

from contextlib import asynccontextmanager

import asyncpg
import pytest

from rota.engine.recovery.table_maintenance import COUNTED_WITHIN_S, GROWTH, INTERVAL_S
from rota.model.jobs.submission import LayerSpec, RetrySpec, Submission
from rota.placement.route_store import RouteStore
from tests.support.harness.effort import effort
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

ROUNDS = 12
"""A plan is kept after five executions."""
GROWN = effort(10_000, 1_000_000)
BATCH = 1000
COPIES = 10_000
"""Rows copied by a statement: a million of them take longer than a statement may."""
ANALYZED_S = COUNTED_WITHIN_S + INTERVAL_S + 10.0
"""PostgreSQL counts the rows of an idle session late; then a turn of the maintenance and the analysis itself."""
ANALYZE = sql("ANALYZE")
READ = sql(
    """SELECT relname AS name, seq_tup_read + coalesce(idx_tup_fetch, 0) AS rows
       FROM pg_stat_user_tables WHERE schemaname = 'rota' AND relname = ANY ('{job,layer}')"""
)
ROWS_MAX = 20 * GROWN
"""Read by what runs at intervals: measurements, retention, recovery."""
UNKNOWN_SIZE = sql(
    "SELECT count(*) FROM pg_class WHERE oid = ANY ('{rota.job,rota.layer}'::regclass[]) AND reltuples < $1"
)
"""Tables that were analysed while they grew are not analysed again before they have `GROWTH` times as many rows."""
COPY_DONE = sql(
    """INSERT INTO rota.job_done
       SELECT (jsonb_populate_record(d, jsonb_build_object('pk_job', gen_random_uuid()))).*
       FROM (SELECT d FROM rota.job_done d LIMIT 1) AS d, generate_series(1, $1::integer)"""
)
COPY_ENDS = sql(
    """INSERT INTO rota.frame_end
       SELECT (jsonb_populate_record(e, jsonb_build_object('pk_layer', gen_random_uuid()))).*
       FROM (SELECT e FROM rota.frame_end e LIMIT 1) AS e, generate_series(1, $1::integer)"""
)
ENDS = {
    "without a value": "SELECT count(*) FROM rota.jobs_succeed($1::uuid[], $2::integer[])",
    "with a value": """SELECT count(*) FROM rota.jobs_finish(
                         rota.layers_count($1::uuid[], $2::integer[], 'SUCCEEDED', 0))""",
}
FIRST_LAYERS = "SELECT array_agg(pk_layer) FROM (SELECT pk_layer FROM rota.layer LIMIT 10) AS l"
READ_HERE = """SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::integer FROM pg_stat_xact_user_tables
               WHERE schemaname = 'rota' AND relname = ANY ('{job,layer}')"""
COPY_PROCS = sql(
    """INSERT INTO rota.proc
       SELECT (jsonb_populate_record(
         p, jsonb_build_object('token', 4503599627370496 + $3::integer + n, 'pk_host', gen_random_uuid()))).*
       FROM (SELECT p FROM rota.proc p WHERE pk_job = $2::uuid LIMIT 1) AS p, generate_series(1, $1::integer) AS n"""
)


@asynccontextmanager
async def opened(*place):
    async with Farm(*place) as farm:
        await farm.show()
        await farm.show("plain", managed=False)
        await farm.show("idle", pool="elsewhere")
        for topic, pool in (("default", "local"), ("elsewhere", "elsewhere")):
            await RouteStore(farm.database).set_topic(topic, [pool], actor="test")
        await farm.worker(slots=20)
        yield farm


async def work(farm):
    """What users do: frames without and with a value, retries, failures, a cancellation."""
    engine = farm.replica.engine
    retried = {"retries": RetrySpec(most=2, first_s=0.0)}
    jobs = {
        await farm.submit("noop", frames=5): "SUCCEEDED",
        await farm.submit("noop", show="plain"): "SUCCEEDED",
        await farm.submit("echo", 1): "SUCCEEDED",
        await farm.submit("boom", layer=retried): "FAILED",
    }
    waits = await farm.submit("noop", show="idle", topic="elsewhere")
    await engine.explainer.explain(waits)
    await engine.canceller.cancel(waits, actor="test")
    for job, state in jobs.items():
        assert await farm.ended(job) == state


async def grow(farm):
    layer = LayerSpec(task="noop")
    submissions = [Submission(show="idle", topic="elsewhere", layers=(layer,))] * BATCH
    for _ in range(GROWN // BATCH):
        await farm.submitter.submit(submissions)
    hanging("x")
    running = await farm.submit("hang", "x", show="plain")
    await farm.running("x")
    for copied in range(0, GROWN, COPIES):
        await farm.database.run(COPY_DONE, COPIES)
        await farm.database.run(COPY_ENDS, COPIES)
        await farm.database.run(COPY_PROCS, COPIES, running, copied)


async def rows_read(database_url):
    connection = await asyncpg.connect(database_url)
    try:
        return {row["name"]: row["rows"] for row in await connection.fetch(READ.text)}
    finally:
        await connection.close()


@pytest.mark.slow("grows the tables of a running server")
@pytest.mark.timeout(1800)
async def test_statements_planned_for_tiny_tables_are_planned_again_for_large_ones(
    database_url, redis_url, nats_url, bus_prefix
):
    async with opened(database_url, redis_url, nats_url, bus_prefix) as farm:
        for _ in range(ROUNDS):
            await work(farm)
        await farm.database.run(ANALYZE)
        await work(farm)
        await grow(farm)

        async def is_analyzed():
            return await farm.database.value(UNKNOWN_SIZE, GROWN / GROWTH) == 0

        await until(is_analyzed, within_s=ANALYZED_S, what="new statistics")
        before = await rows_read(database_url)
        for _ in range(ROUNDS):
            await work(farm)
    # Sessions report what they have read at the latest when they end.
    read = {name: rows - before[name] for name, rows in (await rows_read(database_url)).items()}
    assert max(read.values()) < ROWS_MAX, read


@pytest.mark.parametrize("ended", ENDS)
async def test_end_of_jobs_planned_for_no_job_reads_no_others(ended, database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("idle", pool="elsewhere")
        await RouteStore(farm.database).set_topic("elsewhere", ["elsewhere"], actor="test")
        await farm.database.run(ANALYZE)
        session = await asyncpg.connect(database_url)
        try:
            await session.execute("SET plan_cache_mode = force_generic_plan")
            await session.fetchval(ENDS[ended], [], [])
            waiting = Submission(show="idle", topic="elsewhere", layers=(LayerSpec(task="noop"),))
            await farm.submitter.submit([waiting] * BATCH)
            layers = await session.fetchval(FIRST_LAYERS)
            async with session.transaction():
                before = await session.fetchval(READ_HERE)
                assert await session.fetchval(ENDS[ended], layers, [1] * len(layers)) == len(layers)
                assert await session.fetchval(READ_HERE) - before < 10 * len(layers)
        finally:
            await session.close()
