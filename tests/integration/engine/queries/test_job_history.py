"""Histories of jobs: what their other columns imply is not stored, and shown as before."""

import json

import pytest

from rota.engine.queries.jobs import JobQueries
from rota.engine.submission.submitter import Submitter
from rota.model.jobs.submission import LayerSpec, Submission
from tests.support.jobs import NO_EVENTS, a_show
from tests.support.queue import sql

MARK = sql("""
UPDATE rota.job SET state = $2, history = rota.history_add(history, $2, NULL) WHERE pk_job = $1::uuid""")
SUCCEED = sql("""
SELECT rota.jobs_succeed(array_agg(pk_layer), array_agg(1)) FROM rota.layer WHERE pk_job = $1::uuid""")
STORED = sql("SELECT history FROM rota.job_done WHERE pk_job = $1::uuid")
SHOWN = sql("SELECT rota.job_history_shown($1::jsonb, $2, to_timestamp(1.0015), to_timestamp($3::float8))")
BEGUN = [["PENDING", 1001, None], ["SCHEDULED", 1001, None]]
REJECTED = [["PENDING", 5, "policy_pending"], ["CANCELLED", 7, "cancelled"]]


@pytest.fixture
async def job(database):
    await a_show(database)
    submission = Submission(show="film", topic="default", layers=(LayerSpec(task="noop"),))
    [submitted] = await Submitter(database, NO_EVENTS).submit([submission])
    return submitted.job


async def succeed(database, job, *marks):
    """Its stored history, and the states as they are shown."""
    for state in marks:
        await database.run(MARK, job, state)
    await database.run(SUCCEED, job)
    view = await JobQueries(database).get(job)
    assert [entry.at for entry in view.history] == sorted(entry.at for entry in view.history)
    return json.loads(await database.value(STORED, job)), [entry.state for entry in view.history]


async def test_job_that_ends_unmarked_stores_no_history_and_shows_all_of_it(database, job):
    stored, states = await succeed(database, job)
    assert stored == []
    assert states == ["PENDING", "SCHEDULED", "DISPATCHED", "SUCCEEDED"]


@pytest.mark.parametrize("marks", [("DISPATCHED",), ("DISPATCHED", "RUNNING"), ("DISPATCHED", "SCHEDULED")])
async def test_job_that_was_marked_stores_the_states_after_its_submission(database, job, marks):
    stored, states = await succeed(database, job, *marks)
    again = ("DISPATCHED",) if marks[-1] == "SCHEDULED" else ()
    assert [state for state, *_ in stored] == [*marks, *again, "SUCCEEDED"]
    assert states == ["PENDING", "SCHEDULED", *marks, *again, "SUCCEEDED"]


@pytest.mark.parametrize(
    ("stored", "state", "finished_s", "shown"),
    [
        ([], "SCHEDULED", None, BEGUN),
        ([["DISPATCHED", 9, None]], "DISPATCHED", None, [*BEGUN, ["DISPATCHED", 9, None]]),
        ([["CANCELLED", 9, "cancelled"]], "CANCELLED", 2, [*BEGUN, ["CANCELLED", 9, "cancelled"]]),
        ([], "SUCCEEDED", 2, [*BEGUN, ["DISPATCHED", 2000, None], ["SUCCEEDED", 2000, None]]),
        (REJECTED, "CANCELLED", 2, REJECTED),
        ([*BEGUN, ["FAILED", 8, None]], "FAILED", 2, [*BEGUN, ["FAILED", 8, None]]),
    ],
)
async def test_history_that_begins_with_pending_is_shown_as_it_is_stored(database, stored, state, finished_s, shown):
    """So are those that earlier versions wrote."""
    assert json.loads(await database.value(SHOWN, json.dumps(stored), state, finished_s)) == shown
