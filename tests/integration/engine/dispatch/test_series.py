"""Frames in series in the whole pipeline: they share a slot, caps stay exact, and nothing is lost or run twice."""

import asyncio

import pytest

from rota import context
from rota.engine.dispatch.assigner import REFUSALS, SERIES_FULL
from rota.engine.dispatch.series import SeriesLength
from rota.engine.submission.submitter import Submitter
from rota.model.errors import NatsUnavailable
from rota.model.jobs.submission import LayerSpec, RetrySpec, Submission
from tests.support.harness.lost_replies import lose_reply
from tests.support.jobs import NO_EVENTS
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, app, gates, hanging, seen
from tests.support.waiting import until

PRODUCERS = 4
CHARGED = sql("SELECT coalesce(sum(int_cores_reserved), 0)::bigint FROM rota.proc")
SERIES = sql("SELECT count(*) FROM rota.proc WHERE series_first IS NOT NULL")
LONGEST = sql("SELECT coalesce(max(token - series_first + 1), 0) FROM rota.proc")
MIXED = sql(
    "SELECT count(*) FROM rota.proc p JOIN rota.proc carrier"
    " ON p.token BETWEEN carrier.series_first AND carrier.token AND p.pk_job <> carrier.pk_job"
)
FOLLOWER = sql(
    "SELECT p.pk_job FROM rota.proc p JOIN rota.proc first ON first.pk_job = $1::uuid"
    " WHERE NOT p.b_ended AND p.token > first.token LIMIT 1"
)
BOOKED = sql("SELECT count(*) FROM rota.proc WHERE pk_job = $1::uuid AND NOT b_ended")
UNENDED = sql("SELECT count(*) FROM rota.proc WHERE NOT b_ended")


@app.task(name="brief")
async def brief(*_args):
    """A short frame that notes its start and end."""
    now = context_of("brief")
    await asyncio.sleep(0)
    seen.setdefault("ended", []).append(now)


@app.task(name="brief-or-hang")
async def brief_or_hang(name, frame):
    """Frames up to this one are short; it waits for its gate."""
    now = context_of(name)
    if now[0] == frame:
        await gates[name].wait()


def context_of(name):
    now = (context().frame, context().attempt)
    seen.setdefault(name, []).append(now)
    return now


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        await farm.quiet()
        assert await farm.database.value(CHARGED) == 0


@pytest.fixture
def patience(monkeypatch):
    """Workers hand back series on request only."""
    monkeypatch.setattr("rota.worker.frame_table.HAND_BACK_AFTER_S", 3600.0)


def know(farm, frames=100, packed=1):
    """As if all work had been seen, so that so many frames of it are in a series; so many while slots are free."""
    for replica in farm.replicas:
        replica.engine.dispatcher.durations.series_length = lambda _: SeriesLength(frames, packed)


class Sampler:
    """Samples the charges of all bookings, in PostgreSQL and in Redis, while a block runs."""

    def __init__(self, farm):
        self.farm = farm
        self.cores = []
        self.series = 0
        self._task = None

    async def __aenter__(self):
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_failure):
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self):
        while True:
            self.cores.append(await self.farm.database.value(CHARGED))
            self.series = max(self.series, await self.farm.database.value(LONGEST))
            await asyncio.sleep(0.002)


async def test_short_frames_run_in_series_within_a_cap_of_two_cores(farm):
    """Ten thousand frames: the cap holds in every sample, each frame ends once."""
    await farm.worker(slots=8)
    async with Sampler(farm) as samples:
        job = await farm.submit("brief", frames=10_000, max_cores=2)
        assert await farm.ended(job, within_s=120) == "SUCCEEDED"
    assert max(samples.cores) == 200
    assert samples.series > 16, "no series was long"
    assert sorted(seen["brief"]) == [(frame, 1) for frame in range(10_000)]
    [layer] = (await farm.done(job))["layers"]
    assert (layer["frames"], layer["succeeded"]) == (10_000, 10_000)


async def test_jobs_of_several_producers_share_series_although_each_lane_has_a_claim_of_its_own(farm):
    know(farm, 256, 256)
    given_back = REFUSALS.labels(SERIES_FULL)._value.get()
    producers = [Submitter(farm.database, NO_EVENTS) for _ in range(PRODUCERS)]
    one = Submission(show="film", layers=(LayerSpec(task="brief"),))
    made = await asyncio.gather(*(each.submit([one] * 40) for each in producers for _ in range(3)))
    async with Sampler(farm) as samples:
        await farm.worker(slots=2)
        for job in [each.job for jobs in made for each in jobs]:
            assert await farm.ended(job) == "SUCCEEDED"
    assert max(samples.cores) <= 200
    assert REFUSALS.labels(SERIES_FULL)._value.get() == given_back, "claimed for series that had no room"


@pytest.mark.parametrize("managed", [True, False])
async def test_series_keep_a_subscription_cap_in_both_ledgers(database_url, redis_url, nats_url, bus_prefix, managed):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show(managed=managed, size=2, burst=2)
        await farm.worker(slots=8)
        async with Sampler(farm) as samples:
            job = await farm.submit("brief", frames=3000)
            assert await farm.ended(job, within_s=60) == "SUCCEEDED"
        assert max(samples.cores) == 200
        assert samples.series > 4
        await farm.quiet()


async def test_single_jobs_share_slots_in_series(farm):
    await farm.worker(slots=2)
    know(farm)
    layer = LayerSpec(task="square", input={"args": [3], "kwargs": {}})
    async with Sampler(farm) as samples:
        submitted = await farm.submitter.submit([Submission(show="film", layers=(layer,)) for _ in range(400)])
        for each in submitted:
            assert await farm.ended(each.job) == "SUCCEEDED"
    assert seen["square"] == [3] * 400
    assert max(samples.cores) <= 200
    assert samples.series > 4


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("frames", [1, 3])
async def test_only_jobs_of_one_frame_share_a_series_with_others(farm, frames):
    """A job of several is charged for each of its own: what it has booked would be another's otherwise."""
    await farm.worker(slots=2)
    know(farm)
    gate = hanging("mixed")
    short = LayerSpec(task="brief-or-hang", input={"args": ["mixed", -1], "kwargs": {}})
    hangs = LayerSpec(task="brief-or-hang", input={"args": ["mixed", 0], "kwargs": {}}, frames=frames)
    layers = [short] * 40 + [hangs] * 100
    submitted = await farm.submitter.submit([Submission(show="film", layers=(each,)) for each in layers])
    await until(lambda: len(seen.get("mixed", ())) == 42, what="a frame that hangs on each slot")
    assert await farm.database.value(SERIES) == 2
    assert (await farm.database.value(MIXED) > 0) == (frames == 1)
    gate.set()
    for each in submitted:
        assert await farm.ended(each.job) == "SUCCEEDED"


async def test_very_short_frames_share_slots_that_are_free(farm):
    await farm.worker(slots=16)
    know(farm, frames=100, packed=50)
    async with Sampler(farm) as samples:
        job = await farm.submit("brief", frames=3000)
        assert await farm.ended(job) == "SUCCEEDED"
    assert samples.series > 16
    assert sorted(seen["brief"]) == [(frame, 1) for frame in range(3000)]


async def test_frames_of_unknown_work_are_in_no_series(farm):
    await farm.worker(slots=2)
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=50)
    await farm.running("x", 2)
    assert await farm.database.value(SERIES) == 0
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_work_that_never_reruns_after_a_loss_is_in_no_series(farm):
    await farm.worker(slots=2)
    know(farm)
    async with Sampler(farm) as samples:
        job = await farm.submit("brief", frames=200, layer={"retries": RetrySpec(lost=0)})
        assert await farm.ended(job) == "SUCCEEDED"
    assert samples.series == 0


async def test_retried_frames_run_alone(farm):
    await farm.worker(slots=1)
    know(farm)
    job = await farm.submit("flaky", 1, frames=40, layer={"retries": RetrySpec(most=1, first_s=0.01)})
    assert await farm.ended(job) == "SUCCEEDED"
    assert sorted(seen["flaky"]) == [1] * 40 + [2] * 40


@pytest.mark.usefixtures("patience")
async def test_frames_behind_a_long_one_run_on_an_idle_slot_meanwhile(farm):
    """The long frame has the only series; the other slot became idle."""
    await farm.worker(slots=2)
    know(farm)
    hanging("mixed")
    job = await farm.submit("brief-or-hang", "mixed", 3, frames=60)
    await until(lambda: len(seen.get("mixed", ())) == 60, what="all other frames to run")
    assert await farm.database.value(UNENDED) >= 1
    gates["mixed"].set()
    assert await farm.ended(job) == "SUCCEEDED"
    assert sorted(seen["mixed"]) == [(frame, 1) for frame in range(60)], "a frame that is handed back uses no attempt"


@pytest.mark.usefixtures("patience")
async def test_frames_of_a_higher_priority_do_not_wait_for_a_whole_series(farm):
    await farm.worker(slots=1)
    know(farm)
    hanging("low")
    low = await farm.submit("brief-or-hang", "low", 3, frames=60, priority=3)
    await until(lambda: len(seen.get("low", ())) == 4, what="the frame that hangs")
    high = await farm.submit("square", 2, priority=8)
    await until(
        lambda: farm.replica.engine.dispatcher.pending_queues.frames_by_reason().get("pool_overloaded"),
        what="the refusal of the higher priority",
    )
    await until(lambda: _handed_back(farm), what="the recall")
    gates["low"].set()
    assert await farm.ended(high) == "SUCCEEDED"
    assert len(seen["low"]) < 60
    assert await farm.ended(low) == "SUCCEEDED"


async def _has_no_booking(farm, job):
    return not await farm.database.value(BOOKED, job)


async def _handed_back(farm):
    return await farm.database.value(UNENDED) == 1


@pytest.mark.usefixtures("patience")
async def test_cancelled_job_ends_all_frames_of_its_series(farm):
    await farm.worker(slots=1)
    know(farm)
    hanging("mixed")
    job = await farm.submit("brief-or-hang", "mixed", 2, frames=60)
    await until(lambda: len(seen.get("mixed", ())) == 3, what="the frame that hangs")
    await farm.replica.engine.canceller.cancel(job, "test")
    assert await farm.ended(job) == "CANCELLED"
    assert len(seen["mixed"]) == 3
    other = await farm.submit("square", 4)
    assert await farm.ended(other) == "SUCCEEDED"


@pytest.mark.usefixtures("patience")
async def test_cancelled_job_leaves_the_others_of_its_series(farm):
    await farm.worker(slots=1)
    know(farm)
    gate = hanging("mixed")
    hangs, other = (LayerSpec(task="brief-or-hang", input={"args": ["mixed", frame], "kwargs": {}}) for frame in (0, 1))
    layers = [other] * 30 + [hangs] + [other] * 90
    jobs = await farm.submitter.submit([Submission(show="film", layers=(each,)) for each in layers])
    cancelled = await until(lambda: farm.database.value(FOLLOWER, jobs[30].job), what="a job behind it")
    await farm.replica.engine.canceller.cancel(cancelled, "test")
    await until(lambda: _has_no_booking(farm, cancelled), what="the worker to drop it")
    gate.set()
    for each in jobs:
        assert await farm.ended(each.job) == ("CANCELLED" if each.job == cancelled else "SUCCEEDED")
    assert len(seen["mixed"]) == 120


@pytest.mark.usefixtures("patience")
async def test_draining_worker_gives_its_series_to_another(farm):
    stop = await farm.worker("w0", slots=1)
    know(farm)
    gate = hanging("mixed")
    job = await farm.submit("brief-or-hang", "mixed", 2, frames=60)
    await until(lambda: len(seen.get("mixed", ())) == 3, what="the frame that hangs")
    stopping = asyncio.create_task(stop())
    await farm.worker("w1", slots=1)
    await until(lambda: len(seen["mixed"]) == 60, what="the others to run")
    gate.set()
    await stopping
    assert await farm.ended(job) == "SUCCEEDED"
    assert sorted(seen["mixed"]) == [(frame, 1) for frame in range(60)]


async def test_emptied_redis_does_not_disturb_series(farm, redis):
    await farm.worker(slots=4)
    async with Sampler(farm) as samples:
        job = await farm.submit("brief", frames=4000, max_cores=2)
        for ended in (500, 1500, 2500):
            await until(lambda ended=ended: len(seen.get("ended", ())) >= ended, within_s=30, what="progress")
            await redis.flushdb()
        assert await farm.ended(job, within_s=60) == "SUCCEEDED"
    assert max(samples.cores) == 200
    assert sorted(frame for frame, _ in seen["brief"]) == list(range(4000))


@pytest.mark.parametrize(
    ("point", "task", "argument"),
    [
        ("procs.insert", "brief", 1),
        ("dispatch.publish", "brief", 1),
        ("finish.success", "brief", 1),
        ("finish.success", "echo", 1),
        ("finish.ended", "leave", "a.txt"),
    ],
)
async def test_lost_reply_loses_no_frame_of_a_series(farm, monkeypatch, point, task, argument):
    await farm.worker(slots=2)
    know(farm)
    lost = lose_reply(monkeypatch, f"{point}:3")
    job = await farm.submit(task, argument, frames=400)
    assert await farm.ended(job, within_s=40) == "SUCCEEDED"
    assert lost == [point]
    [layer] = (await farm.done(job))["layers"]
    assert (layer["frames"], layer["succeeded"]) == (400, 400)


async def test_refused_publish_returns_the_frames_of_a_series(farm, monkeypatch):
    await farm.worker(slots=2)
    know(farm)
    bus, failed = farm.replica.bus, []
    real = bus.publish_many

    async def away(messages):
        if len(failed) < 3:
            failed.append(messages)
            raise NatsUnavailable("NATS is away.")
        return await real(messages)

    monkeypatch.setattr(bus, "publish_many", away)
    job = await farm.submit("brief", frames=200)
    assert await farm.ended(job, within_s=30) == "SUCCEEDED"
    assert sorted(seen["brief"]) == [(frame, 1) for frame in range(200)]


async def test_other_replicas_learn_of_the_end_of_each_frame_of_a_series(
    database_url, redis_url, nats_url, bus_prefix, monkeypatch
):
    """Not from heartbeats, which come every few seconds."""
    monkeypatch.setattr("rota.placement.workers.WorkerInfo._reconcile_frames", lambda *_args, **_more: None)
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.server()
        await until(lambda: all(len(each.engine.members.live_replicas()) == 2 for each in farm.replicas))
        await farm.worker(slots=2)
        await until(lambda: all(each.engine.registry.workers for each in farm.replicas))
        job = await farm.submit("brief", frames=2000)
        assert await farm.ended(job, within_s=30) == "SUCCEEDED"
        for replica in farm.replicas:
            await until(lambda replica=replica: _is_free(replica), what="free slots")
        await farm.quiet()


def _is_free(replica):
    [worker] = replica.engine.registry.workers.values()
    return worker.booked.slots == 0
