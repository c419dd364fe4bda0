"""A rerun takes over compensations exclusively, and failures handled before it are not repeated."""

import asyncio

import pytest

from rota.model.errors import Refused
from rota.model.jobs.submission import Compensation
from rota.model.workflows.spec import LoopSpec, StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import WorkflowHarness

OWNERS = sql("SELECT s.workflow_id, e.step FROM rota.saga_entry e JOIN rota.saga s USING (pk_saga) ORDER BY e.number")
UNDO = Compensation(topic="undo", task="undo")


@pytest.fixture
async def harness(database):
    await a_show(database)
    return WorkflowHarness(database)


async def owners(harness):
    return [row["workflow_id"] for row in await harness.database.rows(OWNERS)]


async def failed_run(harness, **more):
    """A run that failed in its last step and has a compensation to run."""
    run = await harness.start(
        StepSpec(id="a", task="noop", compensate=UNDO, **more), StepSpec(id="b", task="noop", depends_on=("a",))
    )
    while (await harness.states(run))["a"] != "SUCCEEDED":
        await harness.end("a", run=run)
        await harness.advance()
    await harness.end("b", "FAILED", run=run)
    await harness.advance()
    return run


async def test_compensations_taken_over_by_an_active_rerun_are_not_taken_again(harness):
    run = await failed_run(harness)
    tried = await asyncio.gather(*(harness.commands.rerun(run, "b", "ann") for _ in range(3)), return_exceptions=True)
    [again] = [each.run for each in tried if not isinstance(each, Refused)]
    assert await owners(harness) == [str(again)]
    await harness.end("b", "FAILED", run=again)
    await harness.advance()
    third = (await harness.commands.rerun(run, "b", "ann")).run
    assert await owners(harness) == [str(third)]


async def test_nested_run_compensations_belong_to_the_active_outer_run(harness):
    await harness.declare(
        StepSpec(id="a", task="noop", compensate=UNDO),
        StepSpec(id="b", task="noop", depends_on=("a",)),
        name="inner",
    )
    outer = await harness.start(
        StepSpec(id="sub", type="workflow", workflow="inner", on_error="mend"), StepSpec(id="mend", task="noop")
    )
    inner = await harness.job("sub")
    await harness.end("a", run=inner)
    await harness.advance()
    await harness.end("b", "FAILED", run=inner)
    await harness.advance()
    with pytest.raises(Refused, match="is live and owns"):
        await harness.commands.rerun(inner, "b", "ann")
    assert await owners(harness) == [str(outer)]


async def test_every_loop_round_is_taken_over_by_a_rerun(harness):
    run = await failed_run(harness, loop=LoopSpec(most=3))
    again = (await harness.commands.rerun(run, "b", "ann")).run
    assert await owners(harness) == [str(again)] * 3


async def test_handled_step_failure_is_not_repeated_by_a_rerun(harness):
    run = await harness.start(
        StepSpec(id="a", task="noop", on_error="mend"),
        StepSpec(id="mend", task="noop", on_error="last"),
        StepSpec(id="last", task="noop"),
        StepSpec(id="b", task="noop", depends_on=("a",)),
    )
    for step, state in (("a", "FAILED"), ("mend", "FAILED"), ("last", "SUCCEEDED"), ("b", "FAILED")):
        await harness.end(step, state, run=run)
        await harness.advance()
    again = (await harness.commands.rerun(run, "b", "ann")).run
    assert await harness.jobs(again) == ["b"]
    await harness.end("b", run=again)
    await harness.advance()
    assert (await harness.states(again))[""] == "SUCCEEDED"
