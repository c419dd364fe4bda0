"""Anybody may submit jobs that name a run as their workflow; those of another show have no part in it."""

import pytest

from rota.engine.submission.submitter import Submitter
from rota.model.jobs.submission import Compensation, LayerSpec, Submission
from rota.model.workflows.spec import StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import Room, end_job

UNDOING = sql("SELECT pk_job, str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true' ORDER BY str_name")
UNDO = Compensation(topic="undo", task="undo")


@pytest.fixture
async def room(database):
    await a_show(database)
    await a_show(database, "other", depts=())
    return Room(database)


async def stranger(room, run, state="SUCCEEDED", **more):
    """A job of another show that names the run, and has ended."""
    [made] = await Submitter(room.database).submit(
        [
            Submission(
                show="other",
                name="strange",
                workflow_id=str(run),
                compensation=UNDO,
                layers=(LayerSpec(task="noop"),),
            )
        ]
    )
    await end_job(room.database, made.job, state, **more)
    await room.advance()


async def undoing(room):
    return {row["str_name"]: row["pk_job"] for row in await room.database.rows(UNDOING)}


async def test_a_run_undoes_nothing_that_another_show_did(room):
    run = await room.start(StepSpec(id="a", task="noop"))
    await stranger(room, run)
    await room.end("a", "FAILED", code="fatal")
    await room.advance()
    assert (await room.states(run))[""] == "FAILED"
    assert await undoing(room) == {}


async def test_a_run_that_undoes_goes_on_until_its_own_work_is_undone(room):
    run = await room.start(
        StepSpec(id="a", task="noop", compensate=UNDO), StepSpec(id="b", task="noop", depends_on=("a",))
    )
    await room.end("a")
    await room.advance()
    await room.end("b", "FAILED", code="fatal")
    await room.advance()
    await stranger(room, run)
    await stranger(room, run, "FAILED", code="fatal")
    running = await undoing(room)
    assert set(running) == {"undo flow.a", "undo strange"}

    await end_job(room.database, running["undo strange"])
    await room.advance()
    assert (await room.states(run))[""] == "COMPENSATING"
    await end_job(room.database, running["undo flow.a"])
    await room.advance()
    assert (await room.states(run))[""] == "FAILED"
