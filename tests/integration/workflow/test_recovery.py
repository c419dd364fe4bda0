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
from tests.support.workflow_recovery import Netted
from tests.support.workflows import NEWS, end_job

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
async def room(database):
    await a_show(database)
    return Netted(database)


async def test_healthy_runs_are_left_alone(room):
    await room.declare(StepSpec(id="deep", task="noop"), name="inner")
    run = await room.start(
        StepSpec(id="job", task="noop"),
        StepSpec(id="wait", type="delay", delay_sec=60),
        StepSpec(id="sub", type="workflow", workflow="inner", deadline_s=60),
        StepSpec(id="race", type="parallel", parallel=ParallelSpec(steps=("fast",), need="any"), deadline_s=60),
        StepSpec(id="fast", task="noop"),
        StepSpec(id="ask", type="approval", approval=ApprovalSpec(text="go?")),
        timeout_s=3600,
    )
    assert await room.mend() == 0
    await room.end("job")
    assert await room.mend() == 0, "its inbox entry exists"
    await room.desk.pause(run, "ann")
    assert await room.mend() == 0
    await room.start(*THREE, name="undone")
    for step in ("flight", "hotel"):
        await room.end(step, value={"ticket": 7})
        await room.advance()
    await room.end("car", "FAILED", code="fatal")
    await room.advance()
    assert (await room.states())[""] == "COMPENSATING"
    assert await room.mend() == 0


async def test_lost_job_end_is_recovered_with_its_result(room):
    await room.start(*AB, output={"a": "${steps.a.output}"})
    await room.end("a", value={"n": 7})
    await room.database.run(CLEAR_INBOX)
    assert await room.advance() == 0
    assert await room.mend() == 1
    assert await room.jobs() == ["a", "b"]
    await room.end("b")
    await room.advance()
    found = await room.looking.get(room.run)
    assert (found.state, found.output) == ("SUCCEEDED", {"a": {"n": 7}})
    assert await room.mend() == 0


async def test_missing_job_fails_its_step(room):
    await room.start(*AB)
    job = await room.job("a")
    await room.database.run(DELETE_JOB, job)
    assert await room.mend() == 1
    found = await room.looking.get(room.run)
    assert found.state == "FAILED"
    assert "gone" in found.error


async def test_lost_end_of_nested_run_is_delivered_to_its_parent(room):
    await room.declare(StepSpec(id="deep", task="noop"), name="inner")
    outer = await room.start(StepSpec(id="sub", type="workflow", workflow="inner"))
    inner = await room.job("sub")
    await room.end("deep", "FAILED", run=inner, code="fatal", error="no")
    await room.advancer.advance_batch()
    await room.database.run(CLEAR_INBOX)
    assert (await room.states(outer))[""] == "RUNNING"
    assert await room.mend() == 1
    assert (await room.states(outer)) == {"": "FAILED", "sub": "FAILED"}

    outer = await room.start(StepSpec(id="sub", type="workflow", workflow="inner"))
    await room.database.run(DELETE_RUN, await room.job("sub"))
    assert await room.mend() == 1
    assert (await room.states(outer)) == {"": "FAILED", "sub": "FAILED"}


async def test_missing_timer_is_restored_and_not_early(room):
    run = await room.start(
        StepSpec(id="wait", type="delay", delay_sec="${input.s}"), inputs={"s": 60}, given={"s": 90}, timeout_s=600
    )
    await room.pass_time(50)
    await room.database.run(DELETE_TIMERS)
    assert await room.mend() == 1
    assert sorted(await room.timers()) == [(-1, 0), (0, 1)]
    assert min(row[0] for row in await room.database.rows(LEFT_S)) > 85
    assert await room.mend() == 0
    await room.pass_time(90)
    await room.advance()
    assert await room.states(run) == {"": "SUCCEEDED", "wait": "SUCCEEDED"}


async def test_run_waiting_for_nothing_reevaluates_its_steps(room):
    await room.start(*AB)
    version = await room.desk.definitions.find("film", "flow")
    await room.database.run(SET_STEPS, room.run, msgspec.msgpack.encode(new_run_status(version.flow)))
    assert await room.advance() == 0
    assert await room.mend() == 1
    assert (await room.states())["a"] == "RUNNING"
    assert await room.mend() == 0


async def test_lost_or_deleted_approval_decision_is_recovered(room):
    ask = StepSpec(id="ask", type="approval", approval=ApprovalSpec(text="go?"))
    one = await room.start(ask)
    await room.database.run(REJECT_ALL)
    two = await room.start(ask)
    assert await room.mend() == 1
    await room.database.run(sql("DELETE FROM rota.approval WHERE state = 'pending'"))
    assert await room.mend() == 1
    assert {(await room.states(run))["ask"] for run in (one, two)} == {"DENIED"}


async def rolling_back(room):
    run = await room.start(*THREE)
    for step in ("flight", "hotel", "car"):
        await room.end(step, value={"ticket": 7})
        await room.advance()
    await room.end("pay", "FAILED", code="fatal")
    await room.advance()
    return run


async def end_next_compensation(room, state="SUCCEEDED"):
    job = await room.database.value(RUNNING_COMPENSATION)
    await end_job(room.database, job, state)
    return job


async def test_lost_or_missing_compensation_does_not_block_its_saga(room):
    run = await rolling_back(room)
    await end_next_compensation(room)
    await room.database.run(CLEAR_INBOX)
    assert await room.advance() == 0
    assert await room.mend() == 1
    job = await room.database.value(RUNNING_COMPENSATION)
    await room.database.run(DELETE_JOB, job)
    assert await room.mend() == 1
    await end_next_compensation(room)
    await room.advance()
    saga = await room.looking.saga((await room.looking.get(run)).show_id, str(run))
    assert (saga.state, [entry.state for entry in saga.entries]) == ("incomplete", ["done", "failed", "done"])
    assert (await room.states(run))[""] == "FAILED"


async def test_saga_pass_over_its_timeout_is_aborted_and_resumed(room):
    class Slow:
        async def check(self, _questions):
            await asyncio.Event().wait()

    room.sagas.kernel = Slow()
    room.advancer.saga = SagaSettings(rollback_timeout=0.2)
    run = await room.start(
        StepSpec(id="a", task="book", compensate=undo()), StepSpec(id="b", task="pay", depends_on=("a",))
    )
    await room.end("a")
    await room.advance()
    await room.end("b", "FAILED", code="fatal")
    await room.advancer.advance_batch()
    with pytest.raises(TimeoutError):
        await room.advancer.advance_sagas()
    assert await room.database.value(RUNNING_COMPENSATION) is None
    room.sagas.kernel = None
    await room.advance()
    assert await room.database.value(RUNNING_COMPENSATION) is not None
    assert (await room.states(run))[""] == "COMPENSATING"


async def test_unsubmitted_compensation_is_submitted_again(room):
    await rolling_back(room)
    await room.database.run(sql("UPDATE rota.saga_entry SET pk_undo = NULL WHERE state = 'running'"))
    assert await room.mend() == 1
    assert await room.database.value(RUNNING_COMPENSATION) is not None


async def test_run_does_not_wait_for_a_finished_or_unstarted_saga(room):
    run = await rolling_back(room)
    await room.database.run(sql("UPDATE rota.saga SET state = 'open'"))
    assert await room.mend() == 1
    for _ in range(3):
        await end_next_compensation(room)
        await room.advancer.advance_sagas()
    await room.advancer.advance_sagas()
    await room.database.run(CLEAR_INBOX)
    assert (await room.states(run))[""] == "COMPENSATING"
    assert await room.mend() == 1
    assert (await room.states(run))[""] == "FAILED"


async def test_repair_works_in_chunks_and_the_next_pass_continues(room, monkeypatch):
    monkeypatch.setattr(stuck_runs, "CHUNK", 2)
    monkeypatch.setattr(stuck_runs, "CHUNKS_MAX", 2)
    await room.declare(*AB)
    started = await room.desk.start_many("film", "flow", [{}] * 7, actor="ann")
    for each in started:
        await room.end("a", run=each.run)
    await room.database.run(CLEAR_INBOX)
    assert [await room.mend() for _ in range(3)] == [4, 3, 0]
    assert await room.database.value(NEWS) == 0


async def test_unreadable_run_does_not_block_repair_of_others(room):
    broken = await room.start(*AB)
    await room.start(*AB)
    await room.end("a")
    await room.database.run(CLEAR_INBOX)
    await room.database.run(SET_STEPS, broken, b"nonsense")
    assert await room.mend() == 1


async def test_run_that_advances_before_its_repair_is_left_alone(room):
    await room.start(*AB)
    await room.end("a")
    await room.database.run(CLEAR_INBOX)
    [suspect], _ = await room.net.repair._find_stuck(stuck_runs.START_ID)
    assert await room.mend() == 1
    assert await room.net.repair._repair(await room.lead(), [suspect]) == 0
    assert (await room.database.value(NEWS), await room.jobs()) == (0, ["a", "b"])


async def test_stale_lease_holder_repairs_and_prunes_nothing(room):
    await room.start(*AB)
    await room.end("a")
    await room.database.run(CLEAR_INBOX)
    stale = (await room.leases.acquire([LEASE], kind="workflow_reconciler", ttl_s=30.0)).granted[0]
    await room.leases.release([stale])
    for work in (room.net.repair.repair_runs, room.net.repair.repair_sagas, room.net.pruner.prune):
        with pytest.raises(StaleFence):
            await work(stale)
    assert await room.database.value(NEWS) == 0


async def test_old_ended_runs_are_pruned_with_their_rows_only(room):
    await room.declare(StepSpec(id="deep", task="noop"), name="inner")
    done = await room.start(*AB, timeout_s=900)
    for step in "ab":
        await room.end(step, value=1)
        await room.advance()
    outer = await room.start(StepSpec(id="sub", type="workflow", workflow="inner"), *AB, name="outer")
    inner = await room.job("sub")
    await room.end("deep", run=inner)
    await room.advance()
    for run in (done, inner):
        await room.database.run(AGE, run)
    assert await room.prune() == {"sagas": 0, "runs": 1, "versions": 0}
    assert {each.id for each in await room.looking.page()} == {outer, inner}, "a run that its parent may need is kept"
    await room.desk.cancel(outer, "ann")
    for step in "a":
        await room.end(step, "CANCELLED", run=outer)
    await room.advance()
    await room.database.run(AGE, outer)
    assert (await room.prune(batch=1))["runs"] == 2
    rows = dict(await room.database.row(ROWS))
    assert rows == {"runs": 0, "events": 0, "vals": 0, "timers": 0, "sagas": 0, "entries": 0, "versions": 3}


async def test_run_is_pruned_only_after_its_saga_has_ended(room):
    run = await rolling_back(room)
    await room.database.run(sql("UPDATE rota.workflow_run SET ts_ended = now(), state = 'FAILED'"))
    await room.database.run(AGE, run)
    await room.database.run(AGE_SAGAS)
    assert await room.prune() == {"sagas": 0, "runs": 0, "versions": 0}
    for state in ("SUCCEEDED", "FAILED", "SUCCEEDED"):
        await end_next_compensation(room, state)
        await room.advance()
    assert await room.prune() == {"sagas": 0, "runs": 0, "versions": 0}, "an incomplete saga may still be retried"
    await room.database.run(AGE_SAGAS)
    assert await room.prune() == {"sagas": 1, "runs": 1, "versions": 0}


async def test_open_saga_keeps_its_run(room):
    run = await room.start(
        StepSpec(id="a", task="book", compensate=undo()), StepSpec(id="b", task="pay", depends_on=("a",))
    )
    await room.end("a")
    await room.advance()
    await room.desk.cancel(run, "ann")
    await room.end("b", "CANCELLED")
    await room.advance()
    await room.database.run(AGE, run)
    assert await room.prune() == {"sagas": 0, "runs": 0, "versions": 0}


async def test_old_versions_without_runs_are_pruned_except_the_latest(room):
    await room.start(*AB)
    await room.declare(StepSpec(id="c", task="noop"))
    await room.declare(StepSpec(id="d", task="noop"))
    assert (await room.prune())["versions"] == 0, "they are too recent"
    await room.database.run(AGE_VERSIONS)
    assert (await room.prune())["versions"] == 1
    assert (await room.desk.definitions.find("film", "flow")).version == 3
    assert (await room.desk.definitions.find("film", "flow", 1)).version == 1
    assert (await room.declare(StepSpec(id="e", task="noop"))).version == 4


async def test_start_of_a_version_pruned_meanwhile_is_not_found(room, monkeypatch):
    await room.declare(*AB)
    first = await room.desk.definitions.find("film", "flow", 1)
    await room.declare(StepSpec(id="c", task="noop"))
    await room.database.run(AGE_VERSIONS)
    assert (await room.prune())["versions"] == 1

    async def found(*_):
        return first

    monkeypatch.setattr(room.desk.definitions, "find", found)
    with pytest.raises(NotFound, match="Version 1 of workflow flow"):
        await room.desk.start("film", "flow", version=1, actor="ann")
