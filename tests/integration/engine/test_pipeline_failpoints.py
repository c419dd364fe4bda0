"""What the pipeline does when a step of its own fails half way. Each test is named after what went wrong once."""

import msgspec
import pytest

from rota.engine.completion.finisher import DISPATCH_FAILED
from rota.infra import failpoints
from rota.model.errors import NatsUnavailable, PostgresUnavailable, StaleFence
from rota.model.jobs.submission import Budget
from rota.model.settings.lifecycle import ReconcilerSettings, SchedulerSettings
from rota.queue import DeadLetterFilter
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

OFTEN = sql("UPDATE rota.job SET dispatch_failures = 32000, ts_updated = now() - interval '10 minutes 30 seconds'")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        await farm.quiet()


def fails_once(monkeypatch, holder, name, error):
    """The next call of a method does nothing but fail; those after it are as before."""
    whole = getattr(holder, name)
    failed = []

    async def once(*args, **kwargs):
        if not failed:
            failed.append(name)
            raise error
        return await whole(*args, **kwargs)

    monkeypatch.setattr(holder, name, once)
    return failed


AWAY = PostgresUnavailable("PostgreSQL was lost during a statement.", outcome="unknown")


@pytest.mark.parametrize("step", ["_layer_executions", "_return_refused", "_publish"])
async def test_frames_in_the_hand_of_a_round_that_lost_postgres_go_back(farm, monkeypatch, step):
    monkeypatch.setattr("rota.engine.recovery.reconciler.UNREPORTED_AGE_S", 1.0)
    monkeypatch.setattr("rota.engine.recovery.reconciler.ALLOCATION_CHECK_INTERVAL_S", 0.5)
    failed = fails_once(monkeypatch, farm.replica.engine.dispatcher.assigner, step, AWAY)
    await farm.worker()
    job = await farm.submit("note", frames=5)
    assert await farm.ended(job, within_s=25) == "SUCCEEDED"
    assert failed
    assert sorted(frame for frame, _ in seen["note"]) == list(range(5))


@pytest.mark.parametrize(("task", "place"), [("noop", "finish.success"), ("echo", "finish.ended")])
async def test_a_frame_whose_end_was_committed_without_a_reply_leaves_its_room_to_the_next(
    farm, monkeypatch, task, place
):
    monkeypatch.setattr(failpoints, "after_send", failpoints.FaultPlan.parse({"LOST_REPLY_AT": place}).after_send)
    await farm.worker()
    job = await farm.submit(task, *([1] if task == "echo" else []), frames=2, max_cores=1)
    assert await farm.ended(job, within_s=25) == "SUCCEEDED"


async def test_a_dispatcher_whose_lease_went_in_a_round_goes_on_under_a_new_one(farm, monkeypatch):
    failed = fails_once(monkeypatch, farm.replica.queue, "claim", StaleFence("Its lease has ended.", fences=[1]))
    await farm.worker()
    job = await farm.submit("noop")
    assert await farm.ended(job) == "SUCCEEDED"
    assert failed
    dispatch = next(service for service in farm.replica.supervisor.services if service.name == "dispatch")
    assert dispatch.error is None, "it crashed and was started again"


async def test_parked_frames_that_no_dispatcher_remembers_are_taken_up_again(farm):
    await farm.worker()
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=3, max_cores=1)
    await farm.running("x")
    dispatcher = farm.replica.engine.dispatcher
    await until(lambda: dispatcher.parked_jobs._parked, what="parked frames")
    dispatcher.parked_jobs._parked.clear()  # as of one that was killed, or heard nothing of the release
    dispatcher.pending_queues.entries.clear()
    dispatcher.frames_released = lambda *_: None
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_recovery_that_failed_is_started_again(farm, monkeypatch):
    failed = fails_once(monkeypatch, farm.replica.engine.recovery, "expire_silent_workers", ValueError("unforeseen"))
    await until(lambda: failed, what="a failure")
    await farm.worker()
    hanging("x")
    job = await farm.submit("hang", "x", budget=Budget(deadline_ms=100))
    assert await farm.ended(job) == "TIMEOUT"


async def test_an_outage_that_meets_a_large_layer_frame_by_frame_does_not_use_up_its_tries(farm, monkeypatch):
    bus = farm.replica.bus
    whole, failed = bus.publish_many, []

    async def away(messages):
        if len(failed) < 60:
            failed.append(messages)
            raise NatsUnavailable("NATS is away.")
        return await whole(messages)

    monkeypatch.setattr(bus, "publish_many", away)
    await farm.worker(slots=1)  # one frame in a round
    job = await farm.submit("noop", frames=80)
    assert await farm.ended(job, within_s=40) == "SUCCEEDED"
    assert len(failed) == 60


async def test_frames_that_cannot_be_handed_over_are_tried_again_as_set_and_then_are_dead_letters(
    database_url, redis_url, nats_url, bus_prefix, monkeypatch
):
    farm = Farm(database_url, redis_url, nats_url, bus_prefix)
    wanted = SchedulerSettings(backoff_base=0.01, backoff_max=0.03, backoff_jitter=0.0, max_scheduling_retries=4)
    farm.settings = msgspec.structs.replace(farm.settings, scheduler=wanted)
    async with farm:
        await farm.show()
        queue, handing = farm.replica.queue, farm.replica.engine.dispatcher.assigner
        pauses, defer = [], queue.defer

        async def away(_messages):
            raise NatsUnavailable("NATS is away.")

        async def noted(tokens, delay_s, **more):
            pauses.append(delay_s)
            return await defer(tokens, delay_s, **more)

        monkeypatch.setattr(queue, "defer", noted)
        await farm.worker()
        monkeypatch.setattr(handing.bus, "publish_many", away)
        job = await farm.submit("noop", frames=5)
        assert await farm.ended(job) == "FAILED"
        assert [letter.reason for letter in await queue.dead_letters.find(DeadLetterFilter())] == [
            "max_scheduling_retries"
        ] * 5
        assert sorted(set(pauses)) == [0.01, 0.02, 0.03]


async def test_failed_dispatches_are_counted_once_for_each_pause_however_many_and_however_long(farm):
    job = await farm.submit("noop")
    await farm.database.run(OFTEN)
    for longest_s, failures in ((3600.0, 32000), (300.0, 32001)):
        [row] = await farm.database.rows(DISPATCH_FAILED, [job], "publish_failed", 1.0, longest_s)
        assert row["dispatch_failures"] == failures
    await farm.worker()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_a_job_that_cannot_be_ended_holds_up_no_other(database_url, redis_url, nats_url, bus_prefix):
    farm = Farm(database_url, redis_url, nats_url, bus_prefix)
    wanted = ReconcilerSettings(batch_size=1, max_retries_per_job=1, poll_interval=0.1)
    farm.settings = msgspec.structs.replace(farm.settings, reconciler=wanted)
    tries, mended = [], []

    async def hook(_tx, ended):
        if not mended and any(job.workflow_id == "bad" for job in ended):
            tries.append(ended)
            raise LookupError("a bug of a hook")

    async with farm:
        await farm.show()
        farm.replica.engine.finisher.hooks.append(hook)
        bad = await farm.submit("noop", workflow_id="bad", budget=Budget(deadline_ms=1))
        await until(lambda: len(tries) > 1, what="tries to end it")
        good = [await farm.submit("noop", budget=Budget(deadline_ms=1)) for _ in range(3)]
        assert [await farm.ended(job) for job in good] == ["TIMEOUT"] * 3
        [recovery] = [each for each in farm.replica.supervisor.services if each.name == "recovery"]
        assert recovery.error is None
        mended.append(True)
        assert await farm.ended(bad) == "TIMEOUT"
