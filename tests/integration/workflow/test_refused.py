"""A run that cannot be read, submitted or written fails alone and does not block other runs."""

import pytest

from rota.model.jobs.submission import Compensation
from rota.model.workflows.spec import ApprovalSpec, StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import INBOX_SIZE, WorkflowHarness

GARBLE = sql("UPDATE rota.frame_end SET value = '\\xc1'::bytea WHERE value IS NOT NULL")
LOCK = sql("SELECT FROM rota.workflow_run WHERE pk_run = $1::uuid FOR UPDATE")
ENDS_AS = sql("SELECT ends_as FROM rota.job WHERE pk_job = $1::uuid")
ENTRIES = sql("SELECT step, state FROM rota.saga_entry")
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


async def test_run_that_cannot_be_advanced_stops_its_jobs_and_ends_when_they_have_ended(harness):
    run = await harness.start(
        StepSpec(id="a", task="noop"),
        StepSpec(id="b", task="noop"),
        StepSpec(id="c", task="noop", depends_on=("a", "b")),
        StepSpec(id="wait", type="delay", delay_sec=60),
    )
    await harness.end("a", value=1)
    await harness.database.run(GARBLE)
    await harness.advance()
    steps = {"a": "FAILED", "b": "STOPPING", "c": "CANCELLED", "wait": "CANCELLED"}
    assert await harness.states() == {"": "RUNNING", **steps}
    assert await harness.database.value(ENDS_AS, await harness.job("b")) == "CANCELLED"
    assert await harness.timers() == []
    await harness.end("b", "CANCELLED")
    await harness.advance()
    assert (await harness.states())[""] == "FAILED"
    assert "internal error" in (await harness.queries.get(run)).error
    assert await harness.database.value(INBOX_SIZE) == 0


async def test_run_that_cannot_be_advanced_until_its_end_ends_all_the_same(harness):
    run = await harness.start(StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop"))
    for step, state in (("a", "RUNNING"), ("b", "FAILED")):
        await harness.end(step, value=1)
        await harness.database.run(GARBLE)
        await harness.advance()
        assert (await harness.states())[""] == state
    assert "internal error" in (await harness.queries.get(run)).error


async def test_run_that_cannot_be_advanced_stops_child_runs_and_withdraws_approvals(harness):
    await harness.declare(StepSpec(id="x", task="noop"), name="child")
    run = await harness.start(
        StepSpec(id="a", task="noop"),
        StepSpec(id="nested", type="workflow", workflow="child"),
        StepSpec(id="ask", type="approval", approval=ApprovalSpec(text="go?")),
    )
    child = await harness.job("nested")
    await harness.end("a", value=1)
    await harness.database.run(GARBLE)
    await harness.advance()
    assert (await harness.states(child))["x"] == "STOPPING"
    assert await harness.database.rows(sql("SELECT FROM rota.approval WHERE state = 'pending'")) == []
    await harness.end("x", "CANCELLED", run=child)
    await harness.advance()
    states = await harness.states(run)
    assert (states[""], states["nested"], states["ask"]) == ("FAILED", "CANCELLED", "CANCELLED")


async def test_run_that_cannot_be_advanced_rolls_back_and_shows_what_it_cannot_undo(harness):
    run = await harness.start(
        StepSpec(id="a", task="noop", compensate=UNDO),
        StepSpec(id="b", task="noop", compensate=UNDO, depends_on=("a",)),
        rollback_on=frozenset({"failed"}),
    )
    await harness.end("a")
    await harness.advance()
    await harness.end("b", value=1)
    await harness.database.run(GARBLE)
    await harness.advance()
    assert (await harness.states(run))[""] == "COMPENSATING"
    entries = {row["step"]: row["state"] for row in await harness.database.rows(ENTRIES)}
    assert entries == {"a": "running", "b": "corrupt"}


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
