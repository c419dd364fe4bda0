"""From a submission to its end, on real servers: the ways of a job, one by one."""

import asyncio

import msgspec
import pytest

from rota.model.job_states import JobState
from rota.model.jobs.submission import Budget
from rota.placement.route_store import RouteStore
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

PARKED_OF = sql("SELECT count(*) > 0 FROM rota.queue_returned WHERE parked_job = $1::uuid")
PARKED = sql("SELECT sum(n) = 7 FROM rota.queue_returned WHERE parked_job IS NOT NULL")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        await farm.quiet()


async def test_a_job_of_one_frame(farm):
    await farm.worker()
    job = await farm.submit("noop")
    assert await farm.ended(job) == "SUCCEEDED"


async def test_a_layer_of_many_frames_is_counted_once_each(farm):
    await farm.worker(slots=100)
    job = await farm.submit("note", frames="1-999x2")
    assert await farm.ended(job) == "SUCCEEDED"
    assert sorted(seen["note"]) == [(number, 1) for number in range(1, 1000, 2)]
    [layer] = (await farm.done(job))["layers"]
    assert (layer["frames"], layer["succeeded"]) == (500, 500)


async def test_what_a_frame_returns_is_kept(farm):
    await farm.worker()
    job = await farm.submit("square", 12)
    assert await farm.ended(job) == "SUCCEEDED"
    [(_, attempt, state, _, _, value)] = await farm.ends(job)
    assert (attempt, state, msgspec.msgpack.decode(value)) == (1, "SUCCEEDED", 144)


async def test_a_job_that_fails_says_why(farm):
    await farm.worker()
    job = await farm.submit("boom")
    assert await farm.ended(job) == "FAILED"
    [(_, _, state, code, error, _)] = await farm.ends(job)
    assert (state, code) == ("FAILED", "exception")
    assert "no luck" in error


async def test_a_failed_attempt_is_tried_again_as_often_as_asked(farm):
    await farm.worker()
    job = await farm.submit("flaky", 2, layer={"retries": 2})
    assert await farm.ended(job) == "SUCCEEDED"
    assert seen["flaky"] == [1, 2, 3]
    assert [(attempt, state) for _, attempt, state, *_ in await farm.ends(job)] == [
        (1, "RETRIED"),
        (2, "RETRIED"),
        (3, "SUCCEEDED"),
    ]


async def test_a_fatal_failure_is_never_tried_again(farm):
    await farm.worker()
    job = await farm.submit("fatal", layer={"retries": 5})
    assert await farm.ended(job) == "FAILED"
    assert len(await farm.ends(job)) == 1


async def test_a_job_waits_for_a_worker_and_runs_when_one_comes(farm):
    job = await farm.submit("noop")
    await until(
        lambda: farm.replica.engine.dispatcher.pending_queues.frames_by_reason() == {"no_workers": 1}, what="a reason"
    )
    await farm.worker()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_a_layer_under_a_cap_runs_a_few_frames_at_a_time(farm):
    await farm.worker(slots=50)
    await farm.books.change(lambda admin: admin.change_subscription("film", "local", burst=3, actor="test"))
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=10)
    await farm.running("x", 3)
    await until(
        lambda: farm.replica.engine.dispatcher.pending_queues.frames_by_reason().get("quota_subscription"),
        what="a reason",
    )
    assert seen["began"] == ["x"] * 3
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"
    assert seen["began"] == ["x"] * 10


async def test_a_raised_cap_lets_waiting_frames_run_at_once(farm):
    await farm.worker(slots=50)
    await farm.books.change(lambda admin: admin.change_subscription("film", "local", burst=2, actor="test"))
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=6)
    await farm.running("x", 2)
    await farm.books.change(lambda admin: admin.change_subscription("film", "local", burst=6, actor="test"))
    await farm.running("x", 6)
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def two_pools(farm, local, other):
    """Workers in both, the topic mapped to `local` first, and so much of each as the show's share."""
    await farm.books.change(lambda admin: admin.create_pool("other", actor="test"))
    if local:
        await farm.books.change(lambda admin: admin.change_subscription("film", "local", burst=local, actor="test"))
    else:
        await farm.books.change(lambda admin: admin.delete_subscription("film", "local", actor="test"))
    await farm.books.change(
        lambda admin: admin.create_subscription("film", "other", size=other, burst=other, actor="test")
    )
    await RouteStore(farm.database).set_topic("default", ["local", "other"], actor="test")
    await farm.worker("near", slots=50)
    await farm.worker("far", slots=50, pool="other")


async def test_a_pool_in_which_the_show_has_no_share_is_passed_over_for_the_next(farm):
    await two_pools(farm, local=0, other=10)
    job = await farm.submit("noop", frames=20)
    assert await farm.ended(job) == "SUCCEEDED"


async def test_frames_beyond_the_share_of_the_first_pool_run_in_the_next(farm):
    await two_pools(farm, local=2, other=3)
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=12)
    await farm.running("x", 5)
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_a_job_at_its_own_cap_lets_others_pass(farm):
    await farm.worker(slots=50)
    gate = hanging("capped")
    capped = await farm.submit("hang", "capped", frames=6, max_cores=2)
    await farm.running("capped", 2)
    other = await farm.submit("noop", frames=3)
    assert await farm.ended(other) == "SUCCEEDED"
    assert seen["began"] == ["capped"] * 2
    gate.set()
    assert await farm.ended(capped) == "SUCCEEDED"


async def test_a_job_whose_own_cap_is_raised_runs_more_at_once(farm):
    await farm.worker(slots=50)
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=8, max_cores=1)
    await farm.running("x", 1)
    await until(lambda: farm.database.value(PARKED), what="all that waits to be parked")
    await farm.books.change(lambda admin: admin.change_job("film", job, max_cores=4, actor="test"))
    await farm.running("x", 4)
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def no_more_looks(dispatcher, monkeypatch):
    """From here on it is woken by what it hears, and by nothing else."""
    looked, look = [], dispatcher._refresh

    async def looking(queues):
        await look(queues)
        looked.append(queues)

    monkeypatch.setattr("rota.engine.dispatch.dispatcher.POLL_INTERVAL_S", 3600.0)
    monkeypatch.setattr(dispatcher, "_refresh", looking)
    await until(lambda: None in looked, what="the last look at everything")


async def test_a_raised_cap_is_tried_again_once_redis_knows_of_it(farm, monkeypatch):
    await farm.worker(slots=50)
    await farm.books.change(lambda admin: admin.change_subscription("film", "local", burst=2, actor="test"))
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=6)
    await farm.running("x", 2)
    dispatcher, books = farm.replica.engine.dispatcher, farm.replica.accounting
    await no_more_looks(dispatcher, monkeypatch)
    refused, tell, turn_down = asyncio.Event(), books.live.push_change, dispatcher.assigner._return_refused

    async def tell_late(*given, **more):
        await refused.wait()
        await tell(*given, **more)

    async def turned_down(spot, bundles, outcomes):
        await turn_down(spot, bundles, outcomes)
        if any(outcome.refused for outcome in outcomes):
            refused.set()

    monkeypatch.setattr(books.live, "push_change", tell_late)
    monkeypatch.setattr(dispatcher.assigner, "_return_refused", turned_down)
    await books.change(lambda admin: admin.change_subscription("film", "local", burst=6, actor="test"))
    await farm.running("x", 6)
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_a_job_that_waits_can_be_given_a_cap_before_it_runs(farm):
    job = await farm.submit("hang", "x", frames=4)
    [layer] = (await farm.jobs.get(job)).layers
    await farm.books.change(lambda admin: admin.change_job("film", job, max_cores=3, actor="test"))
    await farm.books.change(lambda admin: admin.change_layer("film", layer.id, max_cores=2, actor="test"))
    gate = hanging("x")
    await farm.worker(slots=50)
    await farm.running("x", 2)
    await until(lambda: farm.database.value(PARKED_OF, job), what="what waits to be parked")
    assert seen["began"] == ["x"] * 2
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_a_cap_that_comes_between_claim_and_booking_holds_its_job_alone(farm, monkeypatch):
    jobs = [await farm.submit("noop") for _ in range(3)]
    handing, late = farm.replica.engine.dispatcher.assigner, jobs[1]
    asked, real = [], handing._book

    async def book(spot, batch):
        if not asked:
            await farm.books.change(lambda admin: admin.change_job("film", late, max_cores="0.5", actor="test"))
        asked.extend(batch)
        return await real(spot, batch)

    monkeypatch.setattr(handing, "_book", book)
    await farm.worker()
    assert [await farm.ended(job) for job in jobs if job != late] == ["SUCCEEDED"] * 2
    await until(lambda: farm.database.value(PARKED_OF, late), what="the frame to be parked")
    assert len(asked[0].jobs) == 3, "they were not booked as one"
    await farm.books.change(lambda admin: admin.change_job("film", late, max_cores=1, actor="test"))
    assert await farm.ended(late) == "SUCCEEDED"


async def test_a_cap_that_comes_while_a_job_runs_frame_by_frame_lets_others_pass(farm):
    await farm.worker("a", slots=1)
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=4)
    await farm.running("x", 1)
    await farm.books.change(lambda admin: admin.change_job("film", job, max_cores=1, actor="test"))
    await farm.worker("b", slots=1)
    await until(lambda: farm.database.value(PARKED_OF, job), what="what waits to be parked")
    other = await farm.submit("noop", frames=3)
    assert await farm.ended(other) == "SUCCEEDED"
    assert seen["began"] == ["x"]
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_cancelling_a_job_ends_what_waits_and_stops_what_runs(farm):
    await farm.worker(slots=2)
    hanging("x")
    job = await farm.submit("hang", "x", frames=10)
    await farm.running("x", 2)
    assert await farm.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled") is JobState.CANCELLED
    assert await farm.ended(job) == "CANCELLED"
    await until(lambda: seen.get("stopped") == ["x", "x"], what="both frames stopped")
    [layer] = (await farm.done(job))["layers"]
    assert layer["cancelled"] == 10
    assert await farm.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled") is None


async def test_a_deadline_counts_from_the_submission_and_ends_the_job(farm):
    await farm.worker()
    hanging("x")
    job = await farm.submit("hang", "x", budget=Budget(deadline_ms=300))
    await farm.running("x")
    assert await farm.ended(job) == "TIMEOUT"
    assert (await farm.done(job))["reason"] == "deadline_expired"


async def test_a_topic_without_a_pool_fails_at_once_into_the_dead_letters(farm):
    await farm.worker()
    job = await farm.submit("noop", frames=3, labels={"preferred_pool": "mars"})
    assert await farm.ended(job) == "FAILED"
    letters = await farm.replica.queue.dead_letters.find(_letters())
    assert [(letter.reason, letter.job) for letter in letters] == [("no_pool_mapping", job)] * 3


def _letters():
    from rota.queue.dead_letters import DeadLetterFilter

    return DeadLetterFilter(kind="frame")


async def test_a_task_that_no_worker_knows_waits_for_one_that_does(farm):
    await farm.worker()
    job = await farm.submit("nobody_knows_it")
    board = farm.replica.engine.dispatcher.pending_queues
    await until(lambda: board.frames_by_reason() == {"no_workers": 1}, what="a reason")
    [spot] = [spot for spot in board.entries.values() if spot.waiting]
    [passed] = farm.replica.engine.registry.explain(spot.key.cls).passed
    assert passed.why == "it does not know the task nobody_knows_it"
    await farm.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    assert await farm.ended(job) == "CANCELLED"


async def test_two_shows_share_a_pool_by_their_sizes(farm):
    await farm.show("short", size=1, burst=100)
    gate = hanging("x")
    await asyncio.gather(
        farm.submit("hang", "x", frames=50, show="short"),
        farm.submit("hang", "x", frames=50, show="film"),
    )
    board = farm.replica.engine.dispatcher.pending_queues
    await until(lambda: board.shows_waiting() == 2, what="both shows waiting")
    await farm.worker(slots=20)
    await farm.running("x", 20)
    used = await farm.replica.accounting.live.counters(await _show(farm, "film"))
    assert max(usage.cores for usage in used.values()) >= 1000
    gate.set()


async def _show(farm, name):
    return next(show.id for show in await farm.books.admin.shows() if show.name == name)


async def test_two_replicas_and_three_workers_run_a_layer_together(farm):
    await farm.server()
    for number in range(3):
        await farm.worker(f"w{number}", slots=20)
    job = await farm.submit("note", frames=2000)
    assert await farm.ended(job, within_s=30) == "SUCCEEDED"
    assert sorted(frame for frame, _ in seen["note"]) == list(range(2000))


async def test_frames_of_two_gpu_layers_never_share_the_one_gpu_of_a_worker(farm):
    await farm.worker(slots=20, gpus=1)
    names = ("train", "infer")
    jobs = [await farm.submit("on_gpu", name, frames=12, layer={"gpus": 1}) for name in names]
    assert [await farm.ended(job) for job in jobs] == ["SUCCEEDED"] * 2
    taken, given = seen["gpu"][::2], seen["gpu"][1::2]
    assert [(name, devices) for name, _, devices in taken] == [(name, devices) for name, _, devices in given]
    assert {word for _, word, _ in taken} == {"took"}
    assert sorted(name for name, _, _ in taken) == ["infer"] * 12 + ["train"] * 12
    assert {devices for _, _, devices in taken} == {(0,)}


async def test_a_frame_that_needs_more_gpus_than_any_worker_has_waits(farm):
    await farm.worker(gpus=1)
    job = await farm.submit("on_gpu", "x", layer={"gpus": 2})
    await until(
        lambda: farm.replica.engine.dispatcher.pending_queues.frames_by_reason().get("no_workers"), what="a reason"
    )
    await farm.worker("big", gpus=2)
    assert await farm.ended(job) == "SUCCEEDED"
    assert seen["gpu"][0] == ("x", "took", (0, 1))
