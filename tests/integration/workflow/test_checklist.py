"""What schedulers of this kind must hold about sagas, run locks, delay timers and retries, line by line.

Where no file is named the test is here; `sagas`, `killed`, `ends`, `runs`, `net` are the files test_workflow_*.py.

| sagas | shown by |
|---|---|
| recorded for what succeeded, has a compensation and is none | `is_recorded_for_what_succeeded_alone` |
| the last first, each waited for | sagas `undone_in_reverse`; `random_runs_undo_exactly` |
| CRITICAL, labels, env, overrides, key generated or given | `is_the_job_itself_but_for` |
| its time limit is that of the job it undoes | `is_the_job_itself_but_for` |
| denied: skipped and seen; no answer: goes on | sagas `is_denied_is_skipped`, `does_not_answer` |
| damaged: a dead letter, and the rest goes on | sagas `damaged_entry` |
| each run alone, and each show | sagas `undo_their_own_alone`, `of_another_show` |
| a submission that fails loses nothing | `cannot_be_submitted_is_not_lost`; sagas `dying_or_losing` |
| a second rollback does nothing | sagas `undoes_nothing_twice`; `of_two_who_roll_back_at_once` |
| which ends undo | ends `each_way_to_fail`; `ended_from_outside` |
| cleared on success, resumed by people | sagas `forgets_what_undoes_it`, `have_it_tried_again` |
| a rerun keeps nothing that was undone, and what undoes the rest | `a_rerun_takes_over`, `a_rerun_runs_again` |

| run locks | shown by |
|---|---|
| one at a time, here and elsewhere | `who_comes_second`; killed `advancing_twice_at_once` |
| different runs do not wait | `holds_up_no_other` |
| the lock of who died or is paused ends | killed `dying_or_losing`, `paused_in_the_middle` |
| who has read something older writes nothing | `of_what_has_changed_since` |
| nothing is left of a lock that is over | it is that of a row: there is nothing to clean up |
| people, the net and advances never wait in a circle | `people_wait_for_an_advance`, `timers_that_are_due` |
| delivered twice, advanced once | `who_comes_second`; tests/property, where news come twice |

| delay timers | shown by |
|---|---|
| all are durable, however short | `however_short` |
| popped once, removed when fired, kept when what follows fails | `fires_once_among_many`, `is_kept_when` |
| past ones fire at the start, later ones later, none is dropped | killed `outage_of_days`, `wrong_by_hours` |
| two of one run both fire | runs `two_delays_of_one_run` |
| those of runs that have ended go, and nothing else | `timers_of_a_run_that_has_ended` |

| retries | shown by |
|---|---|
| pauses double and differ; fatal and denied are not tried again | `pauses_that_double`, `failed_for_good_is_not` |
| pauses are as durable as the queue, and as long as asked for | test_queue `a_retry_waits`; `as_long_as_it_asks` |
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
from tests.support.workflows import NEWS, Room, end_job

UNDOING = sql("SELECT pk_job, str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true' ORDER BY str_name")
ENTRIES = sql(
    "SELECT e.step, e.state, s.workflow_id FROM rota.saga_entry e JOIN rota.saga s USING (pk_saga) ORDER BY number"
)
WAITERS = sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
TIMERS = sql("SELECT count(*) FROM rota.workflow_timer")
FORGET_FOLDER = sql("UPDATE rota.folder SET str_name = 'gone' WHERE str_name = 'default'")
FOUND_FOLDER = sql("UPDATE rota.folder SET str_name = 'default' WHERE str_name = 'gone'")


def undo(**more):
    return Compensation(topic="undo", task="undo", **more)


def step(name, *before, **more):
    return StepSpec(id=name, task="work", depends_on=before, **more)


@pytest.fixture
async def room(database):
    await a_show(database)
    return Room(database)


async def undoing(room):
    """Compensations that run now, by the step that they undo."""
    return {row["str_name"].rpartition(".")[2]: row["pk_job"] for row in await room.database.rows(UNDOING)}


async def undo_all(room):
    """Have every compensation succeed; of which steps they were, in order."""
    order = []
    while running := await undoing(room):
        [(name, job)] = running.items()
        order.append(name)
        await end_job(room.database, job)
        await room.advance()
    return order


async def entries(room):
    return [(row["step"], row["state"]) for row in await room.database.rows(ENTRIES)]


async def test_what_undoes_a_job_is_recorded_for_what_succeeded_alone(room):
    await room.start(
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
        await room.end(name, state)
        await room.advance()
    assert await entries(room) == [("good", "pending"), ("kept", "pending")]
    for name, state in (("mend", "SUCCEEDED"), ("mend2", "SUCCEEDED")):
        await room.end(name, state)
    await room.advance()
    await room.end("last", "FAILED", code="fatal")
    await room.advance()
    assert await undo_all(room) == ["kept", "good"]
    assert await entries(room) == [("good", "done"), ("kept", "done")], "what undoes is not undone"


async def test_a_compensation_is_the_job_itself_but_for_what_it_says_differently(room):
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
    told = Compensation(
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
    other = msgspec.structs.replace(job, compensation=told)
    first, second = [one.job for one in await room.submitter.submit([plain, other])]
    for each in (first, second):
        await end_job(room.database, each)
    [bad] = await room.submitter.submit([Submission(show="film", workflow_id="trip", layers=(layer,))])
    await end_job(room.database, bad.job, "FAILED", code="fatal")
    await room.advance()
    own = {"saga_compensation": "true", "is_compensation": "true", "saga_workflow_id": "trip"}
    ours = {"saga_compensation": "true", "saga_workflow_id": "trip"}

    [found] = await JobQueries(room.database).get_many(list((await undoing(room)).values()))
    assert (found.priority, found.topic, found.workflow_id) == (9, "undo.it", "trip")
    assert found.labels == {"a": "1", "b": "2", **own}
    assert found.details.env == {"A": "1", "B": "2", **ours}
    assert (found.details.capability, found.details.risk_tags, found.details.tenant) == ("unbook", ("money",), "u")
    assert (found.details.requires, found.details.budget) == (("cpu",), Budget(max_total_tokens=3))
    assert (found.details.idempotency_key, found.details.parent_job_id) == ("mine", second)
    assert msgspec.msgpack.decode(found.layers[0].input) == {"args": [2], "kwargs": {}}
    await end_job(room.database, found.id)
    await room.advance()

    [found] = await JobQueries(room.database).get_many(list((await undoing(room)).values()))
    assert (found.priority, found.topic) == (9, "undo")
    assert (found.labels, found.details.env) == ({"a": "1", "b": "1", **own}, {"A": "1", "B": "1", **ours})
    assert (found.details.requires, found.details.budget) == (("gpu",), Budget(max_total_tokens=10))
    assert (found.details.capability, found.details.parent_job_id, found.details.compensation) == ("book", first, None)
    work = found.layers[0].work
    assert (work.task, work.timeout_s, work.cores, work.retries.most) == ("book", 7, 200, 5)
    words = f"trip|{first}|undo|book|4"
    assert found.details.idempotency_key == f"saga:{sha256(words.encode()).hexdigest()[:32]}"


async def test_a_compensation_that_cannot_be_submitted_is_not_lost(room):
    run = await room.start(step("a", compensate=undo()), step("b", "a"))
    await room.end("a")
    await room.advance()
    await room.end("b", "FAILED", code="fatal")
    await room.database.run(FORGET_FOLDER)
    await room.advance()
    assert await entries(room) == [("a", "failed")]
    await room.database.run(FOUND_FOLDER)
    assert await room.desk.roll_back(run, "ann") == 1
    await room.advance()
    assert await undo_all(room) == ["a"]


async def test_of_two_who_roll_back_at_once_one_begins_each_compensation(room, database):
    await room.start(step("a", compensate=undo()), step("b", "a", compensate=undo()), step("c", "b"))
    for name in ("a", "b"):
        await room.end(name)
        await room.advance()
    await room.end("c", "FAILED", code="fatal")
    async with database.transaction() as tx:
        assert (await room.advancer.advancing.advance_pending(tx)).turns
    async with database.transaction() as tx:
        told = await room.sagas.advance(tx)
        assert await Room(database).advance() == 0, "somebody else is at it"
    assert told.count == 1
    assert await undo_all(room) == ["b", "a"]


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_a_run_that_is_ended_from_outside_is_undone_if_its_workflow_says_so(room, how):
    run = await room.start(
        step("a", compensate=undo()), step("b", "a", compensate=undo()), timeout_s=60, rollback_on=frozenset({how})
    )
    await room.end("a")
    await room.advance()
    if how == "cancelled":
        await room.desk.cancel(run, "ann")
    else:
        await room.pass_time(60)
        await room.advance()
    assert await undoing(room) == {}, "what runs may still succeed"
    await room.end("b")
    await room.advance()
    assert await undo_all(room) == ["b", "a"]
    assert (await room.states())[""] == how.upper()


@pytest.mark.parametrize("seed", range(8))
async def test_random_runs_undo_exactly_what_succeeded_in_reverse(room, seed):
    chance = random.Random(seed)
    names = [f"s{number}" for number in range(9)]
    steps = [
        step(name, *chance.sample(names[:at], k=min(at, chance.randrange(3))), compensate=undo())
        for at, name in enumerate(names)
    ]
    run = await room.start(*steps, step("last", *names), rollback_on=frozenset({"fatal", "failed", "quarantined"}))
    done = []
    for _ in range(12):
        states = await room.states()
        running = [name for name, state in states.items() if state in ("RUNNING", "STOPPING") and name]
        if states[""] != "RUNNING" or not running:
            break
        for name in chance.sample(running, k=chance.randint(1, len(running))):
            ends = ["SUCCEEDED"] * 8 + ["OUTPUT_QUARANTINED", "FAILED"]
            state = "FAILED" if name == "last" else chance.choice(ends)
            await room.end(name, state)
            done += [name] if state != "FAILED" else []
        await room.advance()
    assert (await room.states())[""] in ("COMPENSATING", "FAILED")
    assert await undo_all(room) == done[::-1]
    assert (await room.states(run))[""] == "FAILED"


async def rerun_with(room, *, rolled_back):
    """A run that failed after `a` and the run inside `sub` had succeeded."""
    await room.declare(step("in", compensate=undo()), name="inner")
    run = await room.start(
        step("a", compensate=undo()),
        StepSpec(id="sub", type="workflow", workflow="inner", depends_on=("a",)),
        step("c", "sub"),
        step("d", "a"),
    )
    await room.end("a")
    await room.advance()
    await room.end("in", run=await room.job("sub"))
    await room.end("d")
    await room.advance()
    await room.end("c", "FAILED")
    await room.advance()
    assert (await room.states())[""] == "FAILED"
    if rolled_back:
        await room.desk.roll_back(run, "ann")
        await room.advance()
        with pytest.raises(Refused, match="being rolled back"):
            await room.desk.rerun(run, "c", "ann")
        assert await undo_all(room) == ["in", "a"]
    room.run = (await room.desk.rerun(run, "c", "ann")).run
    return run


async def test_a_rerun_takes_over_what_undoes_the_steps_that_it_keeps(room):
    before = await rerun_with(room, rolled_back=False)
    assert (await room.states())["c"] == "RUNNING"
    await room.end("c", "FAILED", code="fatal")
    await room.advance()
    assert await undo_all(room) == ["in", "a"], "what came before is undone with it, once"
    assert await room.desk.roll_back(before, "ann") == 0
    room.run = (await room.desk.rerun(before, "c", "ann")).run
    assert (await room.states())["a"] == "RUNNING", "and is not taken over by anybody afterwards"


async def test_a_rerun_runs_again_what_was_undone_and_all_that_comes_after_it(room):
    await rerun_with(room, rolled_back=True)
    assert await room.states() == {"": "RUNNING", "a": "RUNNING", "sub": "WAITING", "c": "WAITING", "d": "WAITING"}


async def test_who_comes_second_finds_a_run_that_is_being_advanced_and_nothing_afterwards(room, database):
    await room.start(step("a"), step("b", "a"))
    await room.end("a")
    async with database.transaction() as tx:
        assert len((await room.advancer.advancing.advance_pending(tx)).turns) == 1
        assert await Room(database).advance() == 0
        assert await room.advance() == 0, "the same process is no exception"
    assert await Room(database).advance() == 0
    assert await room.jobs() == ["a", "b"]


async def test_a_run_that_is_being_advanced_holds_up_no_other(room, database):
    one, two = await room.start(step("a"), step("b", "a")), await room.start()
    await room.end("a", run=one)
    async with database.transaction() as tx:
        assert len((await room.advancer.advancing.advance_pending(tx)).turns) == 1
        await room.end("a", run=two)
        assert await Room(database).advance() == 1
        assert (await room.states(two))["b"] == "RUNNING"
    assert (await room.states(one))["b"] == "RUNNING"


async def test_an_advance_of_what_has_changed_since_writes_nothing(room, database):
    await room.start(step("a"), step("b", "a"), step("c", "a"))
    await room.end("a")
    async with database.transaction() as tx:
        done = await room.advancer.advancing.advance_pending(tx)
    with pytest.raises(StaleFence):
        await advance_again(room, done.turns)
    assert await room.jobs() == ["a", "b", "c"]


async def advance_again(room, turns):
    async with room.database.transaction() as tx:
        await room.advancer.advancing.advance(tx, turns)


async def test_people_wait_for_an_advance_and_then_end_what_it_began(room, database):
    run = await room.start(step("a"), step("b", "a"))
    await room.end("a")
    async with database.transaction() as tx:
        await room.advancer.advancing.advance_pending(tx)
        cancelling = asyncio.create_task(room.desk.cancel(run, "ann"))
        await until(lambda: is_waited(database), what="the cancel to wait for the run")
    assert await cancelling
    assert (await room.states())["b"] == "STOPPING"
    await room.end("b", "CANCELLED")
    await room.advance()
    assert (await room.states())[""] == "CANCELLED"


async def test_timers_that_are_due_are_waited_for_by_nobody_who_holds_what_others_need(room, database, monkeypatch):
    await room.declare(
        step("a", compensate=undo()), step("b"), StepSpec(id="wait", type="delay", delay_sec=3600), name="inner"
    )
    await room.start(*(StepSpec(id=name, type="workflow", workflow="inner") for name in ("one", "two")))
    one, two = await room.job("one"), await room.job("two")
    await room.end("a", run=one)
    await room.end("b", "FAILED", run=one)
    decided, written, write = asyncio.Event(), asyncio.Event(), room.advancer.advancing._write

    async def later(*given):
        decided.set()
        await written.wait()
        await write(*given)

    monkeypatch.setattr(room.advancer.advancing, "_write", later)
    first = asyncio.create_task(take_once(room))
    await decided.wait()
    await room.pass_time(3600)
    await room.end("a", run=two)
    second = asyncio.create_task(take_once(Room(database)))
    await until(lambda: is_waited(database), what="the second to wait for that, with timers of both")
    written.set()
    assert [run.run for turns in await asyncio.gather(first, second) for run in turns] == [one, two]
    monkeypatch.undo()
    await room.advance()
    assert await room.timers(one) == await room.timers(two) == []
    assert (await room.states(two))["wait"] == "SUCCEEDED"


async def take_once(room):
    async with room.database.transaction() as tx:
        return (await room.advancer.advancing.advance_pending(tx)).turns


async def is_waited(database):
    return await database.value(WAITERS) > 0


@pytest.mark.parametrize("delay", [0.001, 0.5, 9, 11, 86_400])
async def test_however_short_a_delay_is_it_is_a_row(room, delay):
    await room.start(StepSpec(id="wait", type="delay", delay_sec=delay))
    assert await room.timers() == [(0, 1)]
    await room.pass_time(delay)
    await until(room.advance, what="the delay to be over")
    assert (await room.timers(), (await room.states())["wait"]) == ([], "SUCCEEDED")


async def test_a_timer_fires_once_among_many(room, database):
    runs = [await room.start(StepSpec(id="wait", type="delay", delay_sec=60), step("a", "wait")) for _ in range(5)]
    await room.pass_time(60)
    advanced = await asyncio.gather(*(Room(database).advance() for _ in range(4)))
    assert sum(advanced) == 5
    assert [(await room.told(run)).count(("wait", "succeeded")) for run in runs] == [1] * 5


async def test_a_timer_is_kept_when_what_follows_fails(room, monkeypatch):
    await room.start(StepSpec(id="wait", type="delay", delay_sec=60), step("a", "wait"))
    await room.pass_time(60)

    async def fail(*_args, **_more):
        raise failpoints.LostReply("nobody there")

    monkeypatch.setattr(room.submitter, "write", fail)
    with pytest.raises(failpoints.LostReply):
        await room.advancer.advance_batch()
    monkeypatch.undo()
    assert await room.timers() == [(0, 1)]
    assert await room.advance() == 1
    assert (await room.states())["a"] == "RUNNING"


async def test_timers_of_a_run_that_has_ended_are_removed(room, database):
    run = await room.start(StepSpec(id="wait", type="delay", delay_sec=3600), step("bad"), timeout_s=60)
    assert len(await room.timers()) == 2
    await room.end("bad", "FAILED")
    await room.advance()
    assert (await room.timers(run), await database.value(TIMERS), await database.value(NEWS)) == ([], 0, 0)


@pytest.mark.parametrize("code", ["", "fatal", "bad_input", "of a worker's own"])
def test_what_failed_for_good_is_not_tried_again(code):
    ending = decide_retry(AttemptResult(1, AttemptStatus.FAILED_FATAL, code=code), Retries(most=9), 0)
    assert ending.state == "FAILED"
    assert ending.reason in FATAL_CODES, "and counts as that, whatever its worker calls it"


def test_a_step_is_tried_again_after_pauses_that_double_and_differ():
    retries = Retries(most=3, first_s=2.0, longest_s=5.0)
    for failed, whole in ((0, 2.0), (1, 4.0), (2, 5.0)):
        endings = [decide_retry(AttemptResult(1, AttemptStatus.FAILED), retries, failed) for _ in range(50)]
        assert all(ending.state == "RETRIED" and whole / 2 <= ending.delay_s <= whole for ending in endings)
        assert len({ending.delay_s for ending in endings}) > 10
    assert decide_retry(AttemptResult(1, AttemptStatus.FAILED), retries, 3).state == "FAILED"


def test_a_step_waits_as_long_as_it_asks_for():
    asked = decide_retry(AttemptResult(1, AttemptStatus.FAILED_RETRYABLE, after_s=17.0), Retries(most=1), 0)
    assert (asked.state, asked.delay_s) == ("RETRIED", 17.0)
    patient = decide_retry(AttemptResult(1, AttemptStatus.FAILED_RETRYABLE, after_s=1e9), Retries(most=1), 0)
    assert patient.delay_s == 86_400.0, "a day is the most"
