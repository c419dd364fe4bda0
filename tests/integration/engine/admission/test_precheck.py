"""Precheck: the policy decides before jobs are written, and allowed jobs are queued with that decision."""

import asyncio

import msgspec
import pytest

from rota.engine.admission.controller import AdmissionController
from rota.engine.admission.decision import DeferAll
from rota.engine.admission.precheck import AdmissionPrecheck
from rota.engine.queries.jobs import JobQueries
from rota.engine.submission.batcher import SubmissionBatcher
from rota.engine.submission.statements import SubmissionBatch
from rota.engine.submission.submitter import Submitter
from rota.model.job_states import JobState
from rota.model.jobs.submission import Budget, LayerSpec, Submission
from rota.model.policy.decision import DecisionOverride, PolicyEffect
from rota.policy import enabled_flag
from rota.policy.decision_store import DecisionStore
from tests.support.jobs import NO_EVENTS, a_show, completions, left, task
from tests.support.kernels import AWAY, TABLE, Hanging, Table, decision
from tests.support.queue import agreed, sql

STORED_DECISIONS = sql(
    "SELECT j.topic, j.state, w.told FROM rota.job j LEFT JOIN rota.policy_word w USING (word) ORDER BY j.topic"
)


@pytest.fixture
def kernel():
    return Table()


@pytest.fixture
async def submitter(database, kernel):
    await a_show(database)
    return Submitter(database, NO_EVENTS, gate=DeferAll(), ahead=AdmissionPrecheck(database, kernel))


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def stored_decision(database, job):
    number = await database.value(sql("SELECT word FROM rota.job WHERE pk_job = $1"), job)
    return None if number is None else (await DecisionStore(database).read([number]))[number]


async def test_precheck_queues_allowed_jobs_and_leaves_the_rest_pending(submitter, database, kernel):
    topics = ("allow", "tight", "deny", "throttle", "approval", "odd")
    submitted = await submitter.submit([task(topic=topic) for topic in topics])
    assert [one.state for one in submitted] == ["SCHEDULED", "SCHEDULED", *["PENDING"] * 4]
    assert await stored_decision(database, submitted[0].job) == TABLE["allow"]
    assert await stored_decision(database, submitted[1].job) == TABLE["tight"]
    assert {await stored_decision(database, one.job) for one in submitted[2:]} == {None}
    assert await waiting(database) == 2
    assert (await left(database))["messages"] == 1
    assert kernel.jobs == [one.job for one in submitted], "velocity limits count by job id"


async def test_equal_decisions_are_stored_once(submitter, database, kernel):
    for _ in range(3):
        await submitter.submit([task(topic="allow") for _ in range(5)])
    assert await database.value(sql("SELECT count(*) FROM rota.policy_word")) == 1
    assert kernel.asked == [["allow"]] * 3
    assert len(kernel.jobs) == 15


@pytest.mark.parametrize("how", ["away", "crash", "short", "hangs"])
async def test_kernel_failure_leaves_jobs_pending_and_starts_a_cool_down(submitter, database, kernel, monkeypatch, how):
    submitter.ahead.kernel_timeout_s = 0.05
    kernel.fails = {"away": AWAY, "crash": ZeroDivisionError()}.get(how)
    kernel.miscounts = 1 if how == "short" else 0
    if how == "hangs":
        submitter.ahead.kernel = Hanging()
    [one] = await submitter.submit([task()])
    assert one.state is JobState.PENDING
    kernel.fails, kernel.miscounts, submitter.ahead.kernel = None, 0, kernel
    kernel.questions.clear()
    [two] = await submitter.submit([task()])
    assert (two.state, kernel.asked) == (JobState.PENDING, [])
    monkeypatch.setattr(submitter.ahead, "_cool_down_until", 0.0)
    [three] = await submitter.submit([task()])
    assert three.state is JobState.SCHEDULED


async def test_decision_expired_before_the_write_leaves_the_job_pending(submitter, database, kernel, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.precheck.DECISION_TTL_S", -1.0)
    first = task(idempotency_key="k", layer={"frames": 3})
    [one] = await submitter.submit([first])
    assert (one.state, one.job, await waiting(database)) == (JobState.PENDING, kernel.jobs[0], 0)
    monkeypatch.undo()
    [again] = await submitter.submit([first])
    assert (again.job, again.already) == (one.job, True)
    [other] = await submitter.submit([task(idempotency_key="l")])
    assert other.state is JobState.SCHEDULED


async def test_waiting_for_an_idempotency_key_expires_the_decision(submitter, database, monkeypatch):
    """Expiry is checked after the last statement that may wait for a lock."""
    monkeypatch.setattr("rota.engine.admission.precheck.DECISION_TTL_S", 0.3)
    statements = []
    real = SubmissionBatch.statements

    def steps(self, **more):
        statements.append(self.until)
        return real(self, **more)

    monkeypatch.setattr(SubmissionBatch, "statements", steps)
    async with database.transaction() as tx:
        await Submitter(database, NO_EVENTS, gate=DeferAll()).submit([task(idempotency_key="k", name="a")], on=tx)
        other = asyncio.create_task(submitter.submit([task("b", idempotency_key="k2"), task(idempotency_key="k")]))
        await asyncio.wait([other], timeout=0.5)
        assert not other.done()
        await tx.run(sql("DELETE FROM rota.idempotency_key"))
        await tx.run(sql("DELETE FROM rota.job"))
    submitted = await other
    assert [one.state for one in submitted] == [JobState.PENDING] * 2
    assert statements[1] is not None
    assert statements[2] is None
    assert await database.value(sql("SELECT count(*) FROM rota.idempotency_key")) == 2


async def test_submission_in_a_caller_transaction_skips_the_precheck(submitter, database, kernel):
    async with database.transaction() as tx:
        [one] = await submitter.submit([task()], on=tx)
    assert (one.state, kernel.asked) == (JobState.PENDING, [])


async def test_dependent_job_skips_the_precheck(submitter, database, kernel):
    [first] = await submitter.submit([task()])
    kernel.questions.clear()
    [second, third] = await submitter.submit([task(after=(first.job,)), task()])
    assert (second.state, third.state, kernel.jobs) == (JobState.PENDING, JobState.SCHEDULED, [third.job])
    assert (await JobQueries(database).get(second.job)).reason == "waiting_on_job"


async def test_jobs_of_one_question_may_get_different_decisions(submitter, database, kernel, monkeypatch):
    """Such as a velocity limit with capacity for some of the jobs."""

    async def check(questions):
        [question] = questions
        some = frozenset(question.jobs[:2])
        return [decision(PolicyEffect.THROTTLE, "fast", apart=(DecisionOverride(some, TABLE["allow"]),))]

    kernel.check = check
    submitted = await submitter.submit([task() for _ in range(4)])
    assert [one.state for one in submitted] == ["SCHEDULED"] * 2 + ["PENDING"] * 2
    assert await stored_decision(database, submitted[0].job) == TABLE["allow"]


async def test_concurrent_single_submissions_share_policy_questions(submitter, kernel):
    batcher = SubmissionBatcher(submitter)
    submitted = await asyncio.gather(*(batcher.submit(task(value=n)) for n in range(50)))
    assert {one.state for one in submitted} == {JobState.SCHEDULED}
    assert len(kernel.asked) < 10
    assert sorted(kernel.jobs) == sorted(one.job for one in submitted)


RICH = [
    task(topic="plain"),
    task(topic="shared", value={"x": 1}),
    task(topic="large", value="x" * 100_000),
    Submission(
        show="film",
        folder="shots",
        dept="fx",
        topic="rich",
        priority=7,
        layers=(
            LayerSpec(name="a", task="a", frames="1-9x2", requires=("GPU",), env={"B": "2"}, gpus=1, cores=2.5),
            LayerSpec(name="b", argv=("/bin/b", "-v"), items=["x", {"y": 2}], env={"A": "1"}),
            LayerSpec(name="c", task="a", input=[1, 2, 3]),
        ),
        labels={"zz": "1", "a": "2", "constraint.x": "y"},
        env={"TOKEN": "t"},
        requires=("net",),
        risk_tags=("pii", "money"),
        capability="pay",
        actor_id="ann",
        actor_type="human",
        tenant="t",
        principal="key",
        pack_id="p",
        adapter_id="ad",
        workflow_id="w",
        budget=Budget(deadline_ms=60_000),
        idempotency_key="rich",
        context={"c": 1},
    ),
]


async def test_precheck_and_controller_ask_the_same_question(submitter, database, kernel):
    await submitter.submit(RICH)
    [ahead] = kernel.questions
    kernel.questions.clear()
    again = [msgspec.structs.replace(each, idempotency_key="") for each in RICH]
    submitted = await Submitter(database, NO_EVENTS, gate=DeferAll()).submit(again)
    controller = AdmissionController(database, completions(database), kernel)
    await controller.decide_all([one.job for one in submitted])
    [stored] = kernel.questions
    assert [each.asked for each in stored] == [each.asked for each in ahead]
    given = ("x", {"y": 2}, {"c": 1}, [1, 2, 3])
    assert ahead[3].asked.input_bytes == sum(len(msgspec.msgpack.encode(each)) for each in given)
    assert (ahead[2].asked.input_bytes, ahead[3].asked.requires) == (100_005, ("gpu", "net"))


async def test_server_without_a_policy_admits_nothing_while_others_enforce_one(submitter, database, kernel):
    publisher = completions(database)
    await enabled_flag.set_enabled(database, asks=True)
    try:
        submitted = await Submitter(database, NO_EVENTS).submit([task(topic=topic) for topic in ("allow", "deny")])
        assert [one.state for one in submitted] == ["PENDING", "PENDING"]
        jobs = [one.job for one in submitted]
        await AdmissionController(database, publisher).decide_all(jobs)
        states = sql("SELECT topic, state, reason FROM rota.job ORDER BY topic")
        assert [tuple(row.values()) for row in await database.rows(states)] == [
            ("allow", "PENDING", "policy_unavailable"),
            ("deny", "PENDING", "policy_unavailable"),
        ]
        assert await waiting(database) == 0
        await AdmissionController(database, publisher, kernel).decide_all(jobs)
        assert [tuple(row.values()) for row in await database.rows(states)] == [("allow", "SCHEDULED", None)]
        assert await stored_decision(database, jobs[0]) == TABLE["allow"]
    finally:
        await enabled_flag.set_enabled(database, asks=False)
