"""W1: completed steps are compensated in reverse, one at a time and once, or fail visibly, also after crashes."""

import msgspec
import pytest

from rota.engine.queries.jobs import JobQueries
from rota.infra import failpoints
from rota.model.errors import PostgresUnavailable, Refused
from rota.model.jobs.submission import Compensation, LayerSpec, Submission
from rota.model.policy.decision import PolicyDecision, PolicyEffect
from rota.model.workflows.spec import StepSpec
from rota.queue import Queue
from rota.workflow.notifier import UnpublishedRuns
from rota.workflow.sagas import Sagas
from tests.support.jobs import a_show
from tests.support.queue import sessions_over, sql
from tests.support.waiting import until
from tests.support.workflows import WorkflowHarness, end_job

COMPENSATIONS = sql(
    "SELECT pk_job, str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true' ORDER BY str_name"
)
ALL_COMPENSATIONS = sql("""
SELECT str_name FROM rota.job WHERE labels ->> 'saga_compensation' = 'true'
UNION ALL SELECT str_name FROM rota.job_done WHERE labels ->> 'saga_compensation' = 'true' ORDER BY 1""")
STATES = sql("SELECT state FROM rota.job WHERE labels ->> 'saga_compensation' = 'true'")
ENTRIES = sql("SELECT step, state, error FROM rota.saga_entry ORDER BY number")
SAGA = sql("SELECT state FROM rota.saga WHERE workflow_id = $1::text")
DAMAGE = sql("UPDATE rota.saga_entry SET template = 'nonsense'::bytea WHERE step = $1::text")
RENAME = sql("UPDATE rota.show SET str_name = $2::text WHERE str_name = $1::text")
DEAD_LETTERS = sql("SELECT kind, reason FROM rota.dlq_entries ORDER BY 2")


def undo(**more):
    return Compensation(topic="undo", task="undo", **more)


THREE = (
    StepSpec(id="flight", task="book", compensate=undo(context={"ticket": "${steps.flight.output.ticket}"})),
    StepSpec(id="hotel", task="book", depends_on=("flight",), compensate=undo()),
    StepSpec(id="car", task="book", depends_on=("hotel",), compensate=undo()),
    StepSpec(id="pay", task="pay", depends_on=("car",)),
)


@pytest.fixture
async def harness(database):
    await a_show(database)
    return WorkflowHarness(database)


async def running_compensations(harness):
    """Jobs of the running compensations, by step."""
    return {
        row["str_name"].removeprefix("undo flow."): row["pk_job"] for row in await harness.database.rows(COMPENSATIONS)
    }


async def all_compensations(harness):
    return [row["str_name"].removeprefix("undo flow.") for row in await harness.database.rows(ALL_COMPENSATIONS)]


async def entries(harness):
    return [(row["step"], row["state"]) for row in await harness.database.rows(ENTRIES)]


async def dead_letters(harness):
    return [tuple(row.values()) for row in await harness.database.rows(DEAD_LETTERS)]


async def booked_run(harness, *steps, run=None, **more):
    """A run whose last step is about to run."""
    run = run or await harness.start(*(steps or THREE), **more)
    for step in ("flight", "hotel", "car"):
        await harness.end(step, value={"ticket": f"of {step}"}, run=run)
        await harness.advance()
    return run


async def fail(harness, run=None):
    await harness.end("pay", "FAILED", code="fatal", error="no money", run=run)
    await harness.advance()


async def end_next_compensation(harness, step, state="SUCCEEDED", **more):
    running = await running_compensations(harness)
    assert list(running) == [step], "one at a time, the last first"
    await end_job(harness.database, running[step], state, **more)
    await harness.advance()


async def test_succeeded_steps_are_compensated_in_reverse_one_at_a_time(harness):
    run = await booked_run(harness)
    await fail(harness)
    assert (await harness.states())[""] == "COMPENSATING"
    for step in ("car", "hotel", "flight"):
        await end_next_compensation(harness, step)
    assert (await harness.states())[""] == "FAILED"
    assert await entries(harness) == [("flight", "done"), ("hotel", "done"), ("car", "done")]
    assert await harness.database.value(SAGA, str(run)) == "rolled_back"
    run_events = [what for step, what in await harness.timeline() if not step]
    assert run_events == ["began", "ending", "compensating", "failed"]


async def test_compensation_is_critical_and_labelled(harness):
    run = await booked_run(harness)
    await fail(harness)
    await end_next_compensation(harness, "car")
    await end_next_compensation(harness, "hotel")
    flight = (await running_compensations(harness))["flight"]
    [job] = await JobQueries(harness.database).get_many([flight])
    assert (job.priority, job.topic, job.workflow_id) == (9, "undo", str(run))
    assert job.labels == {"saga_compensation": "true", "is_compensation": "true", "saga_workflow_id": str(run)}
    assert job.details.env == {"saga_compensation": "true", "saga_workflow_id": str(run)}
    assert job.details.idempotency_key.startswith("saga:")
    assert job.details.parent_job_id == await harness.job("flight")
    given = msgspec.msgpack.decode(job.layers[0].input)
    assert given == {"args": [], "kwargs": {"ticket": "of flight"}}
    await end_next_compensation(harness, "flight")


async def test_succeeded_run_discards_its_compensations(harness):
    run = await booked_run(harness)
    await harness.end("pay")
    await harness.advance()
    assert (await harness.states())[""] == "SUCCEEDED"
    assert await harness.database.value(SAGA, str(run)) is None
    with pytest.raises(Refused, match="nothing to undo"):
        await harness.commands.roll_back(run, "ann")


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
async def test_rollback_on_selects_the_failures_that_compensate(harness, state, on, undone):
    await booked_run(harness, *THREE, rollback_on=frozenset(on))
    await harness.end("pay", state)
    await harness.advance()
    assert ((await harness.states())[""] == "COMPENSATING") is undone
    assert list(await running_compensations(harness)) == (["car"] if undone else [])


async def test_cancelled_run_is_compensated_if_configured(harness):
    run = await booked_run(harness, *THREE, rollback_on=frozenset({"cancelled"}))
    await harness.commands.cancel(run, "ann")
    await harness.end("pay", "CANCELLED")
    await harness.advance()
    assert list(await running_compensations(harness)) == ["car"]


async def test_quarantined_step_is_compensated(harness):
    await harness.start(
        StepSpec(id="a", task="book", compensate=undo(), on_error="mend"), StepSpec(id="mend", task="pay")
    )
    await harness.end("a", "OUTPUT_QUARANTINED")
    await harness.advance()
    await harness.end("mend", "FAILED", code="fatal")
    await harness.advance()
    assert list(await running_compensations(harness)) == ["a"]


async def test_failed_compensation_is_a_dead_letter_and_can_be_retried(harness):
    run = await booked_run(harness)
    await fail(harness)
    await end_next_compensation(harness, "car")
    await end_next_compensation(harness, "hotel", "FAILED", code="exception", error="no answer")
    await end_next_compensation(harness, "flight")
    assert await entries(harness) == [("flight", "done"), ("hotel", "failed"), ("car", "done")]
    assert await harness.database.value(SAGA, str(run)) == "incomplete"
    assert await dead_letters(harness) == [("saga", "saga_compensation_failed")]
    assert (await harness.states())[""] == "FAILED"

    assert await harness.commands.roll_back(run, "ann") == 1
    await harness.advance()
    await end_next_compensation(harness, "hotel")
    assert await harness.database.value(SAGA, str(run)) == "rolled_back"
    assert await all_compensations(harness) == ["car", "flight", "hotel", "hotel"]
    assert await harness.commands.roll_back(run, "ann") == 0, "there is nothing left to undo"
    await harness.advance()
    assert await running_compensations(harness) == {}


async def test_corrupt_saga_entry_is_a_dead_letter_and_the_rest_continues(harness):
    await booked_run(harness)
    await harness.database.run(DAMAGE, "hotel")
    await fail(harness)
    await end_next_compensation(harness, "car")
    await end_next_compensation(harness, "flight")
    assert await entries(harness) == [("flight", "done"), ("hotel", "corrupt"), ("car", "done")]
    assert await dead_letters(harness) == [("saga", "saga_unmarshal_failed")]
    assert (await harness.states())[""] == "FAILED"


class Kernel:
    """Denies the compensation of the hotel, or does not answer."""

    def __init__(self, *, away=False):
        self.away = away

    async def check(self, questions):
        if self.away:
            raise PostgresUnavailable("no answer")
        return [
            PolicyDecision(says=PolicyEffect.DENY if self.hotel in question.jobs else PolicyEffect.ALLOW)
            for question in questions
        ]


async def test_denied_compensation_is_skipped_and_the_rest_continues(harness):
    await booked_run(harness)
    harness.sagas.kernel = Kernel()
    harness.sagas.kernel.hotel = await harness.job("hotel")
    await fail(harness)
    await end_next_compensation(harness, "car")
    await end_next_compensation(harness, "flight")
    assert await entries(harness) == [("flight", "done"), ("hotel", "skipped"), ("car", "done")]
    assert await dead_letters(harness) == [("saga", "saga_compensation_denied")]


async def test_unavailable_policy_kernel_does_not_stop_compensation(harness):
    await booked_run(harness)
    harness.sagas.kernel = Kernel(away=True)
    await fail(harness)
    for step in ("car", "hotel", "flight"):
        await end_next_compensation(harness, step)


async def test_two_runs_of_one_definition_compensate_separately(harness):
    one = await booked_run(harness)
    two = await booked_run(harness, run=await harness.start())
    await fail(harness, run=one)
    for step in ("car", "hotel", "flight"):
        await end_next_compensation(harness, step)
    assert (await harness.states(one))[""] == "FAILED"
    assert (await harness.states(two))[""] == "RUNNING"
    assert (await entries(harness))[3:] == [("flight", "pending"), ("hotel", "pending"), ("car", "pending")]


async def test_nested_run_is_compensated_with_its_parent(harness):
    await harness.declare(StepSpec(id="book", task="book", compensate=undo()), name="inner")
    run = await harness.start(
        StepSpec(id="sub", type="workflow", workflow="inner"), StepSpec(id="pay", task="pay", depends_on=("sub",))
    )
    await harness.end("book", run=await harness.job("sub"))
    await harness.advance()
    await fail(harness)
    [(name, job)] = (await running_compensations(harness)).items()
    assert name == "undo inner.book"
    await end_job(harness.database, job)
    await harness.advance()
    assert (await harness.states(run))[""] == "FAILED"


class SagaJobs:
    """Jobs outside of workflows that name a saga."""

    def __init__(self, harness):
        self.harness = harness

    async def run(self, name, state="SUCCEEDED", saga="trip", show="film", **more):
        [submitted] = await self.harness.submitter.submit(
            [Submission(show=show, name=f"flow.{name}", workflow_id=saga, layers=(LayerSpec(task="book"),), **more)]
        )
        await end_job(self.harness.database, submitted.job, state, code="fatal" if state == "FAILED" else None)
        await self.harness.advance()


async def test_jobs_outside_workflows_may_join_a_saga(harness):
    jobs = SagaJobs(harness)
    await jobs.run("one", compensation=undo())
    await jobs.run("plain")
    await jobs.run("two", compensation=undo(idempotency_key="mine", labels={"why": "because"}))
    await jobs.run("elsewhere", saga="other", compensation=undo())
    assert await running_compensations(harness) == {}
    await jobs.run("bad", "FAILED", compensation=undo())
    [job] = await JobQueries(harness.database).get_many([(await running_compensations(harness))["two"]])
    assert (job.details.idempotency_key, job.labels["why"]) == ("mine", "because")
    await end_next_compensation(harness, "two")
    await end_next_compensation(harness, "one")
    assert await harness.database.value(SAGA, "trip") == "rolled_back"
    assert await harness.database.value(SAGA, "other") == "open"


async def test_joined_job_processed_after_the_run_ended_is_still_recorded(harness):
    run = await harness.start(StepSpec(id="pay", task="pay"))
    joins = Submission(show="film", workflow_id=str(run), layers=(LayerSpec(task="book"),), compensation=undo())
    [late] = await harness.submitter.submit([joins])
    await harness.end("pay")
    await end_job(harness.database, late.job)
    assert await harness.advancer.advance_batch(most=1) == 1
    assert (await harness.states())[""] == "SUCCEEDED"
    await harness.advance()
    assert [tuple(row) for row in await harness.database.rows(ENTRIES)] == [("", "pending", None)]


async def test_job_joined_to_an_ended_nested_run_is_compensated_with_the_outer_run(harness):
    await harness.declare(StepSpec(id="in", type="notify", notify="hello"), name="inner")
    run = await harness.start(
        StepSpec(id="sub", type="workflow", workflow="inner"), StepSpec(id="pay", task="pay", depends_on=("sub",))
    )
    await harness.advance()
    inner, jobs = str(await harness.job("sub")), SagaJobs(harness)
    await jobs.run("late", saga=inner, compensation=undo())
    await jobs.run("bad", "FAILED", saga=inner)
    assert await running_compensations(harness) == {}, "the outer run continues"
    assert await harness.database.value(SAGA, str(run)) == "open"
    await fail(harness)
    await end_next_compensation(harness, "late")
    assert (await harness.states(run))[""] == "FAILED"


async def test_rollback_on_still_applies_to_jobs_that_fail_after_the_run(harness):
    run = await booked_run(harness, *THREE, rollback_on=frozenset({"timeout"}))
    await fail(harness)
    assert (await harness.states(run))[""] == "FAILED"
    await SagaJobs(harness).run("pay", "FAILED", saga=str(run))
    assert await running_compensations(harness) == {}
    assert await harness.database.value(SAGA, str(run)) == "open"
    assert await harness.commands.roll_back(run, "ann") == 3


async def test_compensation_with_quarantined_output_counts_as_done(harness):
    await booked_run(harness)
    await fail(harness)
    await end_next_compensation(harness, "car", "OUTPUT_QUARANTINED")
    assert (await entries(harness))[-1] == ("car", "done")
    assert list(await running_compensations(harness)) == ["hotel"]


async def test_second_failure_compensates_nothing_twice_and_late_success_is_compensated(harness):
    jobs = SagaJobs(harness)
    await jobs.run("one", compensation=undo())
    await jobs.run("bad", "FAILED")
    await jobs.run("worse", "FAILED")
    await end_next_compensation(harness, "one")
    await jobs.run("late", compensation=undo())
    await end_next_compensation(harness, "late")
    await jobs.run("worst", "FAILED")
    assert await running_compensations(harness) == {}
    assert await all_compensations(harness) == ["late", "one"]


async def test_saga_of_another_show_is_separate(harness):
    await a_show(harness.database, "second", depts=())
    jobs = SagaJobs(harness)
    await jobs.run("one", compensation=undo())
    await jobs.run("bad", "FAILED", show="second")
    assert await running_compensations(harness) == {}


async def test_steps_of_renamed_show_run_in_that_show(harness):
    inner = StepSpec(id="book", task="book")
    await harness.declare(inner, name="inner")
    first, after = StepSpec(id="first", task="book"), {"depends_on": ("first",)}
    run = await harness.start(
        first,
        StepSpec(id="one", task="book", **after),
        StepSpec(id="items", task="book", for_each=[1, 2], **after),
        StepSpec(id="sub", type="workflow", workflow="inner", **after),
    )
    await harness.database.run(RENAME, "film", "feature")
    await a_show(harness.database, "film", depts=())
    await harness.end("first", run=run)
    await harness.advance()
    jobs = [
        await harness.job("one", run),
        await harness.job("items", run),
        await harness.job("book", await harness.job("sub", run)),
    ]
    assert {job.show for job in await JobQueries(harness.database).get_many(jobs)} == {"feature"}


async def test_compensations_of_renamed_show_run_in_that_show(harness):
    run = await booked_run(harness)
    await harness.database.run(RENAME, "film", "feature")
    await a_show(harness.database, "film", depts=())
    await fail(harness)
    for step in ("car", "hotel", "flight"):
        [job] = await JobQueries(harness.database).get_many(list((await running_compensations(harness)).values()))
        assert job.show == "feature"
        await end_next_compensation(harness, step)
    assert (await harness.states(run))[""] == "FAILED"


SAGA_FAILPOINTS = {
    "saga.after_take",
    "saga.before_heard",
    "saga.after_due",
    "saga.before_commit",
    "saga.hear",
    "saga.go_on",
}
FAILPOINTS = [
    (kind, name)
    for kind, name in failpoints.declared_failpoints()
    if name in SAGA_FAILPOINTS or name in ("workflow.after_take", "workflow.before_commit", "workflow.advance")
]


@pytest.mark.parametrize(("kind", "place"), FAILPOINTS, ids=[name for _, name in FAILPOINTS])
async def test_crash_or_lost_reply_compensates_each_step_once_and_in_order(spawn, database_url, harness, kind, place):
    await booked_run(harness)
    await harness.end("pay", "FAILED", code="fatal")
    arm = {"CRASH_AT" if kind == "hit" else "LOST_REPLY_AT": place}

    async def run_faulty_client():
        client = await spawn("tests.integration.workflow.workflow_client", env={"URL": database_url, **arm})
        assert await client.wait() in (failpoints.CRASH_EXIT_STATUS, 0), await client.errors()
        await sessions_over(harness.database)

    async def running():
        await harness.advance()
        return await running_compensations(harness)

    await run_faulty_client()
    for step in ("car", "hotel", "flight"):
        jobs = await until(running, what=f"the compensation of {step}")
        assert list(jobs) == [step]
        await end_job(harness.database, jobs[step])
        if step == "car":
            await run_faulty_client()
    assert await running() == {}
    assert await all_compensations(harness) == ["car", "flight", "hotel"]
    assert (await harness.states())[""] == "FAILED"


async def test_compensation_principal_is_the_run_starter(harness):
    await harness.start(
        StepSpec(id="a", task="book", compensate=undo(principal="bob")),
        StepSpec(id="b", task="pay", depends_on=("a",)),
        rollback_on=("failed",),
    )
    await harness.end("a")
    await harness.advance()
    await harness.end("b", "FAILED", error="no")
    await harness.advance()
    [job] = (await running_compensations(harness)).values()
    assert (await JobQueries(harness.database).get(job)).details.principal == "ann"


@pytest.mark.parametrize("fails", [RuntimeError("what now"), PostgresUnavailable("away"), None])
async def test_failing_kernel_does_not_block_sagas_and_compensation_waits_for_admission(harness, fails):
    class Failing:
        async def check(self, questions):
            if fails is not None:
                raise fails
            return []

    harness.advancer.advancing.sagas = Sagas(
        harness.database, Queue(harness.database).dead_letters, UnpublishedRuns(), Failing()
    )
    await booked_run(harness)
    await fail(harness)
    states = [row["state"] for row in await harness.database.rows(STATES)]
    assert states == ["PENDING"], "nothing runs without a policy decision"


async def test_nested_run_over_its_deadline_is_stopped_before_compensation(harness):
    await harness.declare(StepSpec(id="pay", task="pay", compensate=undo()), name="inner")
    run = await harness.start(
        StepSpec(id="flight", task="book", compensate=undo()),
        StepSpec(id="sub", type="workflow", workflow="inner", depends_on=("flight",), deadline_s=60),
        rollback_on=frozenset({"timeout"}),
    )
    await harness.end("flight")
    await harness.advance()
    inner = await harness.job("sub")
    await harness.pass_time(61)
    await harness.advance()
    assert await running_compensations(harness) == {}, "its job may still succeed"
    await harness.end("pay", run=inner)
    await harness.advance()
    assert (await harness.states(run)) | {"": ""} == {"": "", "flight": "SUCCEEDED", "sub": "TIMEOUT"}
    [last] = (await running_compensations(harness)).values()
    await end_job(harness.database, last)
    await harness.advance()
    assert [state for _, state in await entries(harness)] == ["running", "done"]
