"""Jobs of which no frame is booked are SCHEDULED again, wherever their frames went, and others are not; reasons are of
one list."""

import json
from itertools import pairwise

import asyncpg
import pytest

from rota import LayerSpec, Submission
from rota.engine.completion.job_ends import END_AS
from rota.engine.queries.jobs import JobFilter
from rota.engine.recovery import reconciler
from rota.engine.submission.submitter import Submitter
from rota.infra.postgres import query
from rota.model.job_states import JobState
from rota.model.jobs.submission import RetrySpec
from rota.model.reasons import Reason
from tests.support.harness.statements import count_statements
from tests.support.jobs import NO_EVENTS, a_show, task
from tests.support.leader_steps import run_steps
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

LIVE = sql("""
SELECT state, reason, rota.job_history_shown(history, state, ts_submitted, NULL) AS history FROM rota.job
WHERE pk_job = $1::uuid""")
SET_REASON = sql("UPDATE rota.job SET reason = $2::text WHERE pk_job = $1::uuid")
KNOWN_REASONS = sql("SELECT reason FROM unnest($1::text[]) AS reason WHERE rota.is_reason(reason)")
FORGET_STATE = sql("UPDATE rota.job SET state = 'SCHEDULED' WHERE pk_job = $1::uuid")
LOCK = sql("SELECT FROM rota.job WHERE pk_job = $1::uuid FOR UPDATE")
RUNNING_LONG = sql("""
UPDATE rota.job SET state = 'RUNNING', history = (
  SELECT jsonb_agg(jsonb_build_array(CASE i WHEN 1 THEN 'PENDING' ELSE 'RUNNING' END, i, NULL) ORDER BY i)
  FROM generate_series(1, 500) AS i)
WHERE pk_job = $1::uuid""")
RESCHEDULE = query("rota.engine.recovery", "jobs_reschedule")
RETRY_IN_A_MINUTE = RetrySpec(most=2, first_s=60.0)


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm


async def in_state(farm, job, state):
    """The history of a live job once it is in this state."""

    async def entries():
        row = await farm.database.row(LIVE, job)
        return [entry[0] for entry in json.loads(row["history"])] if row and row["state"] == state else None

    return await until(entries, what=f"the state {state} of job {job}")


@pytest.mark.parametrize("waits", [False, True])
async def test_tick_of_an_idle_farm_is_one_statement(farm, monkeypatch, waits):
    if waits:
        await farm.submit("noop")  # there is no worker
    statements = count_statements(farm.database, monkeypatch)
    recovery = farm.replica.engine.recovery
    recovery._pending_work = None
    await run_steps(recovery, None, "end_overdue", "reschedule_idle_jobs", "mark_booked_jobs")
    assert statements == [reconciler.PENDING_WORK.name]


async def test_job_is_running_until_its_last_booked_frame_has_ended_and_then_scheduled_until_its_retry(farm):
    await farm.worker()
    gate = hanging("x")
    layers = (
        LayerSpec(name="fails", task="boom", retries=RETRY_IN_A_MINUTE),
        LayerSpec(name="runs", task="hang", input={"args": ["x"], "kwargs": {}}),
    )
    [submitted] = await farm.submitter.submit([Submission(show="film", layers=layers)])
    await until(lambda: farm.ends(submitted.job), what="the failed attempt")
    await in_state(farm, submitted.job, "RUNNING")
    for _ in range(3):
        await farm.replica.engine.recovery.reschedule_idle_jobs()
    assert (await in_state(farm, submitted.job, "RUNNING"))[-1] == "RUNNING"
    gate.set()
    history = await in_state(farm, submitted.job, "SCHEDULED")
    assert history[-2:] == ["RUNNING", "SCHEDULED"]
    assert all(state != then for state, then in pairwise(history))
    listed = {state: (await farm.jobs.list(JobFilter(state=state))).items for state in JobState}
    assert {state: [each.id for each in found] for state, found in listed.items() if found} == {
        JobState.SCHEDULED: [submitted.job]
    }


async def test_job_of_a_stopped_worker_is_scheduled_and_then_running_again(farm):
    stop = await farm.worker()
    hanging("x")
    job = await farm.submit("hang", "x")
    await in_state(farm, job, "RUNNING")
    await stop()
    await in_state(farm, job, "SCHEDULED")
    await farm.worker("other")
    history = await in_state(farm, job, "RUNNING")
    assert history == ["PENDING", *["SCHEDULED", "DISPATCHED", "RUNNING"] * 2]


async def test_state_that_a_killed_server_did_not_write_is_written_by_the_leader(farm):
    """Neither DISPATCHED nor RUNNING was written: the server died within the debounce, and the message was lost."""
    await farm.worker()
    hanging("x")
    job = await farm.submit("hang", "x")
    await in_state(farm, job, "RUNNING")
    await farm.database.run(FORGET_STATE, job)
    history = await in_state(farm, job, "DISPATCHED")
    assert history[-1] == "DISPATCHED"


@pytest.fixture
async def job(database):
    """A job that is marked as running, of which no frame is booked."""
    await a_show(database)
    [submitted] = await Submitter(database, NO_EVENTS).submit([task()])
    await database.run(RUNNING_LONG, submitted.job)
    return submitted.job


async def test_one_look_decides_nothing(database, job):
    [idle] = await database.rows(RESCHEDULE, [])
    assert (idle["pk_job"], idle["topic"]) == (job, None)
    assert (await database.row(LIVE, job))["state"] == "RUNNING"


async def test_job_that_is_being_marked_is_left_alone(database, job):
    async with database.transaction() as tx:
        await tx.row(LOCK, job)
        assert [row["topic"] for row in await database.rows(RESCHEDULE, [job])] == [None]
    assert {row["topic"] for row in await database.rows(RESCHEDULE, [job])} == {None, "default"}


async def test_job_that_is_being_ended_keeps_its_state_and_reason(database, job):
    await database.run(END_AS, job, "CANCELLED", "cancelled")
    assert await database.rows(RESCHEDULE, [job]) == []
    assert (await database.row(LIVE, job))["reason"] == "cancelled"


async def test_history_of_a_job_that_goes_to_and_fro_is_bounded(database, job):
    await database.rows(RESCHEDULE, [job])
    history = json.loads((await database.row(LIVE, job))["history"])
    assert [at for _, at, _ in history[:-1]] == [*range(1, 21), *range(441, 501)]
    assert history[-1][0] == "SCHEDULED"


async def test_reason_of_a_job_is_one_of_the_list_or_is_refused(database, job):
    reasons = [reason.value for reason in Reason]
    rows = await database.rows(KNOWN_REASONS, [*reasons, "publish_failed", ""])
    assert [row["reason"] for row in rows] == reasons
    with pytest.raises(asyncpg.CheckViolationError, match="job_reason"):
        await database.run(SET_REASON, job, "publish_failed")
