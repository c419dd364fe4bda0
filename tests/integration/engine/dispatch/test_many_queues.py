"""Many shows and many placement classes: few rounds serve them, and `explain` tells what is ahead of a job."""

import asyncio

import pytest

from rota.engine.dispatch import pending_queues
from rota.model.jobs.submission import LayerSpec, Submission
from tests.support.dispatch import Rig
from tests.support.queue import agreed, sql
from tests.support.replica_and_worker import Farm, gates, hanging
from tests.support.waiting import until

SHOWS = 10
FRAMES = 60
CLASSES = 150
BY_SHOW = sql("SELECT s.str_name AS show, count(*) AS n FROM rota.proc JOIN rota.show s USING (pk_show) GROUP BY 1")
LIVE = sql("SELECT count(*) FROM rota.job")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        yield cluster
        for gate in gates.values():
            gate.set()
        await cluster.quiet()


@pytest.fixture
async def rig(database, redis):
    rig = await Rig(database, redis).open()
    await rig.show("film", {"farm": 1000})
    rig.route({"*": ("farm",)})
    return rig


def counting(monkeypatch, owner, name):
    """The calls of a method from now on."""
    calls, real = [], getattr(owner, name)

    def counted(*given, **more):
        calls.append(given)
        return real(*given, **more)

    monkeypatch.setattr(owner, name, counted)
    return calls


def single_jobs(show, task, classes=CLASSES):
    """A job of one frame in each of so many placement classes, as memory estimates differ from job to job."""
    layers = (LayerSpec(task=task, memory=f"{1 + number}MiB") for number in range(classes))
    return [Submission(show=show, layers=(layer,)) for layer in layers]


async def all_ended(cluster):
    async def none_left():
        return not await cluster.database.value(LIVE)

    await until(none_left, what="the end of all jobs")


async def test_many_busy_shows_share_the_farm_and_take_few_rounds(cluster, monkeypatch):
    """Each is over its size, and gets more than a frame per round all the same."""
    shows = [f"show{number}" for number in range(SHOWS)]
    for show in shows:
        await cluster.show(show, size=1, managed=False)
    hanging("x")
    jobs = [await cluster.submit("hang", "x", frames=3, show=show) for show in shows]
    queues, explainer = cluster.replica.engine.dispatcher.pending_queues, cluster.replica.engine.explainer
    await until(lambda: queues.shows_waiting() == len(queues._shares) == SHOWS, what="all shows and their sizes")
    await cluster.worker(slots=SHOWS)
    await cluster.running("x", SHOWS)
    await until(lambda: queues.frames_by_reason() == {"pool_overloaded": 2 * SHOWS}, what="a full farm")
    assert {row["show"]: row["n"] for row in await cluster.database.rows(BY_SHOW)} == dict.fromkeys(shows, 1)
    explanations = [await explainer.explain(job) for job in jobs]
    for explanation in explanations:
        [full, *order] = explanation.reasons
        assert (full.code, {(holder.kind, holder.frames) for holder in full.holders}) == (
            "pool_overloaded",
            {("show", 1)},
        )
        assert {reason.code for reason in order} <= {"fair_share", "behind"}
    # All use as much of their size, so each show is before another with one frame: whose first frame waits longest.
    assert sorted(each.layers[0].position.frames_before for each in explanations) == list(range(SHOWS))
    gates["x"].set()
    await all_ended(cluster)
    await cluster.worker("large", slots=SHOWS * FRAMES)
    rounds = counting(monkeypatch, cluster.replica.queue, "claim_each")
    for show in shows:
        await cluster.submit("noop", frames=FRAMES, show=show)
    await all_ended(cluster)
    assert len(rounds) < SHOWS * FRAMES / 4


async def test_single_jobs_of_many_classes_are_served_in_few_rounds(cluster, monkeypatch):
    await cluster.show()
    submitted = await cluster.submitter.submit(single_jobs("film", "noop"))
    queues, explainer = cluster.replica.engine.dispatcher.pending_queues, cluster.replica.engine.explainer
    await until(lambda: queues.frames_by_reason().get("no_workers") == CLASSES, what="all classes")
    for number in (0, CLASSES - 1):
        explanation = await explainer.explain(submitted[number].job)
        assert [reason.code for reason in explanation.reasons] == ["no_workers"]
    rounds = counting(monkeypatch, cluster.replica.queue, "claim_each")
    await cluster.worker(slots=2 * CLASSES, memory_mb=1 << 20)
    await all_ended(cluster)
    assert len(rounds) < CLASSES / 3


async def test_queues_that_are_idle_are_forgotten_and_their_counts_are_not(cluster, monkeypatch):
    monkeypatch.setattr(pending_queues, "ENTRIES_MAX", 10)
    await cluster.show()
    await cluster.worker(slots=100, memory_mb=1 << 20)
    queues = cluster.replica.engine.dispatcher.pending_queues
    for round_ in (1, 2):
        await cluster.submitter.submit(single_jobs("film", "noop", classes=40))
        await all_ended(cluster)
        await cluster.replica.engine.dispatcher._refresh_all(always=True)
        assert not queues.entries, "each of them is found again when frames come"
        counts = (await agreed(cluster.database)).values()
        assert (len(counts), {each["completed"] for each in counts}) == (40, {round_})


async def test_queues_that_are_counted_during_their_claim_need_no_other_round(rig, monkeypatch):
    """The count may or may not include what is being claimed."""
    rig.beat("w", slots=30, cores=3000, memory_mb=1 << 20, capabilities=("task.noop",))
    submitted = await rig.submitter.submit(single_jobs("film", "noop", classes=20))
    await rig.dispatcher._refresh_all(always=True)
    claim_each, claims = rig.queue.claim_each, []

    async def claim_and_count(*given):
        claims.append(len(given[0]))
        if len(claims) == 1:
            await rig.dispatcher._refresh_all(always=True)
        return await claim_each(*given)

    monkeypatch.setattr(rig.queue, "claim_each", claim_and_count)
    for _ in range(3):
        async with asyncio.TaskGroup() as tasks:
            await rig.dispatcher._start_rounds(tasks)
    assert [await rig.started(each.job) for each in submitted] == [1] * 20
    assert claims == [20]


async def test_turn_over_many_queues_plans_nothing_while_the_farm_is_full(rig, monkeypatch):
    rig.beat("w", slots=1, memory_mb=1 << 20, capabilities=("task.noop",))
    submitted = await rig.submitter.submit(single_jobs("film", "noop"))
    await rig.settle()
    plans = counting(monkeypatch, rig.registry, "plan")
    rig.dispatcher._capacity_freed = True  # as after a heartbeat: all queues are looked at
    await rig.turn()
    assert len(plans) <= 1
    waiting = [each.job for each in submitted if not await rig.started(each.job)]
    explanation = await rig.explainer.explain(waiting[-1])
    ahead = explanation.layers[0].position.frames_before
    assert [reason.code for reason in explanation.reasons] == ["pool_overloaded", "behind"][: 1 + bool(ahead)]
    for slots, started in ((1 + ahead, 0), (2 + ahead, 1)):
        rig.beat("w", slots=slots, cores=100 * slots, memory_mb=1 << 20, capabilities=("task.noop",))
        await rig.settle()
        assert await rig.started(waiting[-1]) == started
