"""Retention by day partitions: created ahead, dropped whole, nothing still needed is lost, no session is blocked."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import uuid4

import asyncpg
import msgspec
import pytest

from rota.engine.recovery.retention import DAYS_AHEAD, JOBS, LEASE, OLDEST_JOB, TABLES, RetentionMaintenance
from rota.engine.submission.submitter import RECEIVED, Submitter
from rota.infra import failpoints
from rota.infra.blob_store import BlobStore
from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.model.errors import BlobMissing, PostgresBusy, StaleFence
from rota.model.jobs.submission import decode_details
from rota.model.settings.lifecycle import RetentionSettings
from tests.integration.engine import engine_client
from tests.support.jobs import NO_EVENTS, a_show, task
from tests.support.leader_steps import run_steps
from tests.support.queue import sessions_over, sql
from tests.support.waiting import until

pytestmark = pytest.mark.no_days
DAYS = sql("SELECT name, day, since, until FROM rota.days_of($1) ORDER BY since")
ADD_END = sql("""
INSERT INTO rota.frame_end (pk_layer, frame, attempt, token, state, ts_finished)
VALUES ($1, $2::integer, 1, $2::integer, 'FAILED', $3)""")
ENDS = sql("SELECT pk_layer, frame, ts_finished, ts_ended, tableoid::regclass::text AS part FROM rota.frame_end")
ADD_JOB = sql("""
INSERT INTO rota.job (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state)
VALUES ($1, $1, $1, $1, 'x', 't', 5, 'SCHEDULED')""")
ADD_LAYER = sql("""
INSERT INTO rota.layer (pk_layer, pk_job, number, str_name, queue, work, frames) VALUES ($1, $2, 0, 'l', 'q', '', 1)""")
ADD_DONE = sql("""
INSERT INTO rota.job_done (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, ts_submitted,
                           ts_finished, history, layers)
SELECT $1, $1, $1, $1, 'x', 't', 5, 'FAILED', $2, $3, '[]', ARRAY[
  ROW($4::uuid, $1, 0, 'l', 'q', '', NULL, $5::text, 0, 1, NULL, NULL, false, 1, 0, 0, 1, 0, 0, 0, 0)::rota.layer]""")
JOB_OF = sql("""
SELECT pk_job FROM rota.layer WHERE pk_layer = $1
UNION ALL SELECT d.pk_job FROM rota.job_done d WHERE d.layers[1].pk_layer = $1""")
ADD_JOB_CAP = sql("INSERT INTO rota.job_resource (pk_job, pk_show, int_max_cores, int_cores) VALUES ($1, $2, 100, $3)")
ADD_LAYER_CAP = sql("""
INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show, int_max_gpus, int_cores) VALUES ($1, $2, $3, 2, $4)""")
ADD_PROC = sql("""
INSERT INTO rota.proc (token, pk_show, pk_alloc, pk_folder, pk_job, pk_layer, pk_dept, pk_host, int_cores_reserved,
                       int_gpus_reserved, int_fence)
VALUES (7, $1, $1, $1, $2, $3, $1, $1, 100, 0, 1)""")
DONE = sql("SELECT pk_job, tableoid::regclass::text AS part FROM rota.job_done ORDER BY ts_finished")
WAITS = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() WHERE name = $1")

NAMES = ("live", "overnight", "over", "result", "artifact", "unreferenced")
TODAY = datetime(2031, 5, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
async def retention(database):
    return RetentionMaintenance(database, Leases(database))


@pytest.fixture
async def lease(retention):
    [lease] = (await retention.leases.acquire([LEASE], kind="upkeep", ttl_s=60.0)).granted
    return lease


@pytest.fixture
async def other(database_url):
    """Another database session."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def a_live_layer(database):
    job, layer = uuid4(), uuid4()
    await database.run(ADD_JOB, job)
    await database.run(ADD_LAYER, layer, job)
    return layer


async def a_done_layer(database, submitted, finished, pointer=None):
    job, layer = uuid4(), uuid4()
    await database.run(ADD_DONE, job, submitted, finished, layer, pointer)
    return layer


async def parts_of_ends(database):
    return {row["frame"]: row["part"] for row in await database.rows(ENDS)}


async def test_partitions_are_created_ahead_and_once(retention, lease, database):
    assert await retention.make_days(lease, now=TODAY) == len(TABLES) * (DAYS_AHEAD + 1)
    for table in TABLES:
        days = await database.rows(DAYS, table)
        assert [row["day"] for row in days] == [(TODAY + n * DAY).date() for n in range(DAYS_AHEAD + 1)]
        assert all(one["until"] == two["since"] for one, two in pairwise(days))
    assert await retention.make_days(lease, now=TODAY) == 0
    assert await retention.make_days(lease, now=TODAY + DAY) == len(TABLES)


async def test_rows_go_to_their_day_partition_in_any_session_time_zone(retention, lease, database, other):
    await other.execute("SET timezone = 'Pacific/Auckland'")
    await other.execute("SELECT rota.day_make('frame_end', '2031-05-20', 10)")
    midnight = datetime(2031, 5, 20, tzinfo=UTC)
    for frame, at in enumerate((midnight, midnight + DAY - timedelta(microseconds=1), midnight + DAY)):
        await database.run(ADD_END, uuid4(), frame, at)
    assert await parts_of_ends(database) == {
        0: "frame_end_20310520",
        1: "frame_end_20310520",
        2: "frame_end_default",
    }


async def test_rows_in_the_default_partition_move_to_their_day_in_bounded_batches(retention, lease, database):
    for frame in range(10):
        # Three rows of one instant, more than a batch.
        await database.run(ADD_END, uuid4(), frame, TODAY + timedelta(minutes=max(frame, 3)))
    await database.run(ADD_END, uuid4(), 99, TODAY - 40 * DAY)
    await retention.make_days(lease, now=TODAY, batch=2)
    parts = await parts_of_ends(database)
    assert sorted(parts) == [*range(10), 99]
    assert parts[99] == "frame_end_20310410"
    assert "frame_end_default" not in parts.values()
    of_today = [row for row in await database.rows(DAYS, "frame_end") if row["day"] == TODAY.date()]
    assert len(of_today) > 3
    assert (of_today[0]["since"], of_today[-1]["until"]) == (
        datetime(2031, 5, 20, tzinfo=UTC),
        datetime(2031, 5, 21, tzinfo=UTC),
    )
    assert all(one["until"] == two["since"] for one, two in pairwise(of_today))
    assert await retention.make_days(lease, now=TODAY) == 0


async def test_reader_during_a_partition_move_sees_every_row(database, other):
    for frame in range(5):
        await database.run(ADD_END, uuid4(), frame, TODAY + timedelta(seconds=frame))
    async with database.transaction() as tx:
        assert await tx.value(sql("SELECT rota.day_make('frame_end', '2031-05-20', 100)")) == "made"
        reading = asyncio.create_task(other.fetchval("SELECT count(*) FROM rota.frame_end"))
        await until(lambda: database.value(WAITS), what="the reader to wait")
    assert await reading == 5


async def test_writer_during_partition_creation_writes_to_the_new_partition(database, other):
    """A writer that had chosen the default partition earlier would fail: that partition no longer accepts its row."""
    now = datetime.now(UTC)
    async with database.transaction() as tx:
        assert await tx.value(sql("SELECT rota.day_make('frame_end', $1::date, 100)"), now.date()) == "made"
        writing = asyncio.create_task(other.execute(ADD_END.text, uuid4(), 1, now))
        await until(lambda: database.value(WAITS), what="the writer to wait")
    await writing
    assert await parts_of_ends(database) == {1: f"frame_end_{now:%Y%m%d}"}


async def test_partition_creation_behind_a_lock_fails_fast_without_blocking_others(retention, lease, database, other):
    await retention.make_days(lease, now=TODAY)
    await other.execute("BEGIN; SELECT count(*) FROM rota.job_done")
    with pytest.raises(PostgresBusy, match="lock timeout"):
        async with asyncio.timeout(2.0):  # well below the lock timeout of the server
            await retention.make_days(lease, now=TODAY + DAY)
    await a_done_layer(database, TODAY, TODAY)
    assert len(await database.rows(DAYS, "job_done")) == DAYS_AHEAD + 1
    await other.execute("COMMIT")
    assert await retention.make_days(lease, now=TODAY + DAY) == len(TABLES)


async def test_step_blocked_by_a_lock_is_retried_soon(retention, lease, database, other):
    await other.execute("BEGIN; SELECT count(*) FROM rota.job_done")
    results = await run_steps(retention, lease)
    assert "make_days" not in results
    assert "forget_caps" in results, "the other steps run all the same"
    await other.execute("COMMIT")
    assert "make_days" in await run_steps(retention, lease)
    assert len(await database.rows(DAYS, "job_done")) == DAYS_AHEAD + 1


async def test_partition_past_retention_is_dropped_and_younger_ones_stay(retention, lease, database):
    for n in range(3):
        await a_done_layer(database, TODAY + n * DAY, TODAY + n * DAY)
    await retention.make_days(lease, now=TODAY)
    before = datetime(2031, 5, 22, tzinfo=UTC)
    assert await retention.drop_days(lease, before=before - timedelta(seconds=1)) == len(TABLES)
    assert [row["part"] for row in await database.rows(DONE)] == ["job_done_20310521", "job_done_20310522"]
    assert await retention.drop_days(lease, before=before) == len(TABLES)
    assert [row["part"] for row in await database.rows(DONE)] == ["job_done_20310522"]


async def test_every_partition_of_a_day_is_dropped(retention, lease, database):
    for frame in range(6):
        await database.run(ADD_END, uuid4(), frame, TODAY + timedelta(minutes=frame))
    await retention.make_days(lease, now=TODAY, batch=2)
    await retention.drop_days(lease, before=TODAY + DAY)
    assert await parts_of_ends(database) == {}


async def test_frame_ends_of_live_jobs_are_carried_over_before_their_partition_is_dropped(retention, lease, database):
    live = [await a_live_layer(database) for _ in range(5)]
    for frame, layer in enumerate(live):
        await database.run(ADD_END, layer, frame, TODAY)
    await database.run(ADD_END, uuid4(), 77, TODAY)
    await retention.make_days(lease, now=TODAY)
    await retention.drop_days(lease, before=TODAY + DAY, batch=2)
    rows = await database.rows(ENDS)
    assert {row["pk_layer"] for row in rows} == set(live)
    assert {row["ts_ended"] for row in rows} == {TODAY}
    assert all(abs(row["ts_finished"] - datetime.now(UTC)) < timedelta(minutes=5) for row in rows)


async def test_second_carry_over_keeps_the_original_end_time(retention, lease, database):
    layer = await a_live_layer(database)
    await database.run(ADD_END, layer, 1, TODAY - 400 * DAY)
    await retention.make_days(lease, now=TODAY)
    await retention.drop_days(lease, before=TODAY - 300 * DAY)
    await retention.make_days(lease)
    await retention.drop_days(lease, before=datetime.now(UTC) + 2 * DAY)
    [row] = await database.rows(ENDS)
    assert (row["pk_layer"], row["ts_ended"]) == (layer, TODAY - 400 * DAY)


async def test_frame_ends_of_a_job_that_finished_later_are_dropped_with_the_job(retention, lease, database):
    finished = TODAY + 5 * DAY
    overnight = await a_done_layer(database, TODAY, finished)
    same_day = await a_done_layer(database, TODAY, TODAY + timedelta(hours=1))
    await database.run(ADD_END, overnight, 1, TODAY)
    await database.run(ADD_END, same_day, 2, TODAY)
    await retention.make_days(lease, now=TODAY)
    await retention.drop_days(lease, before=TODAY + DAY)
    [row] = await database.rows(ENDS)
    assert (row["pk_layer"], row["ts_finished"], row["part"]) == (overnight, finished, "frame_end_20310525")
    await retention.drop_days(lease, before=TODAY + 6 * DAY)
    assert await database.rows(ENDS) == []
    assert await database.rows(DONE) == []


async def test_reviewed_outputs_are_deleted_after_their_jobs_ended(retention, lease, database):
    live, gone = uuid4(), uuid4()
    await database.run(ADD_JOB, live)
    add = sql(
        "INSERT INTO rota.output (token, pk_layer, frame, pk_job, pk_show, state, severity, meta, ts_ended, ts_decided)"
        " VALUES ($1, $3, 0, $2, $3, 'quarantined', 'high', '', now(), $4)"
    )
    for token, job, when in ((1, live, TODAY), (2, gone, TODAY), (3, gone, TODAY), (4, gone, TODAY + DAY)):
        await database.run(add, token, job, uuid4(), when)
    assert await retention.forget_outputs(lease, before=TODAY + timedelta(seconds=1), batch=1) == 2
    left = await database.rows(sql("SELECT token FROM rota.output ORDER BY token"))
    assert [row["token"] for row in left] == [1, 4]


async def test_old_idempotency_keys_of_ended_jobs_are_deleted_in_batches(retention, lease, database):
    live = uuid4()
    await database.run(ADD_JOB, live)
    add = sql("INSERT INTO rota.idempotency_key VALUES ($1, $2, $3, '', $4)")
    for number in range(7):
        await database.run(add, uuid4(), f"old{number}", uuid4(), TODAY)
    await database.run(add, uuid4(), "of a live job", live, TODAY)
    await database.run(add, uuid4(), "young", uuid4(), TODAY + DAY)
    assert await retention.forget_keys(lease, before=TODAY + timedelta(seconds=1), batch=3) == 7
    left = await database.rows(sql("SELECT key FROM rota.idempotency_key ORDER BY key"))
    assert [row["key"] for row in left] == ["of a live job", "young"]


async def test_workers_gone_for_long_are_deleted_unless_they_hold_bookings(retention, lease, database):
    add = sql("INSERT INTO rota.worker VALUES ($1, $2, 'p', $1, $3, '', $4, $4)")
    hosts = {name: uuid4() for name in ("gone", "lost", "up", "young", "booked")}
    for name, host in hosts.items():
        at = TODAY + DAY if name == "young" else TODAY
        await database.run(add, host, name, name if name in ("lost", "up") else "gone", at)
    book = sql("INSERT INTO rota.proc VALUES (1, $1, $1, $1, $1, $1, $1, $1, 0, 0, 0)")
    await database.run(book, hosts["booked"])
    assert await retention.forget_workers(lease, before=TODAY + timedelta(seconds=1), batch=1) == 2
    left = await database.rows(sql("SELECT str_name FROM rota.worker ORDER BY 1"))
    assert [row["str_name"] for row in left] == ["booked", "up", "young"]
    await database.run(sql("DELETE FROM rota.proc"))


async def test_leader_that_lost_its_lease_changes_nothing(retention, lease, database):
    await a_done_layer(database, TODAY, TODAY)
    await retention.make_days(lease, now=TODAY)
    await database.run(EXPIRE, LEASE)
    for step in (
        retention.make_days(lease, now=TODAY + DAY),
        retention.drop_days(lease, before=TODAY + 3 * DAY),
        retention.forget_keys(lease),
        retention.forget_workers(lease),
        retention.forget_approvals(lease),
        retention.forget_caps(lease),
    ):
        with pytest.raises(StaleFence):
            await step
    assert len(await database.rows(DONE)) == 1
    assert len(await database.rows(DAYS, "job_done")) == DAYS_AHEAD + 1


CRASHES = {
    "upkeep.after_day_made_before_commit:1": 1,
    "upkeep.after_day_made_before_commit:9": 1,  # the day whose rows come from the default partition
    "upkeep.after_drop_before_commit:1": 1,
    "upkeep.after_carry_before_commit:1": 0,
    "upkeep.after_drop_before_commit:2": 0,
}
"""Failpoint -> finished jobs left after the crash; finished jobs are dropped first."""


@pytest.mark.parametrize("failpoint", CRASHES)
async def test_crash_between_steps_loses_no_row_and_the_next_run_completes(database, database_url, spawn, failpoint):
    live = await a_live_layer(database)
    await database.run(ADD_END, live, 1, TODAY)
    await database.run(ADD_END, uuid4(), 77, TODAY)
    await a_done_layer(database, TODAY, TODAY)
    first = await spawn(
        "tests.integration.engine.engine_client", "days", TODAY, env={"URL": database_url, "CRASH_AT": failpoint}
    )
    assert await first.wait() == failpoints.CRASH_EXIT_STATUS, await first.errors()
    await sessions_over(database)
    assert sorted(row["frame"] for row in await database.rows(ENDS)) == [1, 77]
    assert len(await database.rows(DONE)) == CRASHES[failpoint]
    await engine_client.days(database, str(TODAY))
    assert [row["pk_layer"] for row in await database.rows(ENDS)] == [live]
    assert await database.rows(DONE) == []
    for table in TABLES:
        made = {row["day"] for row in await database.rows(DAYS, table)}
        assert TODAY.date() not in made
        assert (TODAY + DAYS_AHEAD * DAY).date() in made


async def test_retention_service_creates_partitions_at_startup_and_drops_old_ones(database):
    now = await database.value(sql("SELECT now()"))
    for days in (0, 3):
        await a_done_layer(database, now - days * DAY, now - days * DAY)
    retention = RetentionMaintenance(database, Leases(database), RetentionSettings(finished_jobs=86400.0))
    supervisor = Supervisor(drain_budget_s=2.0)
    supervisor.add(Service("upkeep", retention.run))
    async with supervisor.running():

        async def one_day_left():
            return [row["part"] for row in await database.rows(DONE)] == [f"job_done_{now:%Y%m%d}"]

        await until(one_day_left, what="one partition kept and one dropped")


async def a_capped_job(database, show, *, done=True, booked=False, counted=0):
    """A job and its layer with caps; `done=None`: a job that the engine does not know."""
    if done is None:
        job, layer = uuid4(), uuid4()
    else:
        layer = await (a_done_layer(database, TODAY, TODAY) if done else a_live_layer(database))
        job = await database.value(JOB_OF, layer)
    await database.run(ADD_JOB_CAP, job, show, counted)
    await database.run(ADD_LAYER_CAP, layer, job, show, counted)
    if booked:
        await database.run(ADD_PROC, show, job, layer)
    return job


async def test_caps_are_deleted_after_their_job_ended_unless_booked_or_counted(retention, lease, database):
    await a_show(database)
    show = await database.value(sql("SELECT pk_show FROM rota.show"))
    ended = {await a_capped_job(database, show) for _ in range(5)}
    stay = {
        await a_capped_job(database, show, done=False),
        await a_capped_job(database, show, done=None),
        await a_capped_job(database, show, booked=True),
        await a_capped_job(database, show, counted=100),
    }
    assert await retention.forget_caps(lease, batch=2) == len(ended)
    for table in ("job_resource", "layer_resource"):
        rows = await database.rows(sql(f"SELECT pk_job FROM rota.{table}"))
        assert {row["pk_job"] for row in rows} == stay
    assert await retention.forget_caps(lease, batch=2) == 0
    await database.run(sql("DELETE FROM rota.proc"))
    await database.run(sql("UPDATE rota.job_resource SET int_cores = 0"))
    assert await retention.forget_caps(lease) == 2, "one layer still has usage"
    assert len(await database.rows(sql("SELECT FROM rota.layer_resource"))) == 3


async def test_crash_while_deleting_caps_deletes_none(retention, lease, database, database_url, spawn):
    await a_show(database)
    await a_capped_job(database, await database.value(sql("SELECT pk_show FROM rota.show")))
    env = {"URL": database_url, "CRASH_AT": "upkeep.after_caps_before_commit"}
    first = await spawn("tests.integration.engine.engine_client", "caps", "", env=env)
    assert await first.wait() == failpoints.CRASH_EXIT_STATUS, await first.errors()
    await sessions_over(database)
    assert await retention.forget_caps(lease) == 1


async def test_job_that_counts_usage_while_its_caps_are_deleted_keeps_them(retention, lease, database, other):
    await a_show(database)
    job = await a_capped_job(database, await database.value(sql("SELECT pk_show FROM rota.show")))
    counting = other.transaction()
    await counting.start()
    await other.execute("UPDATE rota.job_resource SET int_cores = 100")
    forgetting = asyncio.create_task(retention.forget_caps(lease))
    await until(lambda: database.value(WAITS), what="the delete to wait for the lock")
    await counting.commit()
    await forgetting
    assert await database.value(sql("SELECT pk_job FROM rota.job_resource")) == job


async def test_blobs_are_deleted_when_no_retained_job_references_them(database):
    retention = RetentionMaintenance(database, Leases(database), store=BlobStore(database))
    now = await database.value(sql("SELECT now()"))
    pointers = dict(zip(NAMES, await BlobStore(database).put([name.encode() for name in NAMES]), strict=True))
    await database.run(sql("UPDATE rota.blob SET ts_put = now() - interval '40 days'"))
    point = sql("UPDATE rota.layer SET input_at = $2 WHERE pk_layer = $1")
    await database.run(point, await a_live_layer(database), pointers["live"])
    await a_done_layer(database, now - 41 * DAY, now - 2 * DAY, pointers["overnight"])
    await a_done_layer(database, now - 41 * DAY, now - 41 * DAY, pointers["over"])
    ended = sql(
        "INSERT INTO rota.frame_end VALUES ($1, 1, 1, 1, 'SUCCEEDED', NULL, $2, NULL, NULL, 0, NULL, $3, $4, $5)"
    )
    await database.run(
        ended,
        uuid4(),
        pointers["result"],
        ["/mnt/a.exr", f"{pointers['artifact']} out/a file.exr"],
        now,
        now - 40 * DAY,
    )
    await retention.tidy_store(None)
    kept = {bytes(row["data"]).decode() for row in await database.rows(sql("SELECT data FROM rota.blob"))}
    assert kept == {"live", "overnight", "result", "artifact"}


async def test_items_of_a_map_older_than_the_retention_are_kept_while_the_job_is_retained(database):
    await a_show(database)
    store, submitter = BlobStore(database), Submitter(database, NO_EVENTS)
    retention = RetentionMaintenance(database, Leases(database), store=store)
    jobs = {}
    for name in ("live", "overnight", "over"):
        [submitted] = await submitter.submit([task(layer={"items": [name]})])
        jobs[name] = submitted.job
    items_at = {}
    for name, job in jobs.items():
        request = await database.value(sql("SELECT request FROM rota.job WHERE pk_job = $1"), job)
        items_at[name] = decode_details(request).items_at
    end = sql("""
    WITH ended AS (DELETE FROM rota.job WHERE pk_job = $1 RETURNING *)
    INSERT INTO rota.job_done (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, request,
                               ts_submitted, ts_finished, history, layers)
    SELECT pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, 'SUCCEEDED', request,
           now() - interval '41 days', now() - $2::interval, '[]', '{}' FROM ended""")
    await database.run(end, jobs["overnight"], 2 * DAY)
    await database.run(end, jobs["over"], 41 * DAY)
    await database.run(sql("UPDATE rota.blob SET ts_put = now() - interval '40 days'"))
    await retention.tidy_store(None)
    for name in ("live", "overnight"):
        assert msgspec.msgpack.decode(await store.get(items_at[name]), type=list[list[bytes]])
    with pytest.raises(BlobMissing):
        await store.get(items_at["over"])


async def test_leader_measures_job_count_and_oldest_age_by_state(retention, lease, database):
    for _ in range(3):
        await a_live_layer(database)
    await database.run(sql("UPDATE rota.job SET ts_updated = now() - interval '100 s'"))
    await retention.measure(lease)
    assert (JOBS.labels("SCHEDULED")._value.get(), JOBS.labels("RUNNING")._value.get()) == (3, 0)
    assert 100 <= OLDEST_JOB.labels("SCHEDULED")._value.get() < 200
    await database.run(sql("DELETE FROM rota.job"))
    await retention.measure(lease)
    assert (JOBS.labels("SCHEDULED")._value.get(), OLDEST_JOB.labels("SCHEDULED")._value.get()) == (0, 0)


async def test_received_jobs_metric_counts_each_idempotency_key_once(database):
    await a_show(database)
    before = RECEIVED.labels("counted")._value.get()
    for _ in range(2):
        await Submitter(database, NO_EVENTS).submit([task(topic="counted", idempotency_key="k")])
    assert RECEIVED.labels("counted")._value.get() - before == 1
