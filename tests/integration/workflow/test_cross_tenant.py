"""Any show may submit jobs that name a run as their workflow; jobs of another show take no part in the run."""

import pytest

from rota.engine.submission.submitter import Submitter
from rota.model.jobs.submission import Compensation, LayerSpec, Submission
from rota.model.workflows.spec import StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import Room, end_job

COMPENSATIONS = sql(
    "SELECT pk_job, str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true' ORDER BY str_name"
)
UNDO = Compensation(topic="undo", task="undo")


@pytest.fixture
async def room(database):
    await a_show(database)
    await a_show(database, "other", depts=())
    return Room(database)


async def finish_foreign_job(room, run, state="SUCCEEDED", **more):
    """Submit and end a job of another show that names the run."""
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


async def running_compensations(room):
    return {row["str_name"]: row["pk_job"] for row in await room.database.rows(COMPENSATIONS)}


async def test_run_does_not_compensate_jobs_of_another_show(room):
    run = await room.start(StepSpec(id="a", task="noop"))
    await finish_foreign_job(room, run)
    await room.end("a", "FAILED", code="fatal")
    await room.advance()
    assert (await room.states(run))[""] == "FAILED"
    assert await running_compensations(room) == {}


async def test_compensating_run_ends_only_when_its_own_work_is_undone(room):
    run = await room.start(
        StepSpec(id="a", task="noop", compensate=UNDO), StepSpec(id="b", task="noop", depends_on=("a",))
    )
    await room.end("a")
    await room.advance()
    await room.end("b", "FAILED", code="fatal")
    await room.advance()
    await finish_foreign_job(room, run)
    await finish_foreign_job(room, run, "FAILED", code="fatal")
    running = await running_compensations(room)
    assert set(running) == {"undo flow.a", "undo strange"}

    await end_job(room.database, running["undo strange"])
    await room.advance()
    assert (await room.states(run))[""] == "COMPENSATING"
    await end_job(room.database, running["undo flow.a"])
    await room.advance()
    assert (await room.states(run))[""] == "FAILED"
