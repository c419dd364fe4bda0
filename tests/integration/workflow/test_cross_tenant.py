"""Any show may submit jobs that name a run as their workflow; jobs of another show take no part in the run."""

import pytest

from rota.engine.submission.submitter import Submitter
from rota.model.jobs.submission import Compensation, LayerSpec, Submission
from rota.model.workflows.spec import StepSpec
from tests.support.jobs import NO_EVENTS, a_show
from tests.support.queue import sql
from tests.support.workflows import WorkflowHarness, end_job

COMPENSATIONS = sql(
    "SELECT pk_job, str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true' ORDER BY str_name"
)
UNDO = Compensation(topic="undo", task="undo")


@pytest.fixture
async def harness(database):
    await a_show(database)
    await a_show(database, "other", depts=())
    return WorkflowHarness(database)


async def finish_foreign_job(harness, run, state="SUCCEEDED", **more):
    """Submit and end a job of another show that names the run."""
    [made] = await Submitter(harness.database, NO_EVENTS).submit(
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
    await end_job(harness.database, made.job, state, **more)
    await harness.advance()


async def running_compensations(harness):
    return {row["str_name"]: row["pk_job"] for row in await harness.database.rows(COMPENSATIONS)}


async def test_run_does_not_compensate_jobs_of_another_show(harness):
    run = await harness.start(StepSpec(id="a", task="noop"))
    await finish_foreign_job(harness, run)
    await harness.end("a", "FAILED", code="fatal")
    await harness.advance()
    assert (await harness.states(run))[""] == "FAILED"
    assert await running_compensations(harness) == {}


async def test_compensating_run_ends_only_when_its_own_work_is_undone(harness):
    run = await harness.start(
        StepSpec(id="a", task="noop", compensate=UNDO), StepSpec(id="b", task="noop", depends_on=("a",))
    )
    await harness.end("a")
    await harness.advance()
    await harness.end("b", "FAILED", code="fatal")
    await harness.advance()
    await finish_foreign_job(harness, run)
    await finish_foreign_job(harness, run, "FAILED", code="fatal")
    running = await running_compensations(harness)
    assert set(running) == {"undo flow.a", "undo strange"}

    await end_job(harness.database, running["undo strange"])
    await harness.advance()
    assert (await harness.states(run))[""] == "COMPENSATING"
    await end_job(harness.database, running["undo flow.a"])
    await harness.advance()
    assert (await harness.states(run))[""] == "FAILED"
