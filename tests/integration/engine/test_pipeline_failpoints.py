"""The pipeline when one of its own steps fails half way; each test is named after a bug that was fixed."""

import msgspec
import pytest

from rota.engine.completion import canceller
from rota.engine.completion.finisher import DISPATCH_FAILED
from rota.engine.completion.job_ends import finish_jobs
from rota.engine.recovery.reconciler import EngineReconciler
from rota.model.errors import NatsUnavailable, PostgresUnavailable, StaleFence
from rota.model.jobs.submission import Budget
from rota.model.settings.lifecycle import ReconcilerSettings, SchedulerSettings
from rota.queue import DeadLetterFilter
from tests.support.harness.lost_replies import lose_reply
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

OFTEN = sql("UPDATE rota.job SET dispatch_failures = 32000, ts_dispatch_retry = now() + make_interval(secs => $1)")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        yield cluster
        await cluster.quiet()


def fails_once(monkeypatch, holder, name, error):
    """Make the next call of a method raise `error`; later calls work."""
    real = getattr(holder, name)
    failed = []

    async def once(*args, **kwargs):
        if not failed:
            failed.append(name)
            raise error
        return await real(*args, **kwargs)

    monkeypatch.setattr(holder, name, once)
    return failed


@pytest.fixture
def frequent_checks(monkeypatch):
    """For clusters that are started after it."""
    monkeypatch.setattr("rota.engine.recovery.reconciler.DELIVERY_S", 0.5)
    monkeypatch.setattr("rota.engine.recovery.reconciler.ALLOCATION_CHECK_INTERVAL_S", 0.5)


@pytest.fixture
def failed_step(monkeypatch):
    """One step of the first reconciler that is started after it."""
    return fails_once(monkeypatch, EngineReconciler, "expire_silent_workers", ValueError("unforeseen"))


AWAY = PostgresUnavailable("PostgreSQL was lost during a statement.", outcome="unknown")


@pytest.mark.parametrize("step", ["_layer_executions", "_return_refused", "_publish"])
@pytest.mark.usefixtures("frequent_checks")
async def test_frames_of_a_dispatch_round_that_lost_postgres_are_returned(cluster, monkeypatch, step):
    failed = fails_once(monkeypatch, cluster.replica.engine.dispatcher.assigner, step, AWAY)
    await cluster.worker()
    job = await cluster.submit("note", frames=5)
    assert await cluster.ended(job, within_s=25) == "SUCCEEDED"
    assert failed
    assert sorted(frame for frame, _ in seen["note"]) == list(range(5))


@pytest.mark.parametrize(
    ("task", "failpoint"), [("noop", "finish.success"), ("echo", "finish.success"), ("leave", "finish.ended")]
)
async def test_completion_committed_without_a_reply_releases_its_quota(cluster, monkeypatch, task, failpoint):
    lost = lose_reply(monkeypatch, failpoint)
    await cluster.worker()
    job = await cluster.submit(task, *({"echo": [1], "leave": ["a.txt"]}.get(task, ())), frames=2, max_cores=1)
    assert await cluster.ended(job, within_s=25) == "SUCCEEDED"
    assert lost == [failpoint]


async def test_dispatcher_that_lost_its_lease_continues_under_a_new_one(cluster, monkeypatch):
    stale = StaleFence("Its lease has ended.", fences=[1])
    failed = fails_once(monkeypatch, cluster.replica.queue, "claim_each", stale)
    await cluster.worker()
    job = await cluster.submit("noop")
    assert await cluster.ended(job) == "SUCCEEDED"
    assert failed
    dispatch = next(service for service in cluster.replica.supervisor.services if service.name == "dispatch")
    assert dispatch.error is None, "it crashed and was restarted"


async def test_parked_frames_unknown_to_any_dispatcher_are_resumed(cluster):
    await cluster.worker()
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=3, max_cores=1)
    await cluster.running("x")
    dispatcher = cluster.replica.engine.dispatcher
    await until(lambda: dispatcher.parked_jobs._parked, what="parked frames")
    dispatcher.parked_jobs._parked.clear()  # as if the dispatcher was killed or missed the release
    dispatcher.pending_queues.clear()
    dispatcher.frames_released = lambda *_: None
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_crashed_recovery_service_is_restarted(failed_step, cluster):
    await until(lambda: failed_step, what="a failure")
    await cluster.worker()
    hanging("x")
    job = await cluster.submit("hang", "x", budget=Budget(deadline_ms=100))
    assert await cluster.ended(job) == "TIMEOUT"


async def test_outage_met_frame_by_frame_does_not_exhaust_the_retries_of_a_large_layer(cluster, monkeypatch):
    bus = cluster.replica.bus
    real, failed = bus.publish_many, []

    async def away(messages):
        if len(failed) < 60:
            failed.append(messages)
            raise NatsUnavailable("NATS is away.")
        return await real(messages)

    monkeypatch.setattr(bus, "publish_many", away)
    await cluster.worker(slots=1)  # one frame per round
    job = await cluster.submit("noop", frames=80)
    assert await cluster.ended(job, within_s=40) == "SUCCEEDED"
    assert len(failed) == 60


async def test_unpublishable_frames_are_retried_as_configured_and_then_dead_lettered(
    database_url, redis_url, nats_url, bus_prefix, monkeypatch
):
    cluster = Farm(database_url, redis_url, nats_url, bus_prefix)
    settings = SchedulerSettings(backoff_base=0.01, backoff_max=0.03, backoff_jitter=0.0, max_scheduling_retries=4)
    cluster.settings = msgspec.structs.replace(cluster.settings, scheduler=settings)
    async with cluster:
        await cluster.show()
        queue, assigner = cluster.replica.queue, cluster.replica.engine.dispatcher.assigner
        pauses, defer = [], queue.defer

        async def away(_messages):
            raise NatsUnavailable("NATS is away.")

        async def recording_defer(tokens, delay_s, **more):
            pauses.append(delay_s)
            return await defer(tokens, delay_s, **more)

        monkeypatch.setattr(queue, "defer", recording_defer)
        await cluster.worker()
        monkeypatch.setattr(assigner.bus, "publish_many", away)
        job = await cluster.submit("noop", frames=5)
        assert await cluster.ended(job) == "FAILED"
        assert [dead_letter.reason for dead_letter in await queue.dead_letters.find(DeadLetterFilter())] == [
            "dispatch_failed"
        ] * 5
        assert (await cluster.done(job))["reason"] == "dispatch_failed"
        assert sorted(set(pauses)) == [0.01, 0.02, 0.03]


async def test_dispatch_failures_are_counted_once_per_pause(cluster):
    job = await cluster.submit("noop")
    for retry_in_s, failures in ((60.0, 32000), (-60.0, 32001), (-700.0, 1)):
        await cluster.database.run(OFTEN, retry_in_s)
        [row] = await cluster.database.rows(DISPATCH_FAILED, [job], "publish_failed", 1.0, 300.0, 10**6)
        assert row["dispatch_failures"] == failures
    await cluster.worker()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_job_that_cannot_be_ended_does_not_block_others(
    database_url, redis_url, nats_url, bus_prefix, monkeypatch
):
    cluster = Farm(database_url, redis_url, nats_url, bus_prefix)
    settings = ReconcilerSettings(batch_size=1, max_retries_per_job=1, poll_interval=0.1)
    cluster.settings = msgspec.structs.replace(cluster.settings, reconciler=settings)
    attempts, fixed = [], []

    async def finish_jobs_but_bad(tx, jobs, because=None):
        ended = await finish_jobs(tx, jobs, because)
        if not fixed and any(job.workflow_id == "bad" for job in ended):
            attempts.append(ended)
            raise LookupError("a bug in the transaction that ends a job")
        return ended

    monkeypatch.setattr(canceller, "finish_jobs", finish_jobs_but_bad)
    async with cluster:
        await cluster.show()
        bad = await cluster.submit("noop", workflow_id="bad", budget=Budget(deadline_ms=1))
        await until(lambda: len(attempts) > 1, what="attempts to end it")
        good = [await cluster.submit("noop", budget=Budget(deadline_ms=1)) for _ in range(3)]
        assert [await cluster.ended(job) for job in good] == ["TIMEOUT"] * 3
        [recovery] = [each for each in cluster.replica.supervisor.services if each.name == "recovery"]
        assert recovery.error is None
        fixed.append(True)
        assert await cluster.ended(bad) == "TIMEOUT"
