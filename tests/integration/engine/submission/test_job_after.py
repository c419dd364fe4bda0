"""Jobs that wait for others: queued when these have succeeded, or ended as they say, and never forgotten."""

from uuid import UUID

import pytest

from rota.engine.admission.transitions import admit
from rota.engine.recovery.reconciler import EngineReconciler
from rota.infra import failpoints
from rota.model.errors import InvalidInput, PostgresUnavailable
from rota.model.job_states import JobState
from rota.model.jobs.submission import LayerSpec, Submission
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging

EDGES = sql("SELECT count(*) FROM rota.job_after")
release_forgotten = EngineReconciler.release_missed_dependents
REASON = sql("SELECT state, reason FROM rota.job WHERE pk_job = $1::uuid")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix, monkeypatch):
    """Without the leader's look for jobs that were forgotten, so that nothing but the end itself lets others go on."""
    monkeypatch.setattr(EngineReconciler, "release_missed_dependents", nothing)
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        await farm.quiet()
        assert await farm.database.value(EDGES) == 0


async def nothing(_recovery):
    return 0


async def waits(farm, job):
    row = await farm.database.row(REASON, job)
    return (row["state"], row["reason"]) == ("PENDING", "waiting_on_job")


async def test_a_job_is_queued_when_the_last_it_waits_for_has_succeeded(farm):
    await farm.worker()
    first, second = hanging("first"), hanging("second")
    a, b = await farm.submit("hang", "first"), await farm.submit("hang", "second")
    job = await farm.submit("square", 3, after=(a, b))
    then = await farm.submit("noop", after=(job,))
    assert await waits(farm, job)
    first.set()
    assert await farm.ended(a) == "SUCCEEDED"
    assert await waits(farm, job), "the other one runs"
    second.set()
    assert await farm.ended(then) == "SUCCEEDED"
    states = [moment.state.value for moment in (await farm.jobs.get(job)).history]
    assert (states[:3], states[-1]) == (["PENDING", "SCHEDULED", "DISPATCHED"], "SUCCEEDED")
    assert (await farm.jobs.get(job)).details.after == (a, b)


async def test_jobs_that_have_ended_are_not_waited_for(farm):
    await farm.worker()
    good, bad = await farm.submit("noop"), await farm.submit("boom")
    assert (await farm.ended(good), await farm.ended(bad)) == ("SUCCEEDED", "FAILED")
    assert await farm.ended(await farm.submit("noop", after=(good, good))) == "SUCCEEDED"
    assert await farm.ended(await farm.submit("noop", after=(good, bad))) == "CANCELLED"


@pytest.mark.parametrize(("policy", "end"), [("cancel", "CANCELLED"), ("fail", "FAILED"), ("run", "SUCCEEDED")])
async def test_what_does_not_succeed_ends_those_that_wait_as_they_say(farm, policy, end):
    await farm.worker()
    gate = hanging("h")
    before = await farm.submit("hang", "h", layer={"timeout_s": 0.1})
    job = await farm.submit("noop", after=(before,), after_failed=policy)
    after = await farm.submit("noop", after=(job,))
    assert await farm.ended(before) == "TIMEOUT"
    assert await farm.ended(job) == end
    assert await farm.ended(after) == ("SUCCEEDED" if policy == "run" else "CANCELLED")
    if policy != "run":
        assert (await farm.done(job))["reason"] == "job_before_failed"
    gate.set()


async def test_cancelling_one_that_waits_leaves_what_it_waited_for(farm):
    await farm.worker()
    gate = hanging("h")
    before = await farm.submit("hang", "h")
    job = await farm.submit("noop", after=(before,))
    await farm.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    assert await farm.ended(job) == "CANCELLED"
    gate.set()
    assert await farm.ended(before) == "SUCCEEDED"


async def test_a_job_that_waits_is_never_admitted_before_its_time(farm):
    before = await farm.submit("noop")
    job = await farm.submit("noop", after=(before,))
    async with farm.database.transaction() as tx:
        assert await admit(tx, [job]) == []
    assert (await farm.replica.engine.admission.decide([job])).asked == []
    assert await waits(farm, job)
    await farm.worker()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_only_jobs_that_exist_can_be_named(farm):
    with pytest.raises(InvalidInput, match="There is no job 00000000-0000-0000-0000-000000000001 to wait for"):
        await farm.submit("noop", after=(UUID(int=1),))
    with pytest.raises(InvalidInput, match="number of jobs in after"):
        await farm.submit("noop", after=tuple(UUID(int=n) for n in range(101)))


async def test_one_that_ends_while_another_is_submitted_is_not_waited_for_for_ever(farm):
    await farm.worker()
    gate = hanging("h")
    before = await farm.submit("hang", "h")
    spec = Submission(show="film", layers=(LayerSpec(task="noop"),), after=(before,))
    async with farm.database.transaction() as tx:
        [one] = await farm.submitter.submit([spec], on=tx)
        gate.set()
        assert await farm.ended(before) == "SUCCEEDED"
    assert await waits(farm, one.job)
    assert await release_forgotten(farm.replica.engine.recovery) == 1
    assert await farm.ended(one.job) == "SUCCEEDED"


def fails_once_at(monkeypatch, place):
    """Whoever comes there first loses PostgreSQL; others go on."""
    met, before = [], failpoints.hit

    def at(name):
        if name == place and not met:
            met.append(name)
            raise PostgresUnavailable("PostgreSQL was lost.", outcome="unknown")
        before(name)

    monkeypatch.setattr(failpoints, "hit", at)
    return met


@pytest.mark.parametrize(("task", "place"), [("square", "finish.before_commit"), ("noop", "finish.before_success")])
async def test_an_end_that_is_undone_releases_nobody_until_it_comes_again(farm, monkeypatch, task, place):
    met = fails_once_at(monkeypatch, place)
    before = await farm.submit(task, *([3] if task == "square" else []))
    jobs = [await farm.submit("noop", after=(before,)) for _ in range(3)]
    await farm.worker()
    assert [await farm.ended(job, within_s=40) for job in jobs] == ["SUCCEEDED"] * 3
    assert met


@pytest.mark.parametrize(("task", "place"), [("square", "finish.ended"), ("noop", "finish.success")])
async def test_an_end_whose_reply_is_lost_has_released_those_that_wait(farm, monkeypatch, task, place):
    monkeypatch.setattr(failpoints, "after_send", failpoints.FaultPlan.parse({"LOST_REPLY_AT": place}).after_send)
    before = await farm.submit(task, *([3] if task == "square" else []))
    jobs = [await farm.submit("noop", after=(before,)) for _ in range(3)]
    await farm.worker()
    assert [await farm.ended(job, within_s=40) for job in jobs] == ["SUCCEEDED"] * 3
