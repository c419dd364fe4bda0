"""Requirements on sagas, run locks, delay timers and retries, and the tests that show them.

Tests are named by a part of their name. Tests without a file are in this one; `sagas`, `killed`, `ends` and `runs` are
the files test_*.py beside it.

| sagas | shown by |
|---|---|
| recorded only for succeeded jobs that have a compensation and are not one | `recorded_only_for_completed_work` |
| last first, one at a time | sagas `in_reverse_one_at_a_time`; `completed_steps_in_reverse` |
| CRITICAL, labels, env, overrides, key generated or given | `inherits_the_original_job` |
| its time limit is that of the original job | `inherits_the_original_job` |
| denied: skipped and visible; no answer: continues | sagas `denied_compensation`, `unavailable_policy_kernel` |
| corrupt: a dead letter, and the rest continues | sagas `corrupt_saga_entry` |
| isolated by run and by show | sagas `compensate_separately`, `saga_of_another_show` |
| a failed submission loses nothing | `cannot_be_submitted_is_not_lost`; sagas `crash_or_lost_reply` |
| a second rollback does nothing | sagas `compensates_nothing_twice`; `concurrent_rollbacks` |
| which failures compensate | ends `each_failure_kind`; `ended_from_outside` |
| cleared on success, retried by people | sagas `discards_its_compensations`, `can_be_retried` |
| a rerun repeats compensated steps and takes over the other compensations | `rerun_takes_over`, `rerun_repeats` |

| run locks | shown by |
|---|---|
| one advance at a time, in a process and across processes | `second_advancer`; killed `concurrent_advances` |
| different runs do not wait for each other | `locked_run_does_not_block` |
| the lock of a dead or paused process is released | killed `crash_or_lost_reply`, `paused_advancer` |
| an advance from stale state writes nothing | `stale_run_state` |
| no lock is left behind | the lock is a row lock: there is nothing to clean up |
| people, the reconciler and advances never deadlock | `cancel_waits_for_advance`, `due_timers_do_not_deadlock` |
| delivered twice, advanced once | `second_advancer`; tests/property, where inbox entries come twice |

| delay timers | shown by |
|---|---|
| durable, however short | `delay_of_any_length` |
| fire once, are removed when fired and kept when the advance fails | `timer_fires_once`, `timer_is_kept` |
| overdue ones fire at the start, others later, none is dropped | killed `long_outage`, `wrong_local_clock` |
| two of one run both fire | runs `two_delays_of_one_run` |
| those of ended runs are removed, and no others | `timers_of_ended_run` |

| retries | shown by |
|---|---|
| delays double with jitter; fatal and denied are not retried | `doubles_with_jitter`, `fatal_failure_is_not` |
| delays are as durable as the queue, and as long as requested | tests/integration/queue; `honours_requested_delay` |
"""

import asyncio
import random
from hashlib import sha256

import msgspec
import pytest

from rota.engine.completion.retry_decision import decide_retry
from rota.engine.queries.jobs import JobQueries
from rota.infra import failpoints
from rota.model.errors import Refused, StaleFence
from rota.model.jobs.submission import Budget, Compensation, LayerSpec, RetrySpec, Submission
from rota.model.jobs.work import Retries
from rota.model.protocol import FATAL_CODES, AttemptResult, AttemptStatus
from rota.model.workflows.spec import StepSpec
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.waiting import until
from tests.support.workflows import INBOX_SIZE, WorkflowHarness, end_job

COMPENSATIONS = sql(
    "SELECT pk_job, str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true' ORDER BY str_name"
)
ENTRIES = sql(
    "SELECT e.step, e.state, s.workflow_id FROM rota.saga_entry e JOIN rota.saga s USING (pk_saga) ORDER BY number"
)
LOCK_WAITERS = sql(
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)
TIMERS = sql("SELECT count(*) FROM rota.workflow_timer")
RENAME_FOLDER = sql("UPDATE rota.folder SET str_name = 'gone' WHERE str_name = 'default'")
RESTORE_FOLDER = sql("UPDATE rota.folder SET str_name = 'default' WHERE str_name = 'gone'")


def undo(**more):
    return Compensation(topic="undo", task="undo", **more)


def step(name, *before, **more):
    return StepSpec(id=name, task="work", depends_on=before, **more)


@pytest.fixture
async def harness(database):
    await a_show(database)
    return WorkflowHarness(database)


async def running_compensations(harness):
    """Jobs of the running compensations, by step."""
    return {row["str_name"].rpartition(".")[2]: row["pk_job"] for row in await harness.database.rows(COMPENSATIONS)}


async def finish_compensations(harness):
    """Let every compensation succeed; returns their steps in order."""
    order = []
    while running := await running_compensations(harness):
        [(name, job)] = running.items()
        order.append(name)
        await end_job(harness.database, job)
        await harness.advance()
    return order


async def entries(harness):
    return [(row["step"], row["state"]) for row in await harness.database.rows(ENTRIES)]


async def test_compensation_is_recorded_only_for_completed_work(harness):
    await harness.start(
        step("good", compensate=undo()),
        step("kept", compensate=undo(), on_error="mend"),
        step("bad", compensate=undo(), on_error="mend2"),
        step("mend"),
        step("mend2"),
        step("plain"),
        step("last", "good", "kept", "bad", "plain"),
    )
    for name, state in (
        ("good", "SUCCEEDED"),
        ("kept", "OUTPUT_QUARANTINED"),
        ("bad", "FAILED"),
        ("plain", "SUCCEEDED"),
    ):
        await harness.end(name, state)
        await harness.advance()
    assert await entries(harness) == [("good", "pending"), ("kept", "pending")]
    for name, state in (("mend", "SUCCEEDED"), ("mend2", "SUCCEEDED")):
        await harness.end(name, state)
    await harness.advance()
    await harness.end("last", "FAILED", code="fatal")
    await harness.advance()
    assert await finish_compensations(harness) == ["kept", "good"]
    assert await entries(harness) == [("good", "done"), ("kept", "done")], "compensations are not compensated"


async def test_compensation_job_inherits_the_original_job_except_overrides(harness):
    details = {"capability": "book", "risk_tags": ("money",), "tenant": "t", "pack_id": "p", "step_index": 4}
    layer = LayerSpec(task="book", input={"args": [1], "kwargs": {}}, timeout_s=7, cores=2, retries=RetrySpec(most=5))
    job = Submission(
        show="film",
        workflow_id="trip",
        labels={"a": "1", "b": "1"},
        env={"A": "1", "B": "1"},
        priority=2,
        budget=Budget(max_total_tokens=10, deadline_ms=60_000),
        requires=("gpu",),
        layers=(layer,),
        **details,
    )
    plain = msgspec.structs.replace(job, compensation=Compensation(topic="undo", priority="BATCH"))
    overrides = Compensation(
        topic="undo.it",
        task="unbook",
        context={"args": [2], "kwargs": {}},
        labels={"b": "2"},
        env={"B": "2"},
        budget=Budget(max_total_tokens=3),
        requires=("cpu",),
        capability="unbook",
        risk_tags=(),
        tenant="u",
        idempotency_key="mine",
    )
    other = msgspec.structs.replace(job, compensation=overrides)
    first, second = [one.job for one in await harness.submitter.submit([plain, other])]
    for each in (first, second):
        await end_job(harness.database, each)
    [bad] = await harness.submitter.submit([Submission(show="film", workflow_id="trip", layers=(layer,))])
    await end_job(harness.database, bad.job, "FAILED", code="fatal")
    await harness.advance()
    own = {"saga_compensation": "true", "is_compensation": "true", "saga_workflow_id": "trip"}
    ours = {"saga_compensation": "true", "saga_workflow_id": "trip"}

    [found] = await JobQueries(harness.database).get_many(list((await running_compensations(harness)).values()))
    assert (found.priority, found.topic, found.workflow_id) == (9, "undo.it", "trip")
    assert found.labels == {"a": "1", "b": "2", **own}
    assert found.details.env == {"A": "1", "B": "2", **ours}
    assert (found.details.capability, found.details.risk_tags, found.details.tenant) == ("unbook", ("money",), "u")
    assert (found.details.requires, found.details.budget) == (("cpu",), Budget(max_total_tokens=3))
    assert (found.details.idempotency_key, found.details.parent_job_id) == ("mine", second)
    assert msgspec.msgpack.decode(found.layers[0].input) == {"args": [2], "kwargs": {}}
    await end_job(harness.database, found.id)
    await harness.advance()

    [found] = await JobQueries(harness.database).get_many(list((await running_compensations(harness)).values()))
    assert (found.priority, found.topic) == (9, "undo")
    assert (found.labels, found.details.env) == ({"a": "1", "b": "1", **own}, {"A": "1", "B": "1", **ours})
    assert (found.details.requires, found.details.budget) == (("gpu",), Budget(max_total_tokens=10))
    assert (found.details.capability, found.details.parent_job_id, found.details.compensation) == ("book", first, None)
    work = found.layers[0].work
    assert (work.task, work.timeout_s, work.cores, work.retries.most) == ("book", 7, 200, 5)
    key_source = f"trip|{first}|undo|book|4"
    assert found.details.idempotency_key == f"saga:{sha256(key_source.encode()).hexdigest()[:32]}"


async def test_compensation_that_cannot_be_submitted_is_not_lost(harness):
    run = await harness.start(step("a", compensate=undo()), step("b", "a"))
    await harness.end("a")
    await harness.advance()
    await harness.end("b", "FAILED", code="fatal")
    await harness.database.run(RENAME_FOLDER)
    await harness.advance()
    assert await entries(harness) == [("a", "failed")]
    await harness.database.run(RESTORE_FOLDER)
    assert await harness.commands.roll_back(run, "ann") == 1
    await harness.advance()
    assert await finish_compensations(harness) == ["a"]


async def test_concurrent_rollbacks_start_each_compensation_once(harness, database):
    await harness.start(step("a", compensate=undo()), step("b", "a", compensate=undo()), step("c", "b"))
    for name in ("a", "b"):
        await harness.end(name)
        await harness.advance()
    await harness.end("c", "FAILED", code="fatal")
    async with database.transaction() as tx:
        assert (await harness.advancer.advancing.advance_pending(tx)).turns
    async with database.transaction() as tx:
        result = await harness.sagas.advance(tx)
        assert await WorkflowHarness(database).advance() == 0, "another transaction holds the lock"
    assert result.count == 1
    assert await finish_compensations(harness) == ["b", "a"]


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_run_ended_from_outside_is_compensated_if_configured(harness, how):
    run = await harness.start(
        step("a", compensate=undo()), step("b", "a", compensate=undo()), timeout_s=60, rollback_on=frozenset({how})
    )
    await harness.end("a")
    await harness.advance()
    if how == "cancelled":
        await harness.commands.cancel(run, "ann")
    else:
        await harness.pass_time(60)
        await harness.advance()
    assert await running_compensations(harness) == {}, "the running job may still succeed"
    await harness.end("b")
    await harness.advance()
    assert await finish_compensations(harness) == ["b", "a"]
    assert (await harness.states())[""] == how.upper()


@pytest.mark.parametrize("seed", range(8))
async def test_random_runs_compensate_completed_steps_in_reverse_order(harness, seed):
    chance = random.Random(seed)
    names = [f"s{number}" for number in range(9)]
    steps = [
        step(name, *chance.sample(names[:at], k=min(at, chance.randrange(3))), compensate=undo())
        for at, name in enumerate(names)
    ]
    run = await harness.start(*steps, step("last", *names), rollback_on=frozenset({"fatal", "failed", "quarantined"}))
    done = []
    for _ in range(12):
        states = await harness.states()
        running = [name for name, state in states.items() if state in ("RUNNING", "STOPPING") and name]
        if states[""] != "RUNNING" or not running:
            break
        for name in chance.sample(running, k=chance.randint(1, len(running))):
            ends = ["SUCCEEDED"] * 8 + ["OUTPUT_QUARANTINED", "FAILED"]
            state = "FAILED" if name == "last" else chance.choice(ends)
            await harness.end(name, state)
            done += [name] if state != "FAILED" else []
        await harness.advance()
    assert (await harness.states())[""] in ("COMPENSATING", "FAILED")
    assert await finish_compensations(harness) == done[::-1]
    assert (await harness.states(run))[""] == "FAILED"


async def rerun_with(harness, *, rolled_back):
    """Rerun a run that failed after `a` and the nested run of `sub` had succeeded."""
    await harness.declare(step("in", compensate=undo()), name="inner")
    run = await harness.start(
        step("a", compensate=undo()),
        StepSpec(id="sub", type="workflow", workflow="inner", depends_on=("a",)),
        step("c", "sub"),
        step("d", "a"),
    )
    await harness.end("a")
    await harness.advance()
    await harness.end("in", run=await harness.job("sub"))
    await harness.end("d")
    await harness.advance()
    await harness.end("c", "FAILED")
    await harness.advance()
    assert (await harness.states())[""] == "FAILED"
    if rolled_back:
        await harness.commands.roll_back(run, "ann")
        await harness.advance()
        with pytest.raises(Refused, match="being rolled back"):
            await harness.commands.rerun(run, "c", "ann")
        assert await finish_compensations(harness) == ["in", "a"]
    harness.run = (await harness.commands.rerun(run, "c", "ann")).run
    return run


async def test_rerun_takes_over_compensations_of_kept_steps(harness):
    before = await rerun_with(harness, rolled_back=False)
    assert (await harness.states())["c"] == "RUNNING"
    await harness.end("c", "FAILED", code="fatal")
    await harness.advance()
    assert await finish_compensations(harness) == ["in", "a"], "kept steps are compensated with the rerun, once"
    assert await harness.commands.roll_back(before, "ann") == 0
    harness.run = (await harness.commands.rerun(before, "c", "ann")).run
    assert (await harness.states())["a"] == "RUNNING", "a compensated step is not taken over again"


async def test_rerun_repeats_compensated_steps_and_their_dependents(harness):
    await rerun_with(harness, rolled_back=True)
    assert await harness.states() == {"": "RUNNING", "a": "RUNNING", "sub": "WAITING", "c": "WAITING", "d": "WAITING"}


async def test_second_advancer_skips_locked_run_and_finds_nothing_afterwards(harness, database):
    await harness.start(step("a"), step("b", "a"))
    await harness.end("a")
    async with database.transaction() as tx:
        assert len((await harness.advancer.advancing.advance_pending(tx)).turns) == 1
        assert await WorkflowHarness(database).advance() == 0
        assert await harness.advance() == 0, "also in the same process"
    assert await WorkflowHarness(database).advance() == 0
    assert await harness.jobs() == ["a", "b"]


async def test_locked_run_does_not_block_other_runs(harness, database):
    one, two = await harness.start(step("a"), step("b", "a")), await harness.start()
    await harness.end("a", run=one)
    async with database.transaction() as tx:
        assert len((await harness.advancer.advancing.advance_pending(tx)).turns) == 1
        await harness.end("a", run=two)
        assert await WorkflowHarness(database).advance() == 1
        assert (await harness.states(two))["b"] == "RUNNING"
    assert (await harness.states(one))["b"] == "RUNNING"


async def test_advance_with_stale_run_state_writes_nothing(harness, database):
    await harness.start(step("a"), step("b", "a"), step("c", "a"))
    await harness.end("a")
    async with database.transaction() as tx:
        done = await harness.advancer.advancing.advance_pending(tx)
    with pytest.raises(StaleFence):
        await advance_again(harness, done.turns)
    assert await harness.jobs() == ["a", "b", "c"]


async def advance_again(harness, turns):
    async with harness.database.transaction() as tx:
        await harness.advancer.advancing.advance(tx, turns)


async def test_cancel_waits_for_advance_and_stops_the_steps_it_started(harness, database):
    run = await harness.start(step("a"), step("b", "a"))
    await harness.end("a")
    async with database.transaction() as tx:
        await harness.advancer.advancing.advance_pending(tx)
        cancelling = asyncio.create_task(harness.commands.cancel(run, "ann"))
        await until(lambda: is_waiting(database), what="the cancel waiting for the run lock")
    assert await cancelling
    assert (await harness.states())["b"] == "STOPPING"
    await harness.end("b", "CANCELLED")
    await harness.advance()
    assert (await harness.states())[""] == "CANCELLED"


async def test_due_timers_do_not_deadlock_concurrent_advances(harness, database, monkeypatch):
    await harness.declare(
        step("a", compensate=undo()), step("b"), StepSpec(id="wait", type="delay", delay_sec=3600), name="inner"
    )
    await harness.start(*(StepSpec(id=name, type="workflow", workflow="inner") for name in ("one", "two")))
    one, two = await harness.job("one"), await harness.job("two")
    await harness.end("a", run=one)
    await harness.end("b", "FAILED", run=one)
    decided, written, write = asyncio.Event(), asyncio.Event(), harness.advancer.advancing._write

    async def delayed_write(*given):
        decided.set()
        await written.wait()
        await write(*given)

    monkeypatch.setattr(harness.advancer.advancing, "_write", delayed_write)
    first = asyncio.create_task(advance_once(harness))
    await decided.wait()
    await harness.pass_time(3600)
    await harness.end("a", run=two)
    second = asyncio.create_task(advance_once(WorkflowHarness(database)))
    await until(lambda: is_waiting(database), what="the second advance waiting for the first, with timers of both")
    written.set()
    assert [run.run for turns in await asyncio.gather(first, second) for run in turns] == [one, two]
    monkeypatch.undo()
    await harness.advance()
    assert await harness.timers(one) == await harness.timers(two) == []
    assert (await harness.states(two))["wait"] == "SUCCEEDED"


async def advance_once(harness):
    async with harness.database.transaction() as tx:
        return (await harness.advancer.advancing.advance_pending(tx)).turns


async def is_waiting(database):
    return await database.value(LOCK_WAITERS) > 0


@pytest.mark.parametrize("delay", [0.001, 0.5, 9, 11, 86_400])
async def test_delay_of_any_length_is_a_durable_timer_row(harness, delay):
    await harness.start(StepSpec(id="wait", type="delay", delay_sec=delay))
    assert await harness.timers() == [(0, 1)]
    await harness.pass_time(delay)
    await until(harness.advance, what="the end of the delay")
    assert (await harness.timers(), (await harness.states())["wait"]) == ([], "SUCCEEDED")


async def test_timer_fires_once_with_concurrent_advancers(harness, database):
    runs = [await harness.start(StepSpec(id="wait", type="delay", delay_sec=60), step("a", "wait")) for _ in range(5)]
    await harness.pass_time(60)
    advanced = await asyncio.gather(*(WorkflowHarness(database).advance() for _ in range(4)))
    assert sum(advanced) == 5
    assert [(await harness.timeline(run)).count(("wait", "succeeded")) for run in runs] == [1] * 5


async def test_timer_is_kept_when_the_advance_fails(harness, monkeypatch):
    await harness.start(StepSpec(id="wait", type="delay", delay_sec=60), step("a", "wait"))
    await harness.pass_time(60)

    async def fail(*_args, **_more):
        raise failpoints.LostReply("no reply")

    monkeypatch.setattr(harness.submitter, "write", fail)
    with pytest.raises(failpoints.LostReply):
        await harness.advancer.advance_batch()
    monkeypatch.undo()
    assert await harness.timers() == [(0, 1)]
    assert await harness.advance() == 1
    assert (await harness.states())["a"] == "RUNNING"


async def test_timers_of_ended_run_are_removed(harness, database):
    run = await harness.start(StepSpec(id="wait", type="delay", delay_sec=3600), step("bad"), timeout_s=60)
    assert len(await harness.timers()) == 2
    await harness.end("bad", "FAILED")
    await harness.advance()
    assert (await harness.timers(run), await database.value(TIMERS), await database.value(INBOX_SIZE)) == ([], 0, 0)


@pytest.mark.parametrize("code", ["", "fatal", "bad_input", "of a worker's own"])
def test_fatal_failure_is_not_retried(code):
    ending = decide_retry(AttemptResult(1, AttemptStatus.FAILED_FATAL, code=code), Retries(most=9), 0)
    assert ending.state == "FAILED"
    assert ending.reason in FATAL_CODES, "fatal, whatever code the worker sent"


def test_retry_delay_doubles_with_jitter():
    retries = Retries(most=3, first_s=2.0, longest_s=5.0)
    for failed, whole in ((0, 2.0), (1, 4.0), (2, 5.0)):
        endings = [decide_retry(AttemptResult(1, AttemptStatus.FAILED), retries, failed) for _ in range(50)]
        assert all(ending.state == "RETRIED" and whole / 2 <= ending.delay_s <= whole for ending in endings)
        assert len({ending.delay_s for ending in endings}) > 10
    assert decide_retry(AttemptResult(1, AttemptStatus.FAILED), retries, 3).state == "FAILED"


def test_retry_delay_honours_requested_delay_up_to_a_day():
    asked = decide_retry(AttemptResult(1, AttemptStatus.FAILED_RETRYABLE, after_s=17.0), Retries(most=1), 0)
    assert (asked.state, asked.delay_s) == ("RETRIED", 17.0)
    longest = decide_retry(AttemptResult(1, AttemptStatus.FAILED_RETRYABLE, after_s=1e9), Retries(most=1), 0)
    assert longest.delay_s == 86_400.0, "a day is the maximum"
