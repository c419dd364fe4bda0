"""Administration by the SDK against the API of real servers, with async and sync calls."""

import asyncio
from datetime import UTC, datetime

import pytest

from rota import Rota
from rota.model.access import Role
from rota.model.errors import Forbidden, InvalidInput, NotFound, Refused
from rota.server import services
from rota.testing import inline
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every
from tests.support.api import Api
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show()
        yield farm


@pytest.fixture
async def app(farm):
    async with Rota(farm.replica.listen_url, key=await Api(farm).key(Role.ADMIN), show="film") as app:
        yield app


async def test_show_is_created_with_its_resources_and_deleted(farm, app):
    assert (await app.pools.create("gpu")).status == "active"
    await app.departments.create("fx")
    show = await app.shows.create("ads", managed=True)
    assert (show.name, show.managed, show.max_jobs) == ("ads", True, -1)
    share = await app.subscriptions.create("ads", "gpu", size=4, burst=8.5, gpu_burst=2)
    assert (share.pool, share.size, share.burst, share.gpu_burst) == ("gpu", 4, 8.5, 2)
    folder = await app.folders.create("ads", "spots", max_cores=2.5)
    assert (folder.name, folder.max_cores, folder.max_gpus) == ("spots", 2.5, -1)
    assert (await app.departments.add("ads", "fx", min_cores=1)).min_cores == 1
    view = await app.shows.get("ads")
    assert [one.pool for one in view.subscriptions] == ["gpu"]
    assert "spots" in {one.name for one in view.folders}
    assert [one.name for one in view.departments] == ["fx"]
    await app.departments.remove("ads", "fx")
    await app.subscriptions.delete("ads", "gpu")
    for one in await app.folders.list("ads"):
        await app.folders.delete("ads", one.name)
    await app.shows.delete("ads")
    await app.departments.delete("fx")
    await app.pools.delete("gpu")
    assert [one.name for one in await app.shows.list()] == ["film"]


async def test_change_affects_only_the_given_fields(farm, app):
    await app.folders.create("film", "spots", min_cores=1, max_cores=4, max_gpus=2)
    changed = await app.folders.change("film", "spots", max_cores=-1)
    assert (changed.min_cores, changed.max_cores, changed.max_gpus) == (1, -1, 2)
    assert (await app.folders.rename("film", "spots", "shots")).name == "shots"
    share = await app.subscriptions.change("film", "local", burst=50)
    assert (share.size, share.burst) == (100, 50)
    assert [one.burst for one in await app.subscriptions.list("film")] == [50]
    assert (await app.shows.set_managed("film", False)).managed is False
    assert (await app.shows.set_max_jobs("film", 3)).max_jobs == 3
    assert (await app.shows.rename("film", "movie")).name == "movie"
    await app.departments.create("fx")
    await app.departments.rename("fx", "sim")
    await app.departments.add("movie", "sim")
    assert (await app.departments.change("movie", "sim", max_cores=3)).max_cores == 3
    assert [one.name for one in await app.departments.of("movie")] == ["sim"]
    assert await app.departments.list() == ["default", "sim"]


async def test_agents_are_read_and_changed(farm, app, redis):
    seen = RunRecorder()
    made = {name: every(HOUR_MS, seen.quick) for name in ("aws/sync", "poll")}
    async with Pod(farm.database, redis, **made):
        await until(lambda: seen.count("aws/sync") and seen.count("poll"))
        [run] = await until(lambda: app.agents.history("aws/sync"))
        assert (run.outcome, run.replica) == ("SUCCEEDED", "pod")
        assert [one.name for one in await app.agents.list()] == ["aws/sync", "poll"]
        assert [one.name for one in await app.agents.list(most=1)] == ["aws/sync"]
        assert "pod" in (await app.agents.health()).members
        assert await app.agents.pause("poll")
        assert not await app.agents.pause("poll")
        assert (await app.agents.get("poll")).state == "PAUSED"
        with pytest.raises(Refused, match="is paused"):
            await app.agents.trigger("poll")
        assert await app.agents.resume("poll")
        assert not (await app.agents.trigger("aws/sync")).queued
        await until(lambda: seen.count("aws/sync") == 2)
        past = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (0, 3)]
        view = await app.agents.backfill("poll", *past)
        assert view.runs == 3
        await until(lambda: seen.count("poll") >= 4)
        await until(lambda: _without_backfill(app, "poll"))
        assert not await app.agents.stop_backfill("poll")
    with pytest.raises(NotFound, match="There is no agent 'nobody'"):
        await app.agents.get("nobody")
    await app.agents.remove("poll")
    assert [one.name for one in await asyncio.to_thread(app.sync.agents.list)] == ["aws/sync"]


async def _without_backfill(app, name):
    return (await app.agents.get(name)).backfill is None


async def test_pools_topics_workers_and_queues_are_managed(farm, app):
    await farm.worker("w1")
    assert [(one.name, one.state, one.slots) for one in await app.workers.list()] == [("w1", "up", 8)]
    assert (await app.topics.map("render.*", "local")).pools == ("local",)
    assert [one.topic for one in await app.topics.list()] == ["render.*"]
    await app.topics.unmap("render.*")
    assert (await app.pools.drain("local")).status == "draining"
    assert (await app.pools.activate("local")).status == "active"
    assert (await app.pools.change("local", provides=["cuda"])).provides == ("cuda",)
    await app.pools.create("spare")
    assert (await app.pools.rename("spare", "old")).name == (await app.pools.get("old")).name
    assert {one.name for one in await app.pools.list()} == {"local", "old"}
    assert await farm.ended(await farm.submit("noop")) == "SUCCEEDED"
    [queue] = await app.queues.list()
    assert (queue.show, queue.waiting) == ("film", 0)
    assert (await app.queues.pause(queue.queue), await app.queues.pause(queue.queue)) == (True, False)
    assert await app.queues.resume(queue.queue) is True


async def test_jobs_are_filtered_and_retried(farm, app):
    await farm.worker()
    good = [await farm.submit("noop", labels={"of": "day one"}) for _ in range(3)]
    bad = await farm.submit("fatal", topic="default", name="bad")
    for job in [*good, bad]:
        await farm.ended(job)
    assert {one.id for one in await app.jobs.list(label="of=day one")} == set(good)
    assert [one.name for one in await app.jobs.list(show="film", state="FAILED")] == ["bad"]
    assert len(await app.jobs.list(most=2)) == 2
    assert await app.jobs.list(show="film", topic="nowhere") == []
    again = await app.job(bad).retry()
    assert await farm.ended(again.id) == "FAILED"
    with pytest.raises(InvalidInput, match="no failed frame"):
        await app.job(bad).retry()


async def test_dead_letters_are_retried_or_purged(farm, app):
    lost = await farm.submit("noop", topic="nowhere", requires=("quantum",))
    await farm.ended(lost)
    [letter] = await app.dlq.list(job=lost)
    assert (letter.kind, letter.reason) == ("frame", "no_pool_mapping")
    retried = await app.dlq.retry([letter.id])
    assert (retried.gone, retried.jobs[0].old) == ([letter.id], lost)
    await farm.ended(retried.jobs[0].job)
    assert len((await app.dlq.purge(job=retried.jobs[0].job)).gone) == 1
    assert await app.dlq.list(kind="frame") == []


async def test_ledger_is_audited_and_keys_are_managed(farm, app):
    ledger = await app.ledger.audit("film")
    assert (ledger.ok, ledger.managed, {line.level for line in ledger.lines} >= {"subscription"}) == (True, True, True)
    assert (await app.ledger.repair("film")).ok
    made = await app.keys.create("ci", "viewer", shows=["film"], expires="1h")
    assert made.text not in repr(made)
    async with Rota(farm.replica.listen_url, key=made.text) as other:
        assert [one.name for one in await other.shows.list()] == ["film"]
        with pytest.raises(Forbidden, match="requires admin"):
            await other.shows.create("ads")
    assert (await app.keys.revoke(made.key.id)).state == "revoked"
    assert {one.name: one.state for one in await app.keys.list(revoked=True)}["ci"] == "revoked"


async def test_sync_facade_has_the_same_calls(farm, app):
    def work():
        sync = app.sync
        assert sync.shows.create("ads").name == "ads"
        assert sync.folders.create("ads", "spots", max_cores=2).max_cores == 2
        with pytest.raises(NotFound, match="did you mean ads"):
            sync.shows.get("adds")
        with pytest.raises(Refused):
            sync.pools.delete("local")
        with pytest.raises(InvalidInput, match="cannot be the name"):
            sync.shows.create("a/b c")
        sync.close()

    await asyncio.to_thread(work)
    assert {one.name for one in await app.shows.list()} == {"ads", "film"}
    assert app.shows.create.__doc__ == app.sync.shows.create.__doc__


async def test_inline_mode_refuses_administration(app):
    with inline(), pytest.raises(InvalidInput, match="supports only jobs and workflows"):
        await app.shows.list()
