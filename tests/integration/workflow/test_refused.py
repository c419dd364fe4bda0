"""What cannot be read, submitted or written of one run is told of that run, and keeps no other from going on."""

import pytest

from rota.model.jobs.submission import Compensation
from rota.model.workflows.spec import StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import NEWS, Room

GARBLE = sql("UPDATE rota.frame_end SET value = '\\xc1'::bytea WHERE value IS NOT NULL")
LOCK = sql("SELECT FROM rota.workflow_run WHERE pk_run = $1::uuid FOR UPDATE")
UNDO = Compensation(topic="undo", task="undo")


@pytest.fixture
async def room(database):
    await a_show(database)
    return Room(database)


@pytest.mark.parametrize("error", ["unsupported: \\u0000 cannot be converted to text", "\\u0000", "\\\\u0000 x"])
async def test_an_error_may_say_anything(room, error):
    bad = await room.start(StepSpec(id="a", task="noop"))
    good = await room.start()
    await room.end("a", "FAILED", code="fatal", error=error, run=bad)
    await room.end("a", run=good)
    await room.advance()
    assert (await room.looking.get(bad)).error == f"Step a: {error}"
    assert error in [moment.happened.why for moment in await room.looking.timeline(bad)]
    assert (await room.states(good))[""] == "SUCCEEDED"


async def test_whoever_cancels_may_say_anything(room):
    run = await room.start(
        StepSpec(id="a", task="noop", compensate=UNDO),
        StepSpec(id="b", task="noop", depends_on=("a",)),
        rollback_on=frozenset({"cancelled"}),
    )
    await room.end("a")
    await room.advance()
    await room.desk.cancel(run, "ann", "because \0 of it")
    await room.end("b", "CANCELLED")
    await room.advance()
    assert (await room.states(run))[""] == "COMPENSATING"
    assert (await room.looking.get(run)).error == "because  of it"


async def test_a_run_that_cannot_be_advanced_fails_alone(room):
    bad = await room.start(StepSpec(id="a", task="noop"))
    good = await room.start()
    await room.end("a", value=1, run=bad)
    await room.database.run(GARBLE)
    await room.end("a", value=1, run=good)
    await room.advance()
    assert (await room.states(bad))[""] == "FAILED"
    assert "internal error" in (await room.looking.get(bad)).error
    assert (await room.states(good))[""] == "SUCCEEDED"
    assert await room.database.value(NEWS) == 0


async def test_a_workflow_mends_a_step_that_was_refused(room):
    await room.declare(StepSpec(id="x", type="notify", notify="hello"), name="mender")
    run = await room.start(
        StepSpec(id="a", task="noop", on_error="mend"),
        StepSpec(id="mend", type="workflow", workflow="mender"),
        folder="nowhere",
    )
    await room.advance()
    states = await room.states(run)
    assert (states["a"], states["mend"], states[""]) == ("FAILED", "SUCCEEDED", "SUCCEEDED")


async def test_a_timer_that_is_due_is_not_asked_for_all_the_time_while_somebody_else_is_at_its_run(room):
    run = await room.start(StepSpec(id="wait", type="delay", delay_sec=60))
    await room.pass_time(61)
    async with room.database.transaction() as tx:
        await tx.row(LOCK, run)
        assert await room.advancer._advance_pending(woken=False) >= 0.05
    await room.advance()
    assert (await room.states(run))[""] == "SUCCEEDED"
