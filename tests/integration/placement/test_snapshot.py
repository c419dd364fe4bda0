"""The worker snapshot in Redis: one writer at a time, read at startup with its age, never blocks a start."""

import asyncio
import time

import msgspec
import pytest
import structlog

from rota.infra.redis import RedisTarget, connect
from rota.infra.service import Lifecycle
from rota.model.settings.lifecycle import RegistrySettings
from rota.placement import requirements_of
from rota.placement.snapshot import SnapshotWriter, warm_start
from tests.support.placement import Fleet, id_of, pool, routes
from tests.support.waiting import until

FRAME = requirements_of("a", cores=100)


def writer(fleet, redis, **settings):
    return SnapshotWriter(fleet.registry, redis, "replica-1", RegistrySettings(**settings))


async def written(redis):
    return msgspec.json.decode(await redis.get("sys:workers:snapshot"))


async def set_age(redis, seconds):
    """Rewrite the snapshot as if it was captured `seconds` ago."""
    doc = await written(redis)
    moment = (await redis.time())[0] - seconds
    doc["captured_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
    await redis.set("sys:workers:snapshot", msgspec.json.encode(doc))


async def test_starting_replica_uses_snapshot_workers_as_a_last_resort(redis):
    first = Fleet(routes({"a": ("farm",)}, pool("farm", provides=("gpu",)), pool("cloud")))
    first.beat("w", labels={"region": "eu", "node.disk": "ssd"}, capabilities=("docker",), cpu_load=40, gpus=1)
    first.place(FRAME, 4)
    assert await writer(first, redis).write()
    second = Fleet()
    assert await warm_start(second.registry, redis) == 1
    assert second.place(FRAME, 20) == {"w": 6}


async def test_snapshot_workers_rank_behind_every_pool_with_live_heartbeats(redis):
    first = Fleet()
    first.beat("read")
    await writer(first, redis).write()
    second = Fleet(routes({"a": ("farm", "cloud")}, pool("farm"), pool("cloud")))
    await warm_start(second.registry, redis)
    second.beat("heard", pool="cloud", cpu_load=80)
    assert second.place(FRAME, 10) == {"heard": 10}
    assert second.place(FRAME, 10) == {"read": 10}


async def test_snapshot_document_has_the_documented_fields(redis):
    fleet = Fleet(routes({"a": ("farm",)}, pool("farm", provides=("gpu",)), pool("cloud")))
    fleet.beat("w", labels={"region": "eu", "type": "blade"}, cpu_load=40, memory_load=7)
    fleet.clock.now_s += 3
    await writer(fleet, redis).write()
    doc = await written(redis)
    assert doc["writer_id"] == "replica-1"
    assert doc["topics"] == {"a": ["farm"]}
    assert doc["pools"]["farm"] == {"status": "active", "requires": ["gpu"], "workers": 1}
    (worker,) = doc["workers"]
    assert worker["worker_id"] == str(id_of("w"))
    assert (worker["region"], worker["type"], worker["cpu_load"], worker["memory_load"]) == ("eu", "blade", 40, 7)
    assert (worker["active_jobs"], worker["max_parallel_jobs"], worker["age_ms"]) == (0, 10, 3000)
    assert doc["captured_at"].startswith(time.strftime("%Y-", time.gmtime()))


async def test_snapshot_age_counts_towards_worker_expiry(redis):
    fleet = Fleet()
    fleet.beat("fresh")
    fleet.clock.now_s -= 15
    fleet.beat("stale")
    fleet.clock.now_s += 15
    await writer(fleet, redis).write()
    await set_age(redis, 20)
    late = Fleet()
    assert await warm_start(late.registry, redis) == 1
    assert late.worker("fresh")
    late.clock.now_s += 12
    assert late.registry.plan(FRAME, 1).portions == [], "20 s in the snapshot and 12 s here are more than 30 s"
    await set_age(redis, 86400)
    assert await warm_start(Fleet().registry, redis) == 0


async def test_live_heartbeat_overrides_the_snapshot_in_either_order(redis):
    fleet = Fleet()
    fleet.beat("w", slots=3, number=900)
    fleet.place(FRAME, 2)
    await writer(fleet, redis).write()
    heard_first = Fleet()
    heard_first.beat("w", slots=7, number=1)
    assert await warm_start(heard_first.registry, redis) == 0
    heard_later = Fleet()
    assert await warm_start(heard_later.registry, redis) == 1
    assert heard_later.registry.fitting_frames(FRAME) == 1
    heard_later.beat("w", slots=7, number=1)
    for each in (heard_first, heard_later):
        assert each.worker().confirmed
        assert each.registry.fitting_frames(FRAME) == 7


async def test_silent_snapshot_workers_expire(redis):
    fleet = Fleet()
    fleet.beat()
    await writer(fleet, redis).write()
    late = Fleet()
    await warm_start(late.registry, redis)
    late.clock.now_s += 31
    assert late.registry.sweep() == 1


@pytest.mark.parametrize(
    "document",
    [
        None,
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"writer_id": "x"}',
        b'{"captured_at": "yesterday", "writer_id": "x"}',
        b'{"captured_at": "2030-01-01T00:00:00Z", "writer_id": "x", "workers": [{"active_jobs": "many"}]}',
    ],
)
async def test_broken_or_missing_snapshot_is_a_cold_start_and_only_a_broken_one_warns(redis, document):
    if document is not None:
        await redis.set("sys:workers:snapshot", document)
    fleet = Fleet()
    with structlog.testing.capture_logs() as logs:
        assert await warm_start(fleet.registry, redis) == 0
    levels = [each["log_level"] for each in logs if each["log_level"] != "info"]
    assert levels == ([] if document is None else ["warning"])
    assert not fleet.registry.workers


async def test_snapshot_without_workers_or_with_invalid_ids_is_accepted(redis):
    doc = {"captured_at": "2000-01-01T00:00:00Z", "writer_id": "x", "workers": []}
    await redis.set("sys:workers:snapshot", msgspec.json.encode(doc))
    assert await warm_start(Fleet().registry, redis) == 0
    fleet = Fleet()
    fleet.beat()
    await writer(fleet, redis).write()
    doc = await written(redis)
    doc["workers"] = [{"worker_id": ""}, {"worker_id": "w1"}, *doc["workers"], {}]
    await redis.set("sys:workers:snapshot", msgspec.json.encode(doc))
    assert await warm_start(Fleet().registry, redis) == 1


async def test_unavailable_redis_is_a_cold_start():
    async with connect(RedisTarget(url="redis://127.0.0.1:1/0", connect_timeout_s=0.2)) as away:
        assert await warm_start(Fleet().registry, away) == 0


async def test_unresponsive_redis_delays_startup_no_longer_than_the_timeout(redis, proxy, redis_url):
    port = redis.connection_pool.connection_kwargs["port"]
    network = await proxy("127.0.0.1", port)
    async with connect(RedisTarget(url=network.url(redis_url), op_timeout_s=30)) as far:
        await far.ping()
        network.drop_replies()
        began = time.monotonic()
        assert await warm_start(Fleet().registry, far, timeout_s=0.2) == 0
        assert time.monotonic() - began < 2


async def test_one_replica_writes_at_a_time_and_others_skip_silently(redis):
    fleet = Fleet()
    fleet.beat()
    await redis.set("rota:scheduler:snapshot:writer", "somebody", px=60_000)
    with structlog.testing.capture_logs() as logs:
        assert not await writer(fleet, redis).write()
    assert not [each for each in logs if each["log_level"] != "debug"]
    assert await redis.get("sys:workers:snapshot") is None
    assert await redis.get("rota:scheduler:snapshot:writer") == b"somebody"


async def test_expired_lock_of_a_dead_writer_is_taken_over(redis):
    fleet = Fleet()
    fleet.beat()
    await redis.set("rota:scheduler:snapshot:writer", "dead", px=50)
    await until(lambda: writer(fleet, redis).write(), what="the takeover")
    assert await redis.get("rota:scheduler:snapshot:writer") is None
    assert (await written(redis))["workers"]


async def test_writer_paused_past_its_lock_neither_writes_nor_unlocks(redis):
    fleet = Fleet()
    fleet.beat()

    class Paused:
        """Returns from `time` after another writer has taken the lock."""

        def __getattr__(self, name):
            return getattr(redis, name)

        async def time(self):
            await redis.set("rota:scheduler:snapshot:writer", "the next one", px=60_000)
            return await redis.time()

    assert not await writer(fleet, Paused()).write()
    assert await redis.get("sys:workers:snapshot") is None
    assert await redis.get("rota:scheduler:snapshot:writer") == b"the next one"


async def test_snapshot_service_writes_until_drained_and_survives_a_redis_outage(redis):
    fleet = Fleet()
    fleet.beat()
    draining, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer(fleet, redis, snapshot_interval=0.01).run(Lifecycle(draining, ready.set)))
        await until(lambda: redis.get("sys:workers:snapshot"), what="the first snapshot")
        await redis.delete("sys:workers:snapshot")
        await until(lambda: redis.get("sys:workers:snapshot"), what="the next snapshot")
        draining.set()
    async with connect(RedisTarget(url="redis://127.0.0.1:1/0", connect_timeout_s=0.2)) as away:
        with structlog.testing.capture_logs() as logs:
            snapshot_writer = writer(fleet, away)
            await snapshot_writer._write_or_warn()
            await snapshot_writer._write_or_warn()
        assert [each["event"] for each in logs] == ["snapshot_write_failed"]
