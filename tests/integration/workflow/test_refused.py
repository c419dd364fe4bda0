"""A run that cannot be read, submitted or written fails alone and does not block other runs."""

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
async def test_step_error_may_contain_any_text(room, error):
    bad = await room.start(StepSpec(id="a", task="noop"))
    good = await room.start()
    await room.end("a", "FAILED", code="fatal", error=error, run=bad)
    await room.end("a", run=good)
    await room.advance()
    assert (await room.looking.get(bad)).error == f"Step a: {error}"
    assert error in [moment.happened.why for moment in await room.looking.timeline(bad)]
    assert (await room.states(good))[""] == "SUCCEEDED"


async def test_cancel_reason_may_contain_any_text(room):
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


async def test_unreadable_result_fails_only_its_run(room):
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


async def test_nested_workflow_handles_a_refused_step(room):
    await room.declare(StepSpec(id="x", type="notify", notify="hello"), name="mender")
    run = await room.start(
        StepSpec(id="a", task="noop", on_error="mend"),
        StepSpec(id="mend", type="workflow", workflow="mender"),
        folder="nowhere",
    )
    await room.advance()
    states = await room.states(run)
    assert (states["a"], states["mend"], states[""]) == ("FAILED", "SUCCEEDED", "SUCCEEDED")


async def test_due_timer_of_a_locked_run_is_not_polled_continuously(room):
    run = await room.start(StepSpec(id="wait", type="delay", delay_sec=60))
    await room.pass_time(61)
    async with room.database.transaction() as tx:
        await tx.row(LOCK, run)
        assert await room.advancer._advance_pending(woken=False) >= 0.05
    await room.advance()
    assert (await room.states(run))[""] == "SUCCEEDED"
