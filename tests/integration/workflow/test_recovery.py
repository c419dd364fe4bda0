"""The reconciler: states that must never occur are created by hand, found and repaired; old runs are pruned."""

import asyncio

import msgspec
import pytest

from rota.model.errors import NotFound, StaleFence
from rota.model.settings.lifecycle import SagaSettings
from rota.model.workflows.spec import ApprovalSpec, ParallelSpec, StepSpec
from rota.model.workflows.state_machine import new_run_status
from rota.workflow.recovery import stuck_runs
from rota.workflow.recovery.reconciler import LEASE
from tests.integration.workflow.test_sagas import THREE, undo
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflow_recovery import RecoveryHarness
from tests.support.workflows import INBOX_SIZE, end_job

CLEAR_INBOX = sql("DELETE FROM rota.workflow_news")
DELETE_JOB = sql("DELETE FROM rota.job WHERE pk_job = $1::uuid")
DELETE_DONE = sql("DELETE FROM rota.job_done WHERE pk_job = $1::uuid")
DELETE_TIMERS = sql("DELETE FROM rota.workflow_timer")
DELETE_RUN = sql("DELETE FROM rota.workflow_run WHERE pk_run = $1::uuid")
RUNNING_COMPENSATION = sql("SELECT pk_undo FROM rota.saga_entry WHERE state = 'running'")
LEFT_S = sql("SELECT extract(epoch FROM ts_due - clock_timestamp())::float8 FROM rota.workflow_timer")
ROWS = sql("""
SELECT (SELECT count(*) FROM rota.workflow_run) AS runs, (SELECT count(*) FROM rota.workflow_event) AS events,
       (SELECT count(*) FROM rota.workflow_value) AS vals, (SELECT count(*) FROM rota.workflow_timer) AS timers,
       (SELECT count(*) FROM rota.saga) AS sagas, (SELECT count(*) FROM rota.saga_entry) AS entries,
       (SELECT count(*) FROM rota.workflow) AS versions""")
AGE = sql("UPDATE rota.workflow_run SET ts_ended = ts_ended - interval '31 days' WHERE pk_run = $1::uuid")
AGE_SAGAS = sql("UPDATE rota.saga SET ts_ended = ts_ended - interval '31 days'")
AGE_VERSIONS = sql("UPDATE rota.workflow SET ts_created = ts_created - interval '31 days'")
SET_STEPS = sql("UPDATE rota.workflow_run SET steps = $2::bytea WHERE pk_run = $1::uuid")
REJECT_ALL = sql("UPDATE rota.approval SET state = 'rejected', ts_decided = now()")
AB = (StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop", depends_on=("a",)))


@pytest.fixture
async def harness(database):
    await a_show(database)
    return RecoveryHarness(database)


async def test_healthy_runs_are_left_alone(harness):
    await harness.declare(StepSpec(id="deep", task="noop"), name="inner")
    run = await harness.start(
        StepSpec(id="job", task="noop"),
        StepSpec(id="wait", type="delay", delay_sec=60),
        StepSpec(id="sub", type="workflow", workflow="inner", deadline_s=60),
        StepSpec(id="race", type="parallel", parallel=ParallelSpec(steps=("fast",), need="any"), deadline_s=60),
        StepSpec(id="fast", task="noop"),
        StepSpec(id="ask", type="approval", approval=ApprovalSpec(text="go?")),
        timeout_s=3600,
    )
    assert await harness.repair() == 0
    await harness.end("job")
    assert await harness.repair() == 0, "its inbox entry exists"
    await harness.commands.pause(run, "ann")
    assert await harness.repair() == 0
    await harness.start(*THREE, name="undone")
    for step in ("flight", "hotel"):
        await harness.end(step, value={"ticket": 7})
        await harness.advance()
    await harness.end("car", "FAILED", code="fatal")
    await harness.advance()
    assert (await harness.states())[""] == "COMPENSATING"
    assert await harness.repair() == 0


async def test_lost_job_end_is_recovered_with_its_result(harness):
    await harness.start(*AB, output={"a": "${steps.a.output}"})
    await harness.end("a", value={"n": 7})
    await harness.database.run(CLEAR_INBOX)
    assert await harness.advance() == 0
    assert await harness.repair() == 1
    assert await harness.jobs() == ["a", "b"]
    await harness.end("b")
    await harness.advance()
    found = await harness.queries.get(harness.run)
    assert (found.state, found.output) == ("SUCCEEDED", {"a": {"n": 7}})
    assert await harness.repair() == 0


async def test_missing_job_fails_its_step(harness):
    await harness.start(*AB)
    job = await harness.job("a")
    await harness.database.run(DELETE_JOB, job)
    assert await harness.repair() == 1
    found = await harness.queries.get(harness.run)
    assert found.state == "FAILED"
    assert "gone" in found.error


async def test_lost_end_of_nested_run_is_delivered_to_its_parent(harness):
    await harness.declare(StepSpec(id="deep", task="noop"), name="inner")
    outer = await harness.start(StepSpec(id="sub", type="workflow", workflow="inner"))
    inner = await harness.job("sub")
    await harness.end("deep", "FAILED", run=inner, code="fatal", error="no")
    await harness.advancer.advance_batch()
    await harness.database.run(CLEAR_INBOX)
    assert (await harness.states(outer))[""] == "RUNNING"
    assert await harness.repair() == 1
    assert (await harness.states(outer)) == {"": "FAILED", "sub": "FAILED"}

    outer = await harness.start(StepSpec(id="sub", type="workflow", workflow="inner"))
    await harness.database.run(DELETE_RUN, await harness.job("sub"))
    assert await harness.repair() == 1
    assert (await harness.states(outer)) == {"": "FAILED", "sub": "FAILED"}


async def test_missing_timer_is_restored_and_not_early(harness):
    run = await harness.start(
        StepSpec(id="wait", type="delay", delay_sec="${input.s}"), inputs={"s": 60}, given={"s": 90}, timeout_s=600
    )
    await harness.pass_time(50)
    await harness.database.run(DELETE_TIMERS)
    assert await harness.repair() == 1
    assert sorted(await harness.timers()) == [(-1, 0), (0, 1)]
    assert min(row[0] for row in await harness.database.rows(LEFT_S)) > 85
    assert await harness.repair() == 0
    await harness.pass_time(90)
    await harness.advance()
    assert await harness.states(run) == {"": "SUCCEEDED", "wait": "SUCCEEDED"}


async def test_run_waiting_for_nothing_reevaluates_its_steps(harness):
    await harness.start(*AB)
    version = await harness.commands.definitions.find("film", "flow")
    await harness.database.run(SET_STEPS, harness.run, msgspec.msgpack.encode(new_run_status(version.flow)))
    assert await harness.advance() == 0
    assert await harness.repair() == 1
    assert (await harness.states())["a"] == "RUNNING"
    assert await harness.repair() == 0


async def test_lost_or_deleted_approval_decision_is_recovered(harness):
    ask = StepSpec(id="ask", type="approval", approval=ApprovalSpec(text="go?"))
    one = await harness.start(ask)
    await harness.database.run(REJECT_ALL)
    two = await harness.start(ask)
    assert await harness.repair() == 1
    await harness.database.run(sql("DELETE FROM rota.approval WHERE state = 'pending'"))
    assert await harness.repair() == 1
    assert {(await harness.states(run))["ask"] for run in (one, two)} == {"DENIED"}


async def rolling_back(harness):
    run = await harness.start(*THREE)
    for step in ("flight", "hotel", "car"):
        await harness.end(step, value={"ticket": 7})
        await harness.advance()
    await harness.end("pay", "FAILED", code="fatal")
    await harness.advance()
    return run


async def end_next_compensation(harness, state="SUCCEEDED"):
    job = await harness.database.value(RUNNING_COMPENSATION)
    await end_job(harness.database, job, state)
    return job


async def test_lost_or_missing_compensation_does_not_block_its_saga(harness):
    run = await rolling_back(harness)
    await end_next_compensation(harness)
    await harness.database.run(CLEAR_INBOX)
    assert await harness.advance() == 0
    assert await harness.repair() == 1
    job = await harness.database.value(RUNNING_COMPENSATION)
    await harness.database.run(DELETE_JOB, job)
    assert await harness.repair() == 1
    await end_next_compensation(harness)
    await harness.advance()
    saga = await harness.queries.saga((await harness.queries.get(run)).show_id, str(run))
    assert (saga.state, [entry.state for entry in saga.entries]) == ("incomplete", ["done", "failed", "done"])
    assert (await harness.states(run))[""] == "FAILED"


async def test_saga_pass_over_its_timeout_is_aborted_and_resumed(harness):
    class Slow:
        async def check(self, _questions):
            await asyncio.Event().wait()

    harness.sagas.kernel = Slow()
    harness.advancer.saga = SagaSettings(rollback_timeout=0.2)
    run = await harness.start(
        StepSpec(id="a", task="book", compensate=undo()), StepSpec(id="b", task="pay", depends_on=("a",))
    )
    await harness.end("a")
    await harness.advance()
    await harness.end("b", "FAILED", code="fatal")
    await harness.advancer.advance_batch()
    with pytest.raises(TimeoutError):
        await harness.advancer.advance_sagas()
    assert await harness.database.value(RUNNING_COMPENSATION) is None
    harness.sagas.kernel = None
    await harness.advance()
    assert await harness.database.value(RUNNING_COMPENSATION) is not None
    assert (await harness.states(run))[""] == "COMPENSATING"


async def test_unsubmitted_compensation_is_submitted_again(harness):
    await rolling_back(harness)
    await harness.database.run(sql("UPDATE rota.saga_entry SET pk_undo = NULL WHERE state = 'running'"))
    assert await harness.repair() == 1
    assert await harness.database.value(RUNNING_COMPENSATION) is not None


async def test_run_does_not_wait_for_a_finished_or_unstarted_saga(harness):
    run = await rolling_back(harness)
    await harness.database.run(sql("UPDATE rota.saga SET state = 'open'"))
    assert await harness.repair() == 1
    for _ in range(3):
        await end_next_compensation(harness)
        await harness.advancer.advance_sagas()
    await harness.advancer.advance_sagas()
    await harness.database.run(CLEAR_INBOX)
    assert (await harness.states(run))[""] == "COMPENSATING"
    assert await harness.repair() == 1
    assert (await harness.states(run))[""] == "FAILED"


async def test_repair_works_in_chunks_and_the_next_pass_continues(harness, monkeypatch):
    monkeypatch.setattr(stuck_runs, "CHUNK", 2)
    monkeypatch.setattr(stuck_runs, "CHUNKS_MAX", 2)
    await harness.declare(*AB)
    started = await harness.commands.start_many("film", "flow", [{}] * 7, actor="ann")
    for each in started:
        await harness.end("a", run=each.run)
    await harness.database.run(CLEAR_INBOX)
    assert [await harness.repair() for _ in range(3)] == [4, 3, 0]
    assert await harness.database.value(INBOX_SIZE) == 0


async def test_unreadable_run_does_not_block_repair_of_others(harness):
    broken = await harness.start(*AB)
    await harness.start(*AB)
    await harness.end("a")
    await harness.database.run(CLEAR_INBOX)
    await harness.database.run(SET_STEPS, broken, b"nonsense")
    assert await harness.repair() == 1


async def test_run_that_advances_before_its_repair_is_left_alone(harness):
    await harness.start(*AB)
    await harness.end("a")
    await harness.database.run(CLEAR_INBOX)
    [suspect], _ = await harness.reconciler.repair._find_stuck(stuck_runs.START_ID)
    assert await harness.repair() == 1
    assert await harness.reconciler.repair._repair(await harness.lead(), [suspect]) == 0
    assert (await harness.database.value(INBOX_SIZE), await harness.jobs()) == (0, ["a", "b"])


async def test_stale_lease_holder_repairs_and_prunes_nothing(harness):
    await harness.start(*AB)
    await harness.end("a")
    await harness.database.run(CLEAR_INBOX)
    stale = (await harness.leases.acquire([LEASE], kind="workflow_reconciler", ttl_s=30.0)).granted[0]
    await harness.leases.release([stale])
    for work in (
        harness.reconciler.repair.repair_runs,
        harness.reconciler.repair.repair_sagas,
        harness.reconciler.pruner.prune,
    ):
        with pytest.raises(StaleFence):
            await work(stale)
    assert await harness.database.value(INBOX_SIZE) == 0


async def test_old_ended_runs_are_pruned_with_their_rows_only(harness):
    await harness.declare(StepSpec(id="deep", task="noop"), name="inner")
    done = await harness.start(*AB, timeout_s=900)
    for step in "ab":
        await harness.end(step, value=1)
        await harness.advance()
    outer = await harness.start(StepSpec(id="sub", type="workflow", workflow="inner"), *AB, name="outer")
    inner = await harness.job("sub")
    await harness.end("deep", run=inner)
    await harness.advance()
    for run in (done, inner):
        await harness.database.run(AGE, run)
    assert await harness.prune() == {"sagas": 0, "runs": 1, "versions": 0}
    assert {each.id for each in await harness.queries.page()} == {outer, inner}, (
        "a run that its parent may need is kept"
    )
    await harness.commands.cancel(outer, "ann")
    for step in "a":
        await harness.end(step, "CANCELLED", run=outer)
    await harness.advance()
    await harness.database.run(AGE, outer)
    assert (await harness.prune(batch=1))["runs"] == 2
    rows = dict(await harness.database.row(ROWS))
    assert rows == {"runs": 0, "events": 0, "vals": 0, "timers": 0, "sagas": 0, "entries": 0, "versions": 3}


async def test_run_is_pruned_only_after_its_saga_has_ended(harness):
    run = await rolling_back(harness)
    await harness.database.run(sql("UPDATE rota.workflow_run SET ts_ended = now(), state = 'FAILED'"))
    await harness.database.run(AGE, run)
    await harness.database.run(AGE_SAGAS)
    assert await harness.prune() == {"sagas": 0, "runs": 0, "versions": 0}
    for state in ("SUCCEEDED", "FAILED", "SUCCEEDED"):
        await end_next_compensation(harness, state)
        await harness.advance()
    assert await harness.prune() == {"sagas": 0, "runs": 0, "versions": 0}, "an incomplete saga may still be retried"
    await harness.database.run(AGE_SAGAS)
    assert await harness.prune() == {"sagas": 1, "runs": 1, "versions": 0}


async def test_open_saga_keeps_its_run(harness):
    run = await harness.start(
        StepSpec(id="a", task="book", compensate=undo()), StepSpec(id="b", task="pay", depends_on=("a",))
    )
    await harness.end("a")
    await harness.advance()
    await harness.commands.cancel(run, "ann")
    await harness.end("b", "CANCELLED")
    await harness.advance()
    await harness.database.run(AGE, run)
    assert await harness.prune() == {"sagas": 0, "runs": 0, "versions": 0}


async def test_old_versions_without_runs_are_pruned_except_the_latest(harness):
    await harness.start(*AB)
    await harness.declare(StepSpec(id="c", task="noop"))
    await harness.declare(StepSpec(id="d", task="noop"))
    assert (await harness.prune())["versions"] == 0, "they are too recent"
    await harness.database.run(AGE_VERSIONS)
    assert (await harness.prune())["versions"] == 1
    assert (await harness.commands.definitions.find("film", "flow")).version == 3
    assert (await harness.commands.definitions.find("film", "flow", 1)).version == 1
    assert (await harness.declare(StepSpec(id="e", task="noop"))).version == 4


async def test_start_of_a_version_pruned_meanwhile_is_not_found(harness, monkeypatch):
    await harness.declare(*AB)
    first = await harness.commands.definitions.find("film", "flow", 1)
    await harness.declare(StepSpec(id="c", task="noop"))
    await harness.database.run(AGE_VERSIONS)
    assert (await harness.prune())["versions"] == 1

    async def found(*_):
        return first

    monkeypatch.setattr(harness.commands.definitions, "find", found)
    with pytest.raises(NotFound, match="Version 1 of workflow flow"):
        await harness.commands.start("film", "flow", version=1, actor="ann")
