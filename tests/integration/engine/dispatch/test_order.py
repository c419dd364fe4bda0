"""Which of the waiting jobs starts when something is released, and where."""

import asyncio

import pytest

from rota.accounting.resources import CapsUpdate
from rota.engine.submission.submitter import Submitter
from rota.infra.clock import SystemClock
from rota.model.job_states import JobState
from rota.model.jobs.submission import LayerSpec, Submission
from tests.support.dispatch import Rig
from tests.support.queue import sql
from tests.support.replica_and_worker import NO_EVENTS, Farm, gates, hanging, seen
from tests.support.waiting import until

ROUNDS = 12
PRODUCERS = 4
CLASSES = 4
BY_SHOW = sql("SELECT s.str_name, count(*) AS n FROM rota.proc p JOIN rota.show s USING (pk_show) GROUP BY 1")
ANY_ENDED = sql("SELECT sum(succeeded) > 0 FROM rota.layer WHERE pk_job = $1::uuid")
TAKE_LANE = sql("SELECT pg_advisory_xact_lock(1903519026, $1)")
BY_WORKER = sql("SELECT count(*) AS frames FROM rota.proc GROUP BY pk_host")


class LaterClock(SystemClock):
    """Of a server that has run for 40 minutes more."""

    def monotonic(self):
        return super().monotonic() + 2400.0


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        yield cluster
        for gate in gates.values():
            gate.set()
        await cluster.quiet()


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "unmanaged"])
async def test_released_share_goes_to_the_highest_priority_that_waits(cluster, managed):
    await cluster.show(burst=1, size=1, managed=managed)
    await cluster.worker(slots=20)
    hanging("first")
    await cluster.submit("hang", "first")
    await cluster.running("first")
    names = [f"{priority}.{number}" for number in range(ROUNDS) for priority in (1, 3, 5, 8)]
    for name in names:
        hanging(name)
        await cluster.submit("hang", name, priority=int(name[0]))
    queues = cluster.replica.engine.dispatcher.pending_queues
    await until(lambda: queues.frames_by_reason() == {"quota_subscription": len(names)}, what="all jobs at the share")
    running = "first"
    for begun in range(2, 2 + len(names)):
        gates[running].set()
        await until(lambda begun=begun: len(seen["began"]) == begun, what="the next frame")
        running = seen["began"][-1]
    order = [int(name[0]) for name in seen["began"][1:]]
    assert order == sorted(order, reverse=True)


async def test_short_job_does_not_wait_for_a_long_one_of_its_queue(cluster):
    await cluster.show()
    await cluster.worker(slots=8)
    long = await cluster.submit("noop", frames=30_000)
    await until(lambda: cluster.database.value(ANY_ENDED, long), what="the first frames of the long job")
    short = await cluster.submit("noop", frames=5)
    assert await cluster.ended(short) == "SUCCEEDED"
    waiting = sum(counts.waiting for counts in (await cluster.replica.queue.counts_exact()).values())
    assert waiting > 20_000
    await cluster.replica.engine.canceller.terminate(long, JobState.CANCELLED, "cancelled")


async def test_short_jobs_of_several_producers_end_before_a_long_one_that_came_later(cluster):
    """Each producer enqueues to a lane of its own."""
    await cluster.show()
    producers = [Submitter(cluster.database, NO_EVENTS) for _ in range(PRODUCERS)]
    five = Submission(show="film", layers=(LayerSpec(task="noop", frames=5),))
    short = [made.job for each in await asyncio.gather(*(one.submit([five]) for one in producers)) for made in each]
    long = await cluster.submit("noop", frames=3000)
    explain = cluster.replica.engine.explainer.explain
    ahead = [(await explain(job)).layers[0].position.ahead for job in (*short, long)]
    assert (sorted(ahead[:-1]), ahead[-1]) == ([0, 5, 10, 15], 20)
    await cluster.worker(slots=4)
    for job in short:
        assert await cluster.ended(job) == "SUCCEEDED"
    waiting = sum(counts.waiting for counts in (await cluster.replica.queue.counts_exact()).values())
    assert waiting > 1500
    await cluster.replica.engine.canceller.terminate(long, JobState.CANCELLED, "cancelled")


async def test_classes_that_come_together_start_without_a_timer(cluster, monkeypatch):
    """The first round of a class may reserve all that is free, until it knows how many frames wait."""
    monkeypatch.setattr("rota.engine.dispatch.dispatcher.POLL_INTERVAL_S", 3600.0)
    await cluster.show()
    await cluster.worker(slots=8)
    assert await cluster.ended(await cluster.submit("noop")) == "SUCCEEDED"
    for name in range(CLASSES):
        hanging(name)
    await asyncio.gather(*(cluster.submit("hang", name, layer={"cores": 1 + name / 4}) for name in range(CLASSES)))
    for name in range(CLASSES):
        await cluster.running(name)


async def test_class_that_waits_for_the_claim_of_another_is_not_told_that_workers_are_full(
    database, redis, monkeypatch
):
    rig = await Rig(database, redis).open()
    await rig.show("film", {"farm": 8})
    rig.route({"*": ("farm",)})
    rig.beat("w", slots=4, capabilities=("task.noop",))
    jobs = [await rig.submit("film", cores=cores) for cores in (1, 2)]
    await rig.dispatcher._refresh_all(always=True)
    [first] = [each for each in rig.pending_queues.entries.values() if each.key.cls.cores == 100]
    first.counted = False  # it may have any number of frames
    claim_each, explanations = rig.queue.claim_each, []

    async def explain_and_claim(*given):
        explanations.append(await rig.explainer.explain(jobs[1]))
        return await claim_each(*given)

    monkeypatch.setattr(rig.queue, "claim_each", explain_and_claim)
    for _ in range(2):
        async with asyncio.TaskGroup() as tasks:
            await rig.dispatcher._start_rounds(tasks)
    assert {reason.code for reason in explanations[0].reasons} <= {"behind"}
    assert [await rig.started(job) for job in jobs] == [1, 1]


async def test_time_for_which_a_queue_was_idle_is_no_waiting_time(cluster):
    await cluster.show(burst=1, size=1)
    await cluster.worker()
    hanging("earlier").set()
    assert await cluster.ended(await cluster.submit("hang", "earlier", priority=5)) == "SUCCEEDED"
    dispatcher = cluster.replica.engine.dispatcher
    for part in (dispatcher.pending_queues, dispatcher.reader):
        part._clock = LaterClock()  # and never an earlier one again
    jobs = {}
    for name, priority in (("first", 8), ("lower", 5), ("higher", 6)):
        hanging(name)
        jobs[name] = await cluster.submit("hang", name, priority=priority)
        if name == "first":
            await cluster.running("first")
    refused = dispatcher.pending_queues.frames_by_reason
    await until(lambda: refused().get("quota_subscription") == 2, what="both jobs at the share")
    for name in ("lower", "higher"):
        [reason] = (await cluster.replica.engine.explainer.explain(jobs[name])).reasons
        assert (reason.code, reason.amounts.have, reason.amounts.limit) == ("quota_subscription", 1, 1)
        assert [holder.id for holder in reason.holders] == [jobs["first"]]
    gates["first"].set()
    await until(lambda: len(seen["began"]) == 3, what="the next frame")
    assert seen["began"] == ["earlier", "first", "higher"]


async def test_frames_of_a_small_job_are_spread_over_idle_workers(cluster):
    await cluster.show()
    for number in range(4):
        await cluster.worker(f"w{number}", slots=8)
    hanging("x")
    job = await cluster.submit("hang", "x", frames=8)
    await cluster.running("x", 8)
    frames = [row["frames"] for row in await cluster.database.rows(BY_WORKER)]
    explanation = await cluster.replica.engine.explainer.explain(job)
    assert sorted(run.frames for run in explanation.running) == sorted(frames)
    assert (explanation.reasons, explanation.sentence) == ((), "No frame of it is waiting.")
    # Measured load counts as up to a frame, and differs from worker to worker.
    assert len(frames) == 4
    assert max(frames) - min(frames) <= 2


async def test_shares_of_a_pool_are_kept_whatever_other_pools_hold(cluster):
    """Both shows have waited before the worker comes; one has a large share of a pool that has no worker."""
    await cluster.show("film", size=6)
    await cluster.show("short", size=2)
    await cluster.accounting.change(lambda admin: admin.create_pool("other", actor="test"))
    await cluster.accounting.change(
        lambda admin: admin.create_subscription("short", "other", size=1000, burst=1000, actor="test")
    )
    hanging("x")
    jobs = [await cluster.submit("hang", "x", frames=20, show=show) for show in ("film", "short")]
    queues = cluster.replica.engine.dispatcher.pending_queues
    await until(lambda: queues.shows_waiting() == 2, what="both shows")
    await cluster.worker(slots=8)
    await cluster.running("x", 8)
    assert {row["str_name"]: row["n"] for row in await cluster.database.rows(BY_SHOW)} == {"film": 6, "short": 2}
    await until(lambda: queues.frames_by_reason() == {"pool_overloaded": 32}, what="a full pool")
    explanations = [await cluster.replica.engine.explainer.explain(job) for job in jobs]
    for explanation in explanations:
        full = explanation.reasons[0]
        assert (full.code, {each.name: each.frames for each in full.holders}) == (
            "pool_overloaded",
            {"film": 6, "short": 2},
        )
    assert sum(each.layers[0].position.frames_before for each in explanations) == 1, (
        "both have their share: one is first"
    )


async def test_end_of_a_round_does_not_end_the_claim_of_the_next(cluster, monkeypatch):
    """Its queue is counted while the claim is under way: what is being claimed must not be subtracted twice."""
    await cluster.show()
    await cluster.worker(slots=20)
    dispatcher, queue = cluster.replica.engine.dispatcher, cluster.replica.queue
    publish, claim_each = dispatcher.assigner._publish, queue.claim_each
    published, publishing, claimed, claiming = (asyncio.Event() for _ in range(4))

    async def publish_late(*given):
        publishing.set()
        await published.wait()
        await publish(*given)

    async def claim_late(*given):
        if publishing.is_set():
            claiming.set()
            await claimed.wait()
        return await claim_each(*given)

    monkeypatch.setattr(dispatcher.assigner, "_publish", publish_late)
    monkeypatch.setattr(queue, "claim_each", claim_late)
    jobs = [await cluster.submit("noop")]
    await publishing.wait()
    jobs.append(await cluster.submit("noop"))
    await claiming.wait()
    [pending] = dispatcher.pending_queues.entries.values()
    published.set()
    await until(lambda: len(dispatcher._rounds) == 1, what="the end of the first round")
    assert pending.busy
    claimed.set()
    assert [await cluster.ended(job) for job in jobs] == ["SUCCEEDED"] * 2


async def test_round_that_is_cancelled_before_it_runs_keeps_nothing(database, redis):
    rig = await Rig(database, redis).open()
    await rig.show("film", {"farm": 8})
    rig.route({"*": ("farm",)})
    rig.beat("w", slots=4, capabilities=("task.noop",))
    job = await rig.submit("film", frames=3)
    await rig.dispatcher._refresh_all(always=True)
    async with asyncio.TaskGroup() as tasks:
        await rig.dispatcher._start_rounds(tasks)
        [task] = rig.dispatcher._rounds
        task.cancel()
    [pending] = rig.pending_queues.entries.values()
    assert (pending.busy, rig.registry.fitting_frames(pending.key.cls)) == (False, 4)
    await rig.turn()
    assert await rig.started(job) == 3


@pytest.mark.parametrize("brief", [True, False], ids=["other_server", "long_transaction"])
async def test_room_waits_for_a_lane_that_another_server_claims_from(database, redis, monkeypatch, brief):
    """While the lane of the higher priority is locked for a moment, the only slot must not go to the lower one; a
    transaction that holds the lane for longer is not waited for."""
    rig = await Rig(database, redis).open()
    await rig.show("film", {"farm": 8})
    rig.route({"*": ("farm",)})
    rig.beat("w", slots=1, capabilities=("task.noop",))
    low, high = [await rig.submit("film", job={"priority": priority}) for priority in (1, 8)]
    await rig.dispatcher._refresh_all(always=True)
    [pending] = [each for each in rig.pending_queues.entries.values() if each.priority == 8]
    claim_each, claims = rig.queue.claim_each, []

    async def claim_and_unlock(*given):
        results = await claim_each(*given)
        claims.append(results)
        if brief:
            unlock.set()
            await unlocked
        return results

    async def hold_lane():
        async with database.transaction() as tx:
            for lane in pending.lanes:
                await tx.value(TAKE_LANE, lane)
            locked.set()
            await unlock.wait()

    locked, unlock = asyncio.Event(), asyncio.Event()
    unlocked = asyncio.create_task(hold_lane())
    await locked.wait()
    monkeypatch.setattr(rig.queue, "claim_each", claim_and_unlock)
    for _ in range(2):  # what the dispatcher knows is not read again
        rig.dispatcher._capacity_freed = True
        async with asyncio.TaskGroup() as tasks:
            await rig.dispatcher._start_rounds(tasks)
            while rig.dispatcher._turn_cut:  # a turn that takes long goes on after a pause
                await rig.dispatcher._start_rounds(tasks)
    unlock.set()
    await unlocked
    assert [result.locked for result in claims[0]] == [True]
    started = [await rig.started(job) for job in (low, high)]
    assert started == ([0, 1] if brief else [1, 0])


@pytest.mark.parametrize("level", ["folder", "dept"])
async def test_minimum_of_a_folder_or_department_is_served_first(database, redis, level):
    """Before higher priorities of its show, and only up to the minimum."""
    rig = await Rig(database, redis).open()
    await rig.show("film", {"farm": 20})
    caps = CapsUpdate(min_cores=2)
    if level == "folder":
        await rig._change("create_folder", "film", "owed", caps=caps)
    else:
        await rig._change("create_dept", "owed")
        await rig._change("create_point", "film", "owed", caps=caps)
    rig.route({"*": ("farm",)})
    rig.beat("w", slots=1, capabilities=("task.noop",))
    await rig.submit("film")
    await rig.settle()
    first = await rig.submit("film", frames=10, job={"priority": 8})
    owed = await rig.submit("film", frames=10, job={"priority": 1, level: "owed"})
    await rig.settle()
    positions = [(await rig.explainer.explain(job)).layers[0].position for job in (owed, first)]
    assert [position.frames_before for position in positions] == [0, 2]
    rig.beat("w", slots=6, capabilities=("task.noop",))
    await rig.settle()
    assert [await rig.started(job) for job in (owed, first)] == [2, 3]
    explanation = await rig.explainer.explain(first)
    assert not [cause for cause in explanation.reasons if cause.code == "behind"], "nothing is ahead any more"
