"""Job dependencies: dependents are queued when all succeeded, ended by their policy otherwise, never forgotten."""

from uuid import UUID

import pytest

from rota.engine.admission.transitions import admit
from rota.engine.recovery.reconciler import EngineReconciler
from rota.infra import failpoints
from rota.model.errors import InvalidInput, PostgresUnavailable
from rota.model.job_states import JobState
from rota.model.jobs.submission import LayerSpec, Submission
from tests.support.harness.lost_replies import lose_reply
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging

EDGES = sql("SELECT count(*) FROM rota.job_after")
release_missed = EngineReconciler.release_missed_dependents
REASON = sql("SELECT state, reason FROM rota.job WHERE pk_job = $1::uuid")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix, monkeypatch):
    """Without the reconciler for missed dependents, so that only the completion itself releases them."""
    monkeypatch.setattr(EngineReconciler, "release_missed_dependents", release_none)
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        yield cluster
        await cluster.quiet()
        assert await cluster.database.value(EDGES) == 0


async def release_none(_recovery):
    return 0


async def is_waiting(cluster, job):
    row = await cluster.database.row(REASON, job)
    return (row["state"], row["reason"]) == ("PENDING", "waiting_on_job")


async def test_dependent_job_is_queued_when_its_last_dependency_succeeds(cluster):
    await cluster.worker()
    first, second = hanging("first"), hanging("second")
    a, b = await cluster.submit("hang", "first"), await cluster.submit("hang", "second")
    job = await cluster.submit("square", 3, after=(a, b))
    then = await cluster.submit("noop", after=(job,))
    assert await is_waiting(cluster, job)
    first.set()
    assert await cluster.ended(a) == "SUCCEEDED"
    assert await is_waiting(cluster, job), "the other dependency is still running"
    second.set()
    assert await cluster.ended(then) == "SUCCEEDED"
    states = [moment.state.value for moment in (await cluster.jobs.get(job)).history]
    assert (states[:3], states[-1]) == (["PENDING", "SCHEDULED", "DISPATCHED"], "SUCCEEDED")
    assert (await cluster.jobs.get(job)).details.after == (a, b)


async def test_ended_dependencies_are_not_waited_for(cluster):
    await cluster.worker()
    good, bad = await cluster.submit("noop"), await cluster.submit("boom")
    assert (await cluster.ended(good), await cluster.ended(bad)) == ("SUCCEEDED", "FAILED")
    assert await cluster.ended(await cluster.submit("noop", after=(good, good))) == "SUCCEEDED"
    assert await cluster.ended(await cluster.submit("noop", after=(good, bad))) == "CANCELLED"


@pytest.mark.parametrize(("policy", "end"), [("cancel", "CANCELLED"), ("fail", "FAILED"), ("run", "SUCCEEDED")])
async def test_failed_dependency_ends_dependents_by_their_policy(cluster, policy, end):
    await cluster.worker()
    gate = hanging("h")
    before = await cluster.submit("hang", "h", layer={"timeout_s": 0.1})
    job = await cluster.submit("noop", after=(before,), after_failed=policy)
    after = await cluster.submit("noop", after=(job,))
    assert await cluster.ended(before) == "TIMEOUT"
    assert await cluster.ended(job) == end
    assert await cluster.ended(after) == ("SUCCEEDED" if policy == "run" else "CANCELLED")
    if policy != "run":
        assert (await cluster.done(job))["reason"] == "job_before_failed"
    gate.set()


async def test_cancelling_a_dependent_leaves_its_dependency_running(cluster):
    await cluster.worker()
    gate = hanging("h")
    before = await cluster.submit("hang", "h")
    job = await cluster.submit("noop", after=(before,))
    await cluster.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    assert await cluster.ended(job) == "CANCELLED"
    gate.set()
    assert await cluster.ended(before) == "SUCCEEDED"


async def test_waiting_dependent_is_never_admitted(cluster):
    before = await cluster.submit("noop")
    job = await cluster.submit("noop", after=(before,))
    async with cluster.database.transaction() as tx:
        assert await admit(tx, [job]) == []
    assert (await cluster.replica.engine.admission.decide([job])).asked == []
    assert await is_waiting(cluster, job)
    await cluster.worker()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_unknown_or_too_many_dependencies_are_refused(cluster):
    with pytest.raises(InvalidInput, match="There is no job 00000000-0000-0000-0000-000000000001 to wait for"):
        await cluster.submit("noop", after=(UUID(int=1),))
    with pytest.raises(InvalidInput, match="number of jobs in after"):
        await cluster.submit("noop", after=tuple(UUID(int=n) for n in range(101)))


async def test_dependency_that_ends_during_submission_is_released_by_the_reconciler(cluster):
    await cluster.worker()
    gate = hanging("h")
    before = await cluster.submit("hang", "h")
    spec = Submission(show="film", layers=(LayerSpec(task="noop"),), after=(before,))
    async with cluster.database.transaction() as tx:
        [one] = await cluster.submitter.submit([spec], on=tx)
        gate.set()
        assert await cluster.ended(before) == "SUCCEEDED"
    assert await is_waiting(cluster, one.job)
    assert await release_missed(cluster.replica.engine.recovery) == 1
    assert await cluster.ended(one.job) == "SUCCEEDED"


ARGUMENTS = {"leave": ["a.txt"], "square": [3], "noop": []}
"""An artifact ends in a transaction of several statements, a value or nothing in one statement."""


def fails_once_at(monkeypatch, failpoint):
    """The first call at the failpoint loses PostgreSQL; later calls pass."""
    hits, before = [], failpoints.hit

    def at(name):
        if name == failpoint and not hits:
            hits.append(name)
            raise PostgresUnavailable("PostgreSQL was lost.", outcome="unknown")
        before(name)

    monkeypatch.setattr(failpoints, "hit", at)
    return hits


@pytest.mark.parametrize(
    ("task", "failpoint"),
    [("leave", "finish.before_commit"), ("square", "finish.before_success"), ("noop", "finish.before_success")],
)
async def test_rolled_back_completion_releases_dependents_on_redelivery(cluster, monkeypatch, task, failpoint):
    hits = fails_once_at(monkeypatch, failpoint)
    before = await cluster.submit(task, *ARGUMENTS[task])
    jobs = [await cluster.submit("noop", after=(before,)) for _ in range(3)]
    await cluster.worker()
    assert [await cluster.ended(job, within_s=40) for job in jobs] == ["SUCCEEDED"] * 3
    assert hits


@pytest.mark.parametrize(
    ("task", "failpoint"), [("leave", "finish.ended"), ("square", "finish.success"), ("noop", "finish.success")]
)
async def test_completion_with_a_lost_reply_has_released_dependents(cluster, monkeypatch, task, failpoint):
    lost = lose_reply(monkeypatch, failpoint)
    before = await cluster.submit(task, *ARGUMENTS[task])
    jobs = [await cluster.submit("noop", after=(before,)) for _ in range(3)]
    await cluster.worker()
    assert [await cluster.ended(job, within_s=40) for job in jobs] == ["SUCCEEDED"] * 3
    assert lost == [failpoint]
