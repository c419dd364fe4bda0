"""A rerun takes over compensations exclusively, and failures handled before it are not repeated."""

import asyncio

import pytest

from rota.model.errors import Refused
from rota.model.jobs.submission import Compensation
from rota.model.workflows.spec import LoopSpec, StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import Room

OWNERS = sql("SELECT s.workflow_id, e.step FROM rota.saga_entry e JOIN rota.saga s USING (pk_saga) ORDER BY e.number")
UNDO = Compensation(topic="undo", task="undo")


@pytest.fixture
async def room(database):
    await a_show(database)
    return Room(database)


async def owners(room):
    return [row["workflow_id"] for row in await room.database.rows(OWNERS)]


async def failed_run(room, **more):
    """A run that failed in its last step and has a compensation to run."""
    run = await room.start(
        StepSpec(id="a", task="noop", compensate=UNDO, **more), StepSpec(id="b", task="noop", depends_on=("a",))
    )
    while (await room.states(run))["a"] != "SUCCEEDED":
        await room.end("a", run=run)
        await room.advance()
    await room.end("b", "FAILED", run=run)
    await room.advance()
    return run


async def test_compensations_taken_over_by_an_active_rerun_are_not_taken_again(room):
    run = await failed_run(room)
    tried = await asyncio.gather(*(room.desk.rerun(run, "b", "ann") for _ in range(3)), return_exceptions=True)
    [again] = [each.run for each in tried if not isinstance(each, Refused)]
    assert await owners(room) == [str(again)]
    await room.end("b", "FAILED", run=again)
    await room.advance()
    third = (await room.desk.rerun(run, "b", "ann")).run
    assert await owners(room) == [str(third)]


async def test_nested_run_compensations_belong_to_the_active_outer_run(room):
    await room.declare(
        StepSpec(id="a", task="noop", compensate=UNDO),
        StepSpec(id="b", task="noop", depends_on=("a",)),
        name="inner",
    )
    outer = await room.start(
        StepSpec(id="sub", type="workflow", workflow="inner", on_error="mend"), StepSpec(id="mend", task="noop")
    )
    inner = await room.job("sub")
    await room.end("a", run=inner)
    await room.advance()
    await room.end("b", "FAILED", run=inner)
    await room.advance()
    with pytest.raises(Refused, match="is live and owns"):
        await room.desk.rerun(inner, "b", "ann")
    assert await owners(room) == [str(outer)]


async def test_every_loop_round_is_taken_over_by_a_rerun(room):
    run = await failed_run(room, loop=LoopSpec(most=3))
    again = (await room.desk.rerun(run, "b", "ann")).run
    assert await owners(room) == [str(again)] * 3


async def test_handled_step_failure_is_not_repeated_by_a_rerun(room):
    run = await room.start(
        StepSpec(id="a", task="noop", on_error="mend"),
        StepSpec(id="mend", task="noop", on_error="last"),
        StepSpec(id="last", task="noop"),
        StepSpec(id="b", task="noop", depends_on=("a",)),
    )
    for step, state in (("a", "FAILED"), ("mend", "FAILED"), ("last", "SUCCEEDED"), ("b", "FAILED")):
        await room.end(step, state, run=run)
        await room.advance()
    again = (await room.desk.rerun(run, "b", "ann")).run
    assert await room.jobs(again) == ["b"]
    await room.end("b", run=again)
    await room.advance()
    assert (await room.states(again))[""] == "SUCCEEDED"
