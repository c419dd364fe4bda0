"""Jobs from submission to end on real servers: results, retries, caps, pools, cancellation, GPUs."""

import asyncio

import msgspec
import pytest

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.model.job_states import JobState
from rota.model.jobs.submission import Budget, LayerSpec, Submission
from rota.placement.route_store import RouteStore
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

PARKED_OF = sql("SELECT count(*) > 0 FROM rota.queue_returned WHERE parked_job = $1::uuid")
PARKED = sql("SELECT sum(n) = 7 FROM rota.queue_returned WHERE parked_job IS NOT NULL")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        yield cluster
        await cluster.quiet()


async def test_job_of_one_frame_succeeds(cluster):
    await cluster.worker()
    job = await cluster.submit("noop")
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_layer_of_many_frames_counts_each_frame_once(cluster):
    await cluster.worker(slots=100)
    job = await cluster.submit("note", frames="1-999x2")
    assert await cluster.ended(job) == "SUCCEEDED"
    assert sorted(seen["note"]) == [(number, 1) for number in range(1, 1000, 2)]
    [layer] = (await cluster.done(job))["layers"]
    assert (layer["frames"], layer["succeeded"]) == (500, 500)


async def test_jobs_whose_environments_exceed_a_message_together_are_sent_in_several(cluster, monkeypatch):
    await cluster.worker(slots=60)
    unsent = []
    monkeypatch.setattr(
        cluster.replica.engine.dispatcher.assigner, "_return_unsent", lambda *given: unsent.append(given)
    )
    layer = LayerSpec(task="noop")
    jobs = [Submission(show="film", layers=(layer,), env={"TEXT": f"{number:030000}"}) for number in range(60)]
    for each in await cluster.submitter.submit(jobs):
        assert await cluster.ended(each.job) == "SUCCEEDED"
    assert unsent == []


async def test_frame_result_is_stored(cluster):
    await cluster.worker()
    job = await cluster.submit("square", 12)
    assert await cluster.ended(job) == "SUCCEEDED"
    [(_, attempt, state, _, _, value)] = await cluster.ends(job)
    assert (attempt, state, msgspec.msgpack.decode(value)) == (1, "SUCCEEDED", 144)


async def test_failed_job_records_code_and_error(cluster):
    await cluster.worker()
    job = await cluster.submit("boom")
    assert await cluster.ended(job) == "FAILED"
    [(_, _, state, code, error, _)] = await cluster.ends(job)
    assert (state, code) == ("FAILED", "exception")
    assert "no luck" in error


async def test_failed_attempt_is_retried_as_configured(cluster):
    await cluster.worker()
    job = await cluster.submit("flaky", 2, layer={"retries": 2})
    assert await cluster.ended(job) == "SUCCEEDED"
    assert seen["flaky"] == [1, 2, 3]
    assert [(attempt, state) for _, attempt, state, *_ in await cluster.ends(job)] == [
        (1, "RETRIED"),
        (2, "RETRIED"),
        (3, "SUCCEEDED"),
    ]


async def test_fatal_failure_is_not_retried(cluster):
    await cluster.worker()
    job = await cluster.submit("fatal", layer={"retries": 5})
    assert await cluster.ended(job) == "FAILED"
    assert len(await cluster.ends(job)) == 1


async def test_job_without_workers_waits_and_runs_when_one_registers(cluster):
    job = await cluster.submit("noop")
    await until(
        lambda: cluster.replica.engine.dispatcher.pending_queues.frames_by_reason() == {"no_workers": 1},
        what="the wait reason",
    )
    await cluster.worker()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_layer_under_a_subscription_cap_runs_within_it(cluster):
    await cluster.worker(slots=50)
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=3, actor="test"))
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=10)
    await cluster.running("x", 3)
    await until(
        lambda: cluster.replica.engine.dispatcher.pending_queues.frames_by_reason().get("quota_subscription"),
        what="the wait reason",
    )
    assert seen["began"] == ["x"] * 3
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"
    assert seen["began"] == ["x"] * 10


async def test_raised_subscription_cap_starts_waiting_frames_at_once(cluster):
    await cluster.worker(slots=50)
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=2, actor="test"))
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=6)
    await cluster.running("x", 2)
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=6, actor="test"))
    await cluster.running("x", 6)
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def two_pools(cluster, local, other):
    """Two pools with a worker each, the topic mapped to `local` first, and the given shares of the show."""
    await cluster.accounting.change(lambda admin: admin.create_pool("other", actor="test"))
    if local:
        await cluster.accounting.change(
            lambda admin: admin.change_subscription("film", "local", burst=local, actor="test")
        )
    else:
        await cluster.accounting.change(lambda admin: admin.delete_subscription("film", "local", actor="test"))
    await cluster.accounting.change(
        lambda admin: admin.create_subscription("film", "other", size=other, burst=other, actor="test")
    )
    await RouteStore(cluster.database).set_topic("default", ["local", "other"], actor="test")
    await cluster.worker("near", slots=50)
    await cluster.worker("far", slots=50, pool="other")


async def test_pool_without_a_subscription_is_skipped_for_the_next(cluster):
    await two_pools(cluster, local=0, other=10)
    job = await cluster.submit("noop", frames=20)
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_frames_over_the_share_of_the_first_pool_run_in_the_next(cluster):
    await two_pools(cluster, local=2, other=3)
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=12)
    await cluster.running("x", 5)
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_job_at_its_own_cap_does_not_block_others(cluster):
    await cluster.worker(slots=50)
    gate = hanging("capped")
    capped = await cluster.submit("hang", "capped", frames=6, max_cores=2)
    await cluster.running("capped", 2)
    other = await cluster.submit("noop", frames=3)
    assert await cluster.ended(other) == "SUCCEEDED"
    assert seen["began"] == ["capped"] * 2
    gate.set()
    assert await cluster.ended(capped) == "SUCCEEDED"


async def test_raised_job_cap_starts_more_frames_at_once(cluster):
    await cluster.worker(slots=50)
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=8, max_cores=1)
    await cluster.running("x", 1)
    await until(lambda: cluster.database.value(PARKED), what="all waiting frames to be parked")
    await cluster.accounting.change(lambda admin: admin.change_job("film", job, max_cores=4, actor="test"))
    await cluster.running("x", 4)
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def stop_polling(dispatcher, monkeypatch):
    """Stop polling, so that only notifications wake the dispatcher."""
    polled, refresh = [], dispatcher._refresh_all

    async def recording_refresh(*, always):
        polled.append(await refresh(always=always))

    monkeypatch.setattr("rota.engine.dispatch.dispatcher.POLL_INTERVAL_S", 3600.0)
    monkeypatch.setattr(dispatcher, "_refresh_all", recording_refresh)
    await until(lambda: polled, what="the last poll")


async def test_raised_cap_is_retried_once_redis_has_it(cluster, monkeypatch):
    await cluster.worker(slots=50)
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=2, actor="test"))
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=6)
    await cluster.running("x", 2)
    dispatcher, accounting = cluster.replica.engine.dispatcher, cluster.replica.accounting
    await stop_polling(dispatcher, monkeypatch)
    refused, push, return_refused = asyncio.Event(), accounting.live.push_change, dispatcher.assigner._return_refused

    async def push_late(*given, **more):
        await refused.wait()
        await push(*given, **more)

    async def record_refused(bookings):
        await return_refused(bookings)
        if any(outcome.refused for booking in bookings for outcome in booking.outcomes):
            refused.set()

    monkeypatch.setattr(accounting.live, "push_change", push_late)
    monkeypatch.setattr(dispatcher.assigner, "_return_refused", record_refused)
    await accounting.change(lambda admin: admin.change_subscription("film", "local", burst=6, actor="test"))
    await cluster.running("x", 6)
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_release_lost_for_any_reason_is_repaired_while_the_show_is_refused(cluster, monkeypatch):
    await cluster.worker(slots=50)
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=2, actor="test"))

    async def lose(*_given):
        pass

    with monkeypatch.context() as losing:
        losing.setattr(cluster.replica.accounting.publisher, "publish", lose)
        assert await cluster.ended(await cluster.submit("noop", frames=2)) == "SUCCEEDED"
    assert await cluster.ended(await cluster.submit("noop", frames=2)) == "SUCCEEDED"


async def test_cap_raised_while_refused_frames_are_returned_is_noticed_at_once(cluster, monkeypatch):
    await cluster.worker(slots=50)
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=2, actor="test"))
    dispatcher, queue = cluster.replica.engine.dispatcher, cluster.replica.queue
    returning, go_on, give_back = asyncio.Event(), asyncio.Event(), queue.give_back

    async def give_back_late(tokens):
        returning.set()
        await go_on.wait()
        return await give_back(tokens)

    await stop_polling(dispatcher, monkeypatch)
    monkeypatch.setattr(queue, "give_back", give_back_late)
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=6)
    await returning.wait()
    [pending] = dispatcher.pending_queues.entries.values()
    resets = pending.resets
    await cluster.replica.accounting.change(
        lambda admin: admin.change_subscription("film", "local", burst=6, actor="test")
    )
    await until(lambda: pending.resets > resets and not pending.waiting, what="a round that finds no frame")
    go_on.set()
    await cluster.running("x", 6)
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_round_in_flight_holds_only_the_slots_of_its_frames(cluster, monkeypatch):
    await cluster.show("other")
    await cluster.worker(slots=2)
    dispatcher, accounting = cluster.replica.engine.dispatcher, cluster.replica.accounting
    booking, go_on, book = asyncio.Event(), asyncio.Event(), accounting.book

    async def book_late(show, groups, **more):
        if not booking.is_set():
            booking.set()
            await go_on.wait()
        return await book(show, groups, **more)

    monkeypatch.setattr(accounting, "book", book_late)
    await stop_polling(dispatcher, monkeypatch)
    first = await cluster.submit("noop")
    await booking.wait()
    assert await cluster.ended(await cluster.submit("noop", show="other")) == "SUCCEEDED"
    go_on.set()
    assert await cluster.ended(first) == "SUCCEEDED"


async def test_waiting_job_can_get_a_cap_before_it_runs(cluster):
    job = await cluster.submit("hang", "x", frames=4)
    [layer] = (await cluster.jobs.get(job)).layers
    await cluster.accounting.change(lambda admin: admin.change_job("film", job, max_cores=3, actor="test"))
    await cluster.accounting.change(lambda admin: admin.change_layer("film", layer.id, max_cores=2, actor="test"))
    gate = hanging("x")
    await cluster.worker(slots=50)
    await cluster.running("x", 2)
    await until(lambda: cluster.database.value(PARKED_OF, job), what="the waiting frames to be parked")
    assert seen["began"] == ["x"] * 2
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_cap_set_between_claim_and_booking_blocks_only_its_job(cluster, monkeypatch):
    jobs = [await cluster.submit("noop") for _ in range(3)]
    assigner, late = cluster.replica.engine.dispatcher.assigner, jobs[1]
    asked, real = [], assigner._book

    async def book(pending_queue, batch):
        if not asked:
            await cluster.accounting.change(lambda admin: admin.change_job("film", late, max_cores="0.5", actor="test"))
        asked.extend(batch)
        return await real(pending_queue, batch)

    monkeypatch.setattr(assigner, "_book", book)
    await cluster.worker()
    assert [await cluster.ended(job) for job in jobs if job != late] == ["SUCCEEDED"] * 2
    await until(lambda: cluster.database.value(PARKED_OF, late), what="the frame to be parked")
    assert len(asked[0].jobs) == 3, "they were not booked in one request"
    await cluster.accounting.change(lambda admin: admin.change_job("film", late, max_cores=1, actor="test"))
    assert await cluster.ended(late) == "SUCCEEDED"


async def test_cap_set_on_a_running_job_does_not_block_others(cluster):
    await cluster.worker("a", slots=1)
    gate = hanging("x")
    job = await cluster.submit("hang", "x", frames=4)
    await cluster.running("x", 1)
    await cluster.accounting.change(lambda admin: admin.change_job("film", job, max_cores=1, actor="test"))
    await cluster.worker("b", slots=1)
    await until(lambda: cluster.database.value(PARKED_OF, job), what="the waiting frames to be parked")
    other = await cluster.submit("noop", frames=3)
    assert await cluster.ended(other) == "SUCCEEDED"
    assert seen["began"] == ["x"]
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_cancelling_a_job_ends_waiting_frames_and_stops_running_ones(cluster):
    await cluster.worker(slots=2)
    hanging("x")
    job = await cluster.submit("hang", "x", frames=10)
    await cluster.running("x", 2)
    assert await cluster.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled") is JobState.CANCELLED
    assert await cluster.ended(job) == "CANCELLED"
    await until(lambda: seen.get("stopped") == ["x", "x"], what="both frames stopped")
    [layer] = (await cluster.done(job))["layers"]
    assert layer["cancelled"] == 10
    assert await cluster.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled") is None


async def test_deadline_counts_from_submission_and_ends_the_job(cluster):
    await cluster.worker()
    hanging("x")
    job = await cluster.submit("hang", "x", budget=Budget(deadline_ms=300))
    await cluster.running("x")
    assert await cluster.ended(job) == "TIMEOUT"
    assert (await cluster.done(job))["reason"] == "deadline_expired"


async def test_topic_without_a_pool_fails_at_once_into_dead_letters(cluster):
    await cluster.worker()
    job = await cluster.submit("noop", frames=3, labels={"preferred_pool": "mars"})
    assert await cluster.ended(job) == "FAILED"
    dead_letters = await cluster.replica.queue.dead_letters.find(_frame_dead_letters())
    assert [(dead_letter.reason, dead_letter.job) for dead_letter in dead_letters] == [("no_pool_mapping", job)] * 3


def _frame_dead_letters():
    from rota.queue.dead_letters import DeadLetterFilter

    return DeadLetterFilter(kind="frame")


async def test_unknown_task_waits_for_a_worker_that_knows_it(cluster):
    await cluster.worker()
    job = await cluster.submit("nobody_knows_it")
    pending_queues = cluster.replica.engine.dispatcher.pending_queues
    await until(lambda: pending_queues.frames_by_reason() == {"no_workers": 1}, what="the wait reason")
    [pending_queue] = [pending_queue for pending_queue in pending_queues.entries.values() if pending_queue.waiting]
    [passed] = cluster.replica.engine.registry.explain(pending_queue.key.cls).passed
    assert passed.why == "it does not know the task nobody_knows_it"
    await cluster.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    assert await cluster.ended(job) == "CANCELLED"


async def test_two_shows_share_a_pool_by_their_sizes(cluster):
    await cluster.show("short", size=1, burst=100)
    gate = hanging("x")
    await asyncio.gather(
        cluster.submit("hang", "x", frames=50, show="short"),
        cluster.submit("hang", "x", frames=50, show="film"),
    )
    pending_queues = cluster.replica.engine.dispatcher.pending_queues
    await until(lambda: pending_queues.shows_waiting() == 2, what="both shows waiting")
    await cluster.worker(slots=20)
    await cluster.running("x", 20)
    used = await cluster.replica.accounting.live.counters(await _show(cluster, "film"))
    assert max(usage.cores for usage in used.values()) >= 1000
    gate.set()


async def _show(cluster, name):
    return next(show.id for show in await cluster.accounting.admin.shows() if show.name == name)


async def test_two_replicas_and_three_workers_run_one_layer_together(cluster):
    await cluster.server()
    for number in range(3):
        await cluster.worker(f"w{number}", slots=20)
    job = await cluster.submit("note", frames=2000)
    assert await cluster.ended(job, within_s=30) == "SUCCEEDED"
    assert sorted(frame for frame, _ in seen["note"]) == list(range(2000))


async def test_frames_of_two_gpu_layers_never_share_one_gpu(cluster):
    await cluster.worker(slots=20, gpus=1)
    names = ("train", "infer")
    jobs = [await cluster.submit("on_gpu", name, frames=12, layer={"gpus": 1}) for name in names]
    assert [await cluster.ended(job) for job in jobs] == ["SUCCEEDED"] * 2
    taken, returned = seen["gpu"][::2], seen["gpu"][1::2]
    assert [(name, devices) for name, _, devices in taken] == [(name, devices) for name, _, devices in returned]
    assert {action for _, action, _ in taken} == {"took"}
    assert sorted(name for name, _, _ in taken) == ["infer"] * 12 + ["train"] * 12
    assert {devices for _, _, devices in taken} == {(0,)}


async def test_frame_needing_more_gpus_than_any_worker_has_waits(cluster):
    await cluster.worker(gpus=1)
    job = await cluster.submit("on_gpu", "x", layer={"gpus": 2})
    await until(
        lambda: cluster.replica.engine.dispatcher.pending_queues.frames_by_reason().get("no_workers"),
        what="the wait reason",
    )
    await cluster.worker("big", gpus=2)
    assert await cluster.ended(job) == "SUCCEEDED"
    assert seen["gpu"][0] == ("x", "took", (0, 1))


async def test_token_that_redis_alone_counts_is_released_while_the_show_is_refused(cluster, monkeypatch):
    await cluster.worker(slots=50)
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=2, actor="test"))
    insert, lost = allocations.insert, []

    async def lose_all(database, show, fence, rows):
        """As if the process were gone after Redis has booked."""
        if len(lost) < 2:
            lost.extend(token for group in rows for token in group.tokens)
            return allocations.ProcInsertResult(refused=dict.fromkeys(lost, DeclineReason.DUPLICATE))
        return await insert(database, show, fence, rows)

    monkeypatch.setattr(allocations, "insert", lose_all)
    assert await cluster.ended(await cluster.submit("noop", frames=2)) == "SUCCEEDED"
    assert lost
