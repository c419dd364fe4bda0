"""W1: what succeeded is undone in reverse, each waited for, once, or ends visibly; whoever dies or is damaged."""

import msgspec
import pytest

from rota.engine.queries.jobs import JobQueries
from rota.infra import failpoints
from rota.model.errors import PostgresUnavailable, Refused
from rota.model.jobs.submission import Compensation, LayerSpec, Submission
from rota.model.policy.decision import PolicyDecision, PolicyEffect
from rota.model.workflows.spec import StepSpec
from rota.queue import Queue
from rota.workflow.sagas import Sagas
from tests.support.jobs import a_show
from tests.support.queue import sessions_over, sql
from tests.support.waiting import until
from tests.support.workflows import Room, end_job

UNDOING = sql("SELECT pk_job, str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true' ORDER BY str_name")
EVERY = sql("""
SELECT str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true'
UNION ALL SELECT str_name FROM rota.job_done WHERE labels ->> 'saga_compensation' = 'true' ORDER BY 1""")
STATES = sql("SELECT state FROM rota.job WHERE labels ->> 'saga_compensation' = 'true'")
ENTRIES = sql("SELECT step, state, error FROM rota.saga_entry ORDER BY number")
SAGA = sql("SELECT state FROM rota.saga WHERE workflow_id = $1::text")
DAMAGE = sql("UPDATE rota.saga_entry SET template = 'nonsense'::bytea WHERE step = $1::text")
RENAME = sql("UPDATE rota.show SET str_name = $2::text WHERE str_name = $1::text")
LETTERS = sql("SELECT kind, reason FROM rota.dlq_entries ORDER BY 2")


def undo(**more):
    return Compensation(topic="undo", task="undo", **more)


THREE = (
    StepSpec(id="flight", task="book", compensate=undo(context={"ticket": "${steps.flight.output.ticket}"})),
    StepSpec(id="hotel", task="book", depends_on=("flight",), compensate=undo()),
    StepSpec(id="car", task="book", depends_on=("hotel",), compensate=undo()),
    StepSpec(id="pay", task="pay", depends_on=("car",)),
)


@pytest.fixture
async def room(database):
    await a_show(database)
    return Room(database)


async def undoing(room):
    """Compensations that run now."""
    return {row["str_name"].removeprefix("undo flow."): row["pk_job"] for row in await room.database.rows(UNDOING)}


async def every_undo(room):
    return [row["str_name"].removeprefix("undo flow.") for row in await room.database.rows(EVERY)]


async def entries(room):
    return [(row["step"], row["state"]) for row in await room.database.rows(ENTRIES)]


async def letters(room):
    return [tuple(row.values()) for row in await room.database.rows(LETTERS)]


async def booked(room, *steps, run=None, **more):
    """A run whose last step is about to run."""
    run = run or await room.start(*(steps or THREE), **more)
    for step in ("flight", "hotel", "car"):
        await room.end(step, value={"ticket": f"of {step}"}, run=run)
        await room.advance()
    return run


async def fail(room, run=None):
    await room.end("pay", "FAILED", code="fatal", error="no money", run=run)
    await room.advance()


async def undo_next(room, step, state="SUCCEEDED", **more):
    running = await undoing(room)
    assert list(running) == [step], "one at a time, the last first"
    await end_job(room.database, running[step], state, **more)
    await room.advance()


async def test_what_succeeded_is_undone_in_reverse_and_each_is_waited_for(room):
    run = await booked(room)
    await fail(room)
    assert (await room.states())[""] == "COMPENSATING"
    for step in ("car", "hotel", "flight"):
        await undo_next(room, step)
    assert (await room.states())[""] == "FAILED"
    assert await entries(room) == [("flight", "done"), ("hotel", "done"), ("car", "done")]
    assert await room.database.value(SAGA, str(run)) == "rolled_back"
    told = [what for step, what in await room.told() if not step]
    assert told == ["began", "ending", "compensating", "failed"]


async def test_a_compensation_is_critical_and_says_what_it_is(room):
    run = await booked(room)
    await fail(room)
    await undo_next(room, "car")
    await undo_next(room, "hotel")
    flight = (await undoing(room))["flight"]
    [job] = await JobQueries(room.database).get_many([flight])
    assert (job.priority, job.topic, job.workflow_id) == (9, "undo", str(run))
    assert job.labels == {"saga_compensation": "true", "is_compensation": "true", "saga_workflow_id": str(run)}
    assert job.details.env == {"saga_compensation": "true", "saga_workflow_id": str(run)}
    assert job.details.idempotency_key.startswith("saga:")
    assert job.details.parent_job_id == await room.job("flight")
    given = msgspec.msgpack.decode(job.layers[0].input)
    assert given == {"args": [], "kwargs": {"ticket": "of flight"}}
    await undo_next(room, "flight")


async def test_a_run_that_succeeds_forgets_what_undoes_it(room):
    run = await booked(room)
    await room.end("pay")
    await room.advance()
    assert (await room.states())[""] == "SUCCEEDED"
    assert await room.database.value(SAGA, str(run)) is None
    with pytest.raises(Refused, match="nothing to undo"):
        await room.desk.roll_back(run, "ann")


@pytest.mark.parametrize(
    ("state", "on", "undone"),
    [
        ("FAILED", {"fatal"}, False),
        ("FAILED", {"failed"}, True),
        ("TIMEOUT", {"fatal"}, False),
        ("TIMEOUT", {"timeout"}, True),
        ("DENIED", {"denied"}, True),
        ("OUTPUT_QUARANTINED", {"quarantined"}, True),
    ],
)
async def test_a_workflow_chooses_which_ends_are_undone(room, state, on, undone):
    await booked(room, *THREE, rollback_on=frozenset(on))
    await room.end("pay", state)
    await room.advance()
    assert ((await room.states())[""] == "COMPENSATING") is undone
    assert list(await undoing(room)) == (["car"] if undone else [])


async def test_a_cancelled_run_is_undone_if_its_workflow_says_so(room):
    run = await booked(room, *THREE, rollback_on=frozenset({"cancelled"}))
    await room.desk.cancel(run, "ann")
    await room.end("pay", "CANCELLED")
    await room.advance()
    assert list(await undoing(room)) == ["car"]


async def test_an_output_that_is_kept_back_was_work_that_is_undone(room):
    await room.start(StepSpec(id="a", task="book", compensate=undo(), on_error="mend"), StepSpec(id="mend", task="pay"))
    await room.end("a", "OUTPUT_QUARANTINED")
    await room.advance()
    await room.end("mend", "FAILED", code="fatal")
    await room.advance()
    assert list(await undoing(room)) == ["a"]


async def test_what_cannot_be_undone_is_visible_and_a_person_may_have_it_tried_again(room):
    run = await booked(room)
    await fail(room)
    await undo_next(room, "car")
    await undo_next(room, "hotel", "FAILED", code="exception", error="no answer")
    await undo_next(room, "flight")
    assert await entries(room) == [("flight", "done"), ("hotel", "failed"), ("car", "done")]
    assert await room.database.value(SAGA, str(run)) == "incomplete"
    assert await letters(room) == [("saga", "saga_compensation_failed")]
    assert (await room.states())[""] == "FAILED"

    assert await room.desk.roll_back(run, "ann") == 1
    await room.advance()
    await undo_next(room, "hotel")
    assert await room.database.value(SAGA, str(run)) == "rolled_back"
    assert await every_undo(room) == ["car", "flight", "hotel", "hotel"]
    assert await room.desk.roll_back(run, "ann") == 0, "there is nothing left to undo"
    await room.advance()
    assert await undoing(room) == {}


async def test_a_damaged_entry_is_a_dead_letter_and_the_rest_goes_on(room):
    await booked(room)
    await room.database.run(DAMAGE, "hotel")
    await fail(room)
    await undo_next(room, "car")
    await undo_next(room, "flight")
    assert await entries(room) == [("flight", "done"), ("hotel", "corrupt"), ("car", "done")]
    assert await letters(room) == [("saga", "saga_unmarshal_failed")]
    assert (await room.states())[""] == "FAILED"


class Kernel:
    """Denies what runs for the hotel, or does not answer."""

    def __init__(self, *, away=False):
        self.away = away

    async def check(self, questions):
        if self.away:
            raise PostgresUnavailable("nobody there")
        return [
            PolicyDecision(says=PolicyEffect.DENY if self.hotel in question.jobs else PolicyEffect.ALLOW)
            for question in questions
        ]


async def test_a_compensation_that_is_denied_is_skipped_and_the_rest_goes_on(room):
    await booked(room)
    room.sagas.kernel = Kernel()
    room.sagas.kernel.hotel = await room.job("hotel")
    await fail(room)
    await undo_next(room, "car")
    await undo_next(room, "flight")
    assert await entries(room) == [("flight", "done"), ("hotel", "skipped"), ("car", "done")]
    assert await letters(room) == [("saga", "saga_compensation_denied")]


async def test_a_policy_that_does_not_answer_stops_nobody_from_undoing(room):
    await booked(room)
    room.sagas.kernel = Kernel(away=True)
    await fail(room)
    for step in ("car", "hotel", "flight"):
        await undo_next(room, step)


async def test_two_runs_of_one_definition_undo_their_own_alone(room):
    one = await booked(room)
    two = await booked(room, run=await room.start())
    await fail(room, run=one)
    for step in ("car", "hotel", "flight"):
        await undo_next(room, step)
    assert (await room.states(one))[""] == "FAILED"
    assert (await room.states(two))[""] == "RUNNING"
    assert (await entries(room))[3:] == [("flight", "pending"), ("hotel", "pending"), ("car", "pending")]


async def test_what_a_run_inside_a_run_did_is_undone_with_it(room):
    await room.declare(StepSpec(id="book", task="book", compensate=undo()), name="inner")
    run = await room.start(
        StepSpec(id="sub", type="workflow", workflow="inner"), StepSpec(id="pay", task="pay", depends_on=("sub",))
    )
    await room.end("book", run=await room.job("sub"))
    await room.advance()
    await fail(room)
    [(name, job)] = (await undoing(room)).items()
    assert name == "undo inner.book"
    await end_job(room.database, job)
    await room.advance()
    assert (await room.states(run))[""] == "FAILED"


class Joining:
    """Jobs outside of any workflow, which name a saga as theirs."""

    def __init__(self, room):
        self.room = room

    async def run(self, name, state="SUCCEEDED", saga="trip", show="film", **more):
        [submitted] = await self.room.submitter.submit(
            [Submission(show=show, name=f"flow.{name}", workflow_id=saga, layers=(LayerSpec(task="book"),), **more)]
        )
        await end_job(self.room.database, submitted.job, state, code="fatal" if state == "FAILED" else None)
        await self.room.advance()


async def test_jobs_outside_of_a_workflow_may_join_a_saga(room):
    jobs = Joining(room)
    await jobs.run("one", compensation=undo())
    await jobs.run("plain")
    await jobs.run("two", compensation=undo(idempotency_key="mine", labels={"why": "because"}))
    await jobs.run("elsewhere", saga="other", compensation=undo())
    assert await undoing(room) == {}
    await jobs.run("bad", "FAILED", compensation=undo())
    [job] = await JobQueries(room.database).get_many([(await undoing(room))["two"]])
    assert (job.details.idempotency_key, job.labels["why"]) == ("mine", "because")
    await undo_next(room, "two")
    await undo_next(room, "one")
    assert await room.database.value(SAGA, "trip") == "rolled_back"
    assert await room.database.value(SAGA, "other") == "open"


async def test_a_job_that_joined_a_run_and_is_heard_of_after_its_end_is_recorded_all_the_same(room):
    run = await room.start(StepSpec(id="pay", task="pay"))
    joins = Submission(show="film", workflow_id=str(run), layers=(LayerSpec(task="book"),), compensation=undo())
    [late] = await room.submitter.submit([joins])
    await room.end("pay")
    await end_job(room.database, late.job)
    assert await room.advancer.advance_batch(most=1) == 1
    assert (await room.states())[""] == "SUCCEEDED"
    await room.advance()
    assert [tuple(row) for row in await room.database.rows(ENTRIES)] == [("", "pending", None)]


async def test_a_job_that_joined_a_run_inside_a_run_is_undone_with_the_outer_one_when_that_has_ended(room):
    await room.declare(StepSpec(id="in", type="notify", notify="hello"), name="inner")
    run = await room.start(
        StepSpec(id="sub", type="workflow", workflow="inner"), StepSpec(id="pay", task="pay", depends_on=("sub",))
    )
    await room.advance()
    inner, jobs = str(await room.job("sub")), Joining(room)
    await jobs.run("late", saga=inner, compensation=undo())
    await jobs.run("bad", "FAILED", saga=inner)
    assert await undoing(room) == {}, "the outer run goes on"
    assert await room.database.value(SAGA, str(run)) == "open"
    await fail(room)
    await undo_next(room, "late")
    assert (await room.states(run))[""] == "FAILED"


async def test_what_a_run_did_is_undone_as_its_workflow_says_whatever_is_tried_again_afterwards(room):
    run = await booked(room, *THREE, rollback_on=frozenset({"timeout"}))
    await fail(room)
    assert (await room.states(run))[""] == "FAILED"
    await Joining(room).run("pay", "FAILED", saga=str(run))
    assert await undoing(room) == {}
    assert await room.database.value(SAGA, str(run)) == "open"
    assert await room.desk.roll_back(run, "ann") == 3


async def test_a_compensation_whose_output_is_kept_back_has_undone_what_it_was_to(room):
    await booked(room)
    await fail(room)
    await undo_next(room, "car", "OUTPUT_QUARANTINED")
    assert (await entries(room))[-1] == ("car", "done")
    assert list(await undoing(room)) == ["hotel"]


async def test_a_second_failure_undoes_nothing_twice_and_what_succeeds_too_late_is_undone_as_well(room):
    jobs = Joining(room)
    await jobs.run("one", compensation=undo())
    await jobs.run("bad", "FAILED")
    await jobs.run("worse", "FAILED")
    await undo_next(room, "one")
    await jobs.run("late", compensation=undo())
    await undo_next(room, "late")
    await jobs.run("worst", "FAILED")
    assert await undoing(room) == {}
    assert await every_undo(room) == ["late", "one"]


async def test_a_saga_of_another_show_is_another_saga(room):
    await a_show(room.database, "second", depts=())
    jobs = Joining(room)
    await jobs.run("one", compensation=undo())
    await jobs.run("bad", "FAILED", show="second")
    assert await undoing(room) == {}


async def test_the_steps_of_a_show_that_was_renamed_run_in_it_whoever_has_its_name_now(room):
    inner = StepSpec(id="book", task="book")
    await room.declare(inner, name="inner")
    first, after = StepSpec(id="first", task="book"), {"depends_on": ("first",)}
    run = await room.start(
        first,
        StepSpec(id="one", task="book", **after),
        StepSpec(id="items", task="book", for_each=[1, 2], **after),
        StepSpec(id="sub", type="workflow", workflow="inner", **after),
    )
    await room.database.run(RENAME, "film", "feature")
    await a_show(room.database, "film", depts=())
    await room.end("first", run=run)
    await room.advance()
    jobs = [
        await room.job("one", run),
        await room.job("items", run),
        await room.job("book", await room.job("sub", run)),
    ]
    assert {job.show for job in await JobQueries(room.database).get_many(jobs)} == {"feature"}


async def test_a_show_that_was_renamed_undoes_in_itself_whoever_has_its_name_now(room):
    run = await booked(room)
    await room.database.run(RENAME, "film", "feature")
    await a_show(room.database, "film", depts=())
    await fail(room)
    for step in ("car", "hotel", "flight"):
        [job] = await JobQueries(room.database).get_many(list((await undoing(room)).values()))
        assert job.show == "feature"
        await undo_next(room, step)
    assert (await room.states(run))[""] == "FAILED"


SAGA_PLACES = {
    "saga.after_take",
    "saga.before_heard",
    "saga.after_due",
    "saga.before_commit",
    "saga.hear",
    "saga.go_on",
}
PLACES = [
    (kind, name)
    for kind, name in failpoints.declared_failpoints()
    if name in SAGA_PLACES or name in ("workflow.after_take", "workflow.before_commit", "workflow.advance")
]


@pytest.mark.parametrize(("kind", "place"), PLACES, ids=[name for _, name in PLACES])
async def test_dying_or_losing_a_reply_undoes_each_once_and_in_order(spawn, database_url, room, kind, place):
    await booked(room)
    await room.end("pay", "FAILED", code="fatal")
    arm = {"CRASH_AT" if kind == "hit" else "LOST_REPLY_AT": place}

    async def die():
        client = await spawn("tests.integration.workflow.workflow_client", env={"URL": database_url, **arm})
        assert await client.wait() in (failpoints.CRASH_EXIT_STATUS, 0), await client.errors()
        await sessions_over(room.database)

    async def running():
        await room.advance()
        return await undoing(room)

    await die()
    for step in ("car", "hotel", "flight"):
        jobs = await until(running, what=f"the compensation of {step}")
        assert list(jobs) == [step]
        await end_job(room.database, jobs[step])
        if step == "car":
            await die()
    assert await running() == {}
    assert await every_undo(room) == ["car", "flight", "hotel"]
    assert (await room.states())[""] == "FAILED"


async def test_whoever_starts_a_run_submits_what_undoes_it_whoever_its_compensation_names(room):
    await room.start(
        StepSpec(id="a", task="book", compensate=undo(principal="bob")),
        StepSpec(id="b", task="pay", depends_on=("a",)),
        rollback_on=("failed",),
    )
    await room.end("a")
    await room.advance()
    await room.end("b", "FAILED", error="no")
    await room.advance()
    [job] = (await undoing(room)).values()
    assert (await JobQueries(room.database).get(job)).details.principal == "ann"


@pytest.mark.parametrize("fails", [RuntimeError("what now"), PostgresUnavailable("away"), None])
async def test_a_kernel_that_fails_holds_up_no_saga_and_what_undoes_waits_at_the_gate(room, fails):
    class Failing:
        async def check(self, questions):
            if fails is not None:
                raise fails
            return []

    room.advancer.advancing.sagas = Sagas(room.database, Queue(room.database).dead_letters, Failing())
    await booked(room)
    await fail(room)
    states = [row["state"] for row in await room.database.rows(STATES)]
    assert states == ["PENDING"], "nothing runs without a word, whatever the guard says"


async def test_nothing_is_undone_before_a_run_inside_that_took_too_long_was_stopped(room):
    await room.declare(StepSpec(id="pay", task="pay", compensate=undo()), name="inner")
    run = await room.start(
        StepSpec(id="flight", task="book", compensate=undo()),
        StepSpec(id="sub", type="workflow", workflow="inner", depends_on=("flight",), deadline_s=60),
        rollback_on=frozenset({"timeout"}),
    )
    await room.end("flight")
    await room.advance()
    inner = await room.job("sub")
    await room.pass_time(61)
    await room.advance()
    assert await undoing(room) == {}, "its job may still succeed"
    await room.end("pay", run=inner)
    await room.advance()
    assert (await room.states(run)) | {"": ""} == {"": "", "flight": "SUCCEEDED", "sub": "TIMEOUT"}
    [last] = (await undoing(room)).values()
    await end_job(room.database, last)
    await room.advance()
    assert [state for _, state in await entries(room)] == ["running", "done"]
