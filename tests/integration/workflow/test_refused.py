"""A run that cannot be read, submitted or written fails alone and does not block other runs."""

import pytest

from rota.model.jobs.submission import Compensation
from rota.model.workflows.spec import StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import INBOX_SIZE, WorkflowHarness

GARBLE = sql("UPDATE rota.frame_end SET value = '\\xc1'::bytea WHERE value IS NOT NULL")
LOCK = sql("SELECT FROM rota.workflow_run WHERE pk_run = $1::uuid FOR UPDATE")
UNDO = Compensation(topic="undo", task="undo")


@pytest.fixture
async def harness(database):
    await a_show(database)
    return WorkflowHarness(database)


@pytest.mark.parametrize("error", ["unsupported: \\u0000 cannot be converted to text", "\\u0000", "\\\\u0000 x"])
async def test_step_error_may_contain_any_text(harness, error):
    bad = await harness.start(StepSpec(id="a", task="noop"))
    good = await harness.start()
    await harness.end("a", "FAILED", code="fatal", error=error, run=bad)
    await harness.end("a", run=good)
    await harness.advance()
    assert (await harness.queries.get(bad)).error == f"Step a: {error}"
    assert error in [moment.happened.why for moment in await harness.queries.timeline(bad)]
    assert (await harness.states(good))[""] == "SUCCEEDED"


async def test_cancel_reason_may_contain_any_text(harness):
    run = await harness.start(
        StepSpec(id="a", task="noop", compensate=UNDO),
        StepSpec(id="b", task="noop", depends_on=("a",)),
        rollback_on=frozenset({"cancelled"}),
    )
    await harness.end("a")
    await harness.advance()
    await harness.commands.cancel(run, "ann", "because \0 of it")
    await harness.end("b", "CANCELLED")
    await harness.advance()
    assert (await harness.states(run))[""] == "COMPENSATING"
    assert (await harness.queries.get(run)).error == "because  of it"


async def test_unreadable_result_fails_only_its_run(harness):
    bad = await harness.start(StepSpec(id="a", task="noop"))
    good = await harness.start()
    await harness.end("a", value=1, run=bad)
    await harness.database.run(GARBLE)
    await harness.end("a", value=1, run=good)
    await harness.advance()
    assert (await harness.states(bad))[""] == "FAILED"
    assert "internal error" in (await harness.queries.get(bad)).error
    assert (await harness.states(good))[""] == "SUCCEEDED"
    assert await harness.database.value(INBOX_SIZE) == 0


async def test_nested_workflow_handles_a_refused_step(harness):
    await harness.declare(StepSpec(id="x", type="notify", notify="hello"), name="mender")
    run = await harness.start(
        StepSpec(id="a", task="noop", on_error="mend"),
        StepSpec(id="mend", type="workflow", workflow="mender"),
        folder="nowhere",
    )
    await harness.advance()
    states = await harness.states(run)
    assert (states["a"], states["mend"], states[""]) == ("FAILED", "SUCCEEDED", "SUCCEEDED")


async def test_due_timer_of_a_locked_run_is_not_polled_continuously(harness):
    run = await harness.start(StepSpec(id="wait", type="delay", delay_sec=60))
    await harness.pass_time(61)
    async with harness.database.transaction() as tx:
        await tx.row(LOCK, run)
        assert await harness.advancer._advance_pending(woken=False) >= 0.05
    await harness.advance()
    assert (await harness.states(run))[""] == "SUCCEEDED"
