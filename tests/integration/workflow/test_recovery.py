"""The net: states that nothing should ever come to are made by hand, found, and mended; what ended long ago goes."""

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

UNSAY = sql("DELETE FROM rota.workflow_news")
FORGET_JOB = sql("DELETE FROM rota.job WHERE pk_job = $1::uuid")
FORGET_DONE = sql("DELETE FROM rota.job_done WHERE pk_job = $1::uuid")
FORGET_TIMERS = sql("DELETE FROM rota.workflow_timer")
FORGET_RUN = sql("DELETE FROM rota.workflow_run WHERE pk_run = $1::uuid")
ENTRY = sql("SELECT pk_undo FROM rota.saga_entry WHERE state = 'running'")
LEFT_S = sql("SELECT extract(epoch FROM ts_due - clock_timestamp())::float8 FROM rota.workflow_timer")
ROWS = sql("""
SELECT (SELECT count(*) FROM rota.workflow_run) AS runs, (SELECT count(*) FROM rota.workflow_event) AS events,
       (SELECT count(*) FROM rota.workflow_value) AS vals, (SELECT count(*) FROM rota.workflow_timer) AS timers,
       (SELECT count(*) FROM rota.saga) AS sagas, (SELECT count(*) FROM rota.saga_entry) AS entries,
       (SELECT count(*) FROM rota.workflow) AS versions""")
AGE = sql("UPDATE rota.workflow_run SET ts_ended = ts_ended - interval '31 days' WHERE pk_run = $1::uuid")
AGE_SAGAS = sql("UPDATE rota.saga SET ts_ended = ts_ended - interval '31 days'")
AGE_VERSIONS = sql("UPDATE rota.workflow SET ts_created = ts_created - interval '31 days'")
STEPS = sql("UPDATE rota.workflow_run SET steps = $2::bytea WHERE pk_run = $1::uuid")
DENY = sql("UPDATE rota.approval SET state = 'rejected', ts_decided = now()")
AB = (StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop", depends_on=("a",)))


@pytest.fixture
async def room(database):
    await a_show(database)
    return Netted(database)


async def test_what_goes_on_as_it_should_is_left_alone(room):
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
    assert await room.mend() == 0, "its news is there"
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


async def test_an_end_that_was_not_told_is_told_with_what_the_job_returned(room):
    await room.start(*AB, output={"a": "${steps.a.output}"})
    await room.end("a", value={"n": 7})
    await room.database.run(UNSAY)
    assert await room.advance() == 0
    assert await room.mend() == 1
    assert await room.jobs() == ["a", "b"]
    await room.end("b")
    await room.advance()
    found = await room.looking.get(room.run)
    assert (found.state, found.output) == ("SUCCEEDED", {"a": {"n": 7}})
    assert await room.mend() == 0


async def test_a_job_that_is_gone_has_failed(room):
    await room.start(*AB)
    job = await room.job("a")
    await room.database.run(FORGET_JOB, job)
    assert await room.mend() == 1
    found = await room.looking.get(room.run)
    assert found.state == "FAILED"
    assert "gone" in found.error


async def test_a_run_whose_end_was_not_told_to_its_parent_is_told(room):
    await room.declare(StepSpec(id="deep", task="noop"), name="inner")
    outer = await room.start(StepSpec(id="sub", type="workflow", workflow="inner"))
    inner = await room.job("sub")
    await room.end("deep", "FAILED", run=inner, code="fatal", error="no")
    await room.advancer.advance_batch()
    await room.database.run(UNSAY)
    assert (await room.states(outer))[""] == "RUNNING"
    assert await room.mend() == 1
    assert (await room.states(outer)) == {"": "FAILED", "sub": "FAILED"}

    outer = await room.start(StepSpec(id="sub", type="workflow", workflow="inner"))
    await room.database.run(FORGET_RUN, await room.job("sub"))
    assert await room.mend() == 1
    assert (await room.states(outer)) == {"": "FAILED", "sub": "FAILED"}


async def test_a_timer_that_is_gone_is_there_again_and_not_early(room):
    run = await room.start(
        StepSpec(id="wait", type="delay", delay_sec="${input.s}"), inputs={"s": 60}, given={"s": 90}, timeout_s=600
    )
    await room.pass_time(50)
    await room.database.run(FORGET_TIMERS)
    assert await room.mend() == 1
    assert sorted(await room.timers()) == [(-1, 0), (0, 1)]
    assert min(row[0] for row in await room.database.rows(LEFT_S)) > 85
    assert await room.mend() == 0
    await room.pass_time(90)
    await room.advance()
    assert await room.states(run) == {"": "SUCCEEDED", "wait": "SUCCEEDED"}


async def test_a_run_that_waits_for_nothing_looks_at_its_steps_anew(room):
    await room.start(*AB)
    version = await room.desk.definitions.find("film", "flow")
    await room.database.run(STEPS, room.run, msgspec.msgpack.encode(new_run_status(version.flow)))
    assert await room.advance() == 0
    assert await room.mend() == 1
    assert (await room.states())["a"] == "RUNNING"
    assert await room.mend() == 0


async def test_an_approval_that_was_decided_unheard_or_is_gone_is_heard_of(room):
    ask = StepSpec(id="ask", type="approval", approval=ApprovalSpec(text="go?"))
    one = await room.start(ask)
    await room.database.run(DENY)
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


async def undo_next(room, state="SUCCEEDED"):
    job = await room.database.value(ENTRY)
    await end_job(room.database, job, state)
    return job


async def test_a_compensation_whose_end_nobody_heard_or_that_is_gone_keeps_no_saga_waiting(room):
    run = await rolling_back(room)
    await undo_next(room)
    await room.database.run(UNSAY)
    assert await room.advance() == 0
    assert await room.mend() == 1
    job = await room.database.value(ENTRY)
    await room.database.run(FORGET_JOB, job)
    assert await room.mend() == 1
    await undo_next(room)
    await room.advance()
    saga = await room.looking.saga((await room.looking.get(run)).show_id, str(run))
    assert (saga.state, [entry.state for entry in saga.entries]) == ("incomplete", ["done", "failed", "done"])
    assert (await room.states(run))[""] == "FAILED"


async def test_a_pass_that_takes_too_long_is_given_up_and_the_next_goes_on(room):
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
    assert await room.database.value(ENTRY) is None
    room.sagas.kernel = None
    await room.advance()
    assert await room.database.value(ENTRY) is not None
    assert (await room.states(run))[""] == "COMPENSATING"


async def test_a_compensation_that_was_never_submitted_is_due_again(room):
    await rolling_back(room)
    await room.database.run(sql("UPDATE rota.saga_entry SET pk_undo = NULL WHERE state = 'running'"))
    assert await room.mend() == 1
    assert await room.database.value(ENTRY) is not None


async def test_a_run_whose_saga_is_over_or_was_never_begun_does_not_wait_for_it(room):
    run = await rolling_back(room)
    await room.database.run(sql("UPDATE rota.saga SET state = 'open'"))
    assert await room.mend() == 1
    for _ in range(3):
        await undo_next(room)
        await room.advancer.advance_sagas()
    await room.advancer.advance_sagas()
    await room.database.run(UNSAY)
    assert (await room.states(run))[""] == "COMPENSATING"
    assert await room.mend() == 1
    assert (await room.states(run))[""] == "FAILED"


async def test_many_runs_are_looked_at_in_parts_and_the_next_pass_goes_on(room, monkeypatch):
    monkeypatch.setattr(stuck_runs, "CHUNK", 2)
    monkeypatch.setattr(stuck_runs, "CHUNKS_MAX", 2)
    await room.declare(*AB)
    started = await room.desk.start_many("film", "flow", [{}] * 7, actor="ann")
    for each in started:
        await room.end("a", run=each.run)
    await room.database.run(UNSAY)
    assert [await room.mend() for _ in range(3)] == [4, 3, 0]
    assert await room.database.value(NEWS) == 0


async def test_a_run_that_cannot_be_read_keeps_no_other_from_being_mended(room):
    broken = await room.start(*AB)
    await room.start(*AB)
    await room.end("a")
    await room.database.run(UNSAY)
    await room.database.run(STEPS, broken, b"nonsense")
    assert await room.mend() == 1


async def test_a_run_that_goes_on_between_looking_and_mending_is_left_alone(room):
    await room.start(*AB)
    await room.end("a")
    await room.database.run(UNSAY)
    [suspect], _ = await room.net.repair._find_stuck(stuck_runs.START_ID)
    assert await room.mend() == 1
    assert await room.net.repair._repair(await room.lead(), [suspect]) == 0
    assert (await room.database.value(NEWS), await room.jobs()) == (0, ["a", "b"])


async def test_who_has_lost_the_lease_mends_and_forgets_nothing(room):
    await room.start(*AB)
    await room.end("a")
    await room.database.run(UNSAY)
    stale = (await room.leases.acquire([LEASE], kind="workflow_reconciler", ttl_s=30.0)).granted[0]
    await room.leases.release([stale])
    for work in (room.net.repair.repair_runs, room.net.repair.repair_sagas, room.net.pruner.prune):
        with pytest.raises(StaleFence):
            await work(stale)
    assert await room.database.value(NEWS) == 0


async def test_what_ended_long_ago_is_forgotten_with_all_of_its_own_and_nothing_else_is(room):
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
    assert {each.id for each in await room.looking.page()} == {outer, inner}, "what its parent may need is kept"
    await room.desk.cancel(outer, "ann")
    for step in "a":
        await room.end(step, "CANCELLED", run=outer)
    await room.advance()
    await room.database.run(AGE, outer)
    assert (await room.prune(batch=1))["runs"] == 2
    rows = dict(await room.database.row(ROWS))
    assert rows == {"runs": 0, "events": 0, "vals": 0, "timers": 0, "sagas": 0, "entries": 0, "versions": 3}


async def test_a_saga_is_forgotten_once_it_is_over_and_its_run_not_before(room):
    run = await rolling_back(room)
    await room.database.run(sql("UPDATE rota.workflow_run SET ts_ended = now(), state = 'FAILED'"))
    await room.database.run(AGE, run)
    await room.database.run(AGE_SAGAS)
    assert await room.prune() == {"sagas": 0, "runs": 0, "versions": 0}
    for state in ("SUCCEEDED", "FAILED", "SUCCEEDED"):
        await undo_next(room, state)
        await room.advance()
    assert await room.prune() == {"sagas": 0, "runs": 0, "versions": 0}, "incomplete, and somebody may mend it"
    await room.database.run(AGE_SAGAS)
    assert await room.prune() == {"sagas": 1, "runs": 1, "versions": 0}


async def test_an_open_saga_keeps_its_run(room):
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


async def test_old_versions_without_runs_are_forgotten_and_the_latest_is_kept(room):
    await room.start(*AB)
    await room.declare(StepSpec(id="c", task="noop"))
    await room.declare(StepSpec(id="d", task="noop"))
    assert (await room.prune())["versions"] == 0, "they are young"
    await room.database.run(AGE_VERSIONS)
    assert (await room.prune())["versions"] == 1
    assert (await room.desk.definitions.find("film", "flow")).version == 3
    assert (await room.desk.definitions.find("film", "flow", 1)).version == 1
    assert (await room.declare(StepSpec(id="e", task="noop"))).version == 4


async def test_a_version_that_is_forgotten_while_somebody_starts_it_is_not_there(room, monkeypatch):
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
