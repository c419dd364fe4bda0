"""Pools and topics in PostgreSQL: changed by command or from a file, audited, and followed by every replica."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from rota.accounting.admin import QuotaAdmin
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, Refused
from rota.placement import PoolStatus, WorkerRegistry, requirements_of
from rota.placement.pools_file import parse_pools_file, read_pools_file
from rota.placement.pools_watch import FILE_REFUSED, PoolsFileWatcher
from rota.placement.route_store import RouteStore, RoutesWatcher
from tests.contract.ledger_suite import sql
from tests.support.placement import ManualClock
from tests.support.waiting import until

AUDITED = sql("SELECT action, target, detail FROM rota.audit WHERE actor = $1 ORDER BY seq")
LAST = sql("SELECT coalesce(max(seq), 0) FROM rota.audit")


@pytest.fixture
async def routing(database):
    for name in ("farm", "cloud", "gpu"):
        await QuotaAdmin(database).create_pool(name, actor="setup")
    return RouteStore(database, ManualClock())


@asynccontextmanager
async def following_registry(routing, every_s=30.0):
    """A registry that follows the stored routes."""
    registry = WorkerRegistry()
    draining, ready = asyncio.Event(), asyncio.Event()
    watch = RoutesWatcher(routing, registry, every_s)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch.run(Lifecycle(draining, ready.set)))
        await ready.wait()
        yield registry
        draining.set()


async def test_topics_map_to_pools_in_order_with_their_ids(routing):
    assert await routing.set_topic("render.*", ["farm", "cloud"], actor="ann")
    routes = await routing.read()
    ids = {item.name: item.id for item in await QuotaAdmin(routing.database).pools()}
    assert [(pool.name, pool.id) for pool in routes.pools_for("render.a")] == [
        ("farm", ids["farm"]),
        ("cloud", ids["cloud"]),
    ]
    assert await routing.set_topic("render.*", ["cloud"], actor="ann")
    assert [pool.name for pool in (await routing.read()).pools_for("render.a")] == ["cloud"]
    assert await routing.remove_topic("render.*", actor="ann")
    assert not (await routing.read()).topics


async def test_unknown_pool_is_refused_with_a_suggestion(routing):
    with pytest.raises(InvalidInput) as refused:
        await routing.set_topic("a", ["frm"], actor="ann")
    assert refused.value.sentence == (
        "The pool 'frm' that the topic a is mapped to does not exist: did you mean farm? "
        "Otherwise create it with `rota pool create frm` first."
    )
    with pytest.raises(InvalidInput, match="The pool 'zzz' does not exist: create it with"):
        await routing.set_pool("zzz", provides=["x"], actor="ann")
    with pytest.raises(InvalidInput, match="The pool 'nowhere' that the topic a is mapped to"):
        await routing.load(parse_pools_file("topics: {b: farm, a: [farm, nowhere]}"), actor="file")
    assert not (await routing.read()).topics


async def test_every_change_is_audited_once_and_a_no_op_is_not(routing):
    actor = "auditee"
    assert await routing.set_topic("a", ["farm"], actor=actor)
    assert not await routing.set_topic("a", ["farm"], actor=actor)
    assert await routing.set_pool("gpu", provides=[" GPU", "docker"], description="big", actor=actor)
    assert not await routing.set_pool("gpu", provides=["docker", "gpu"], actor=actor)
    assert not await routing.remove_topic("b", actor=actor)
    rows = await routing.database.rows(AUDITED, actor)
    assert [(row["action"], row["target"]) for row in rows] == [
        ("topic.map", "topic:a"),
        ("pool.configure", "pool:gpu"),
    ]
    assert (await routing.read()).pools["gpu"].spec.provides == ("docker", "gpu")
    assert (await routing.read()).pools["gpu"].spec.description == "big"


async def test_pool_can_be_drained_and_activated(routing):
    await routing.drain("farm", timeout_s=60, actor="ann")
    spec = (await routing.read()).pools["farm"].spec
    assert (spec.status, spec.drain_started_ms, spec.drain_timeout_s) == (PoolStatus.DRAINING, 1_000_000, 60)
    routing.clock.now_s += 5
    assert not await routing.drain("farm", timeout_s=60, actor="ann"), "the drain keeps its start time"
    await routing.activate("farm", actor="ann")
    spec = (await routing.read()).pools["farm"].spec
    assert (spec.status, spec.drain_started_ms) == (PoolStatus.ACTIVE, None)
    with pytest.raises(InvalidInput, match="from 1 to 3600"):
        await routing.drain("farm", timeout_s=9999, actor="ann")


async def test_file_is_loaded_once_and_later_manual_changes_stay(routing, tmp_path):
    path = tmp_path / "pools.yaml"
    path.write_text("topics: {a: farm, b: [gpu, cloud]}\npools: {gpu: {requires: [gpu]}, cloud: {status: draining}}")
    assert await routing.load(read_pools_file(path), actor="file")
    routes = await routing.read()
    assert routes.topics == {"a": ("farm",), "b": ("gpu", "cloud")}
    assert routes.pools["gpu"].spec.provides == ("gpu",)
    assert routes.pools["cloud"].spec.drain_started_ms == 1_000_000
    await routing.set_topic("a", ["cloud"], actor="ann")
    before = await routing.database.value(LAST)
    assert not await routing.load(read_pools_file(path), actor="file")
    assert await routing.database.value(LAST) == before
    assert (await routing.read()).topics["a"] == ("cloud",)
    path.write_text("topics: {b: gpu}")
    assert await routing.load(read_pools_file(path), actor="file")
    assert (await routing.read()).topics == {"b": ("gpu",)}


async def test_unreadable_file_is_refused_with_a_message(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read as text"):
        read_pools_file(tmp_path / "missing.yaml")
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="cannot be read as text"):
        read_pools_file(tmp_path / "odd.yaml")


async def test_replicas_loading_the_same_file_concurrently_load_it_once(routing):
    file = parse_pools_file("topics: {a: farm}")
    loaded = await asyncio.gather(*(routing.load(file, actor="many") for _ in range(4)))
    assert sorted(loaded) == [False, False, False, True]
    assert len(await routing.database.rows(AUDITED, "many")) == 1


async def test_pool_with_a_mapped_topic_cannot_be_deleted(routing):
    await routing.set_topic("a", ["farm"], actor="ann")
    with pytest.raises(Refused):
        await QuotaAdmin(routing.database).delete_pool("farm", actor="ann")
    await routing.set_pool("cloud", provides=["x"], actor="ann")
    await QuotaAdmin(routing.database).delete_pool("cloud", actor="ann")
    assert "cloud" not in (await routing.read()).pools


async def test_every_replica_follows_a_change_by_notification(routing):
    async with following_registry(routing) as one, following_registry(routing) as other:
        assert not one.routes.topics
        await routing.set_topic("a", ["farm"], actor="ann")
        await until(lambda: all(each.routes.pools_for("a") for each in (one, other)), what="both registries to follow")
        await routing.drain("farm", actor="ann")
        await until(lambda: one.routes.pools["farm"].spec.status is PoolStatus.DRAINING, what="the drain to arrive")
        assert one.plan(requirements_of("a"), 1).explain().sentence == "No pool accepts new frames: farm is draining."


async def test_pool_local_becomes_the_default_when_created(routing):
    async with following_registry(routing) as registry:
        assert not registry.routes.pools_for("anything")
        await QuotaAdmin(routing.database).create_pool("local", actor="up")
        await until(lambda: registry.routes.pools_for("anything"), what="the default pool")
        assert registry.routes.uses_default_pool


async def test_missed_notification_is_found_by_polling(routing):
    async with following_registry(routing, every_s=0.05) as registry:
        async with routing.database.transaction() as tx:
            await tx.run(sql("ALTER TABLE rota.topic_pool DISABLE TRIGGER told"))
        await routing.set_topic("a", ["farm"], actor="ann")
        await until(lambda: registry.routes.pools_for("a"), what="the poll")
    async with routing.database.transaction() as tx:
        await tx.run(sql("ALTER TABLE rota.topic_pool ENABLE TRIGGER told"))


def reasons_of(logged, event):
    return [line.get("reason") for line in logged if line["event"] == event]


async def test_invalid_file_is_logged_once_and_changes_nothing_until_fixed(routing, tmp_path):
    path = tmp_path / "pools.yaml"
    watch = PoolsFileWatcher(routing, path)
    with capture_logs() as logged:
        assert not await watch.reload(), "the file is missing"
        path.write_text("topics: {a: farm}")
        assert await watch.reload()
        for _ in range(2):
            path.write_text("topics: {a: [farm, farm]}")
            assert not await watch.reload()
        assert FILE_REFUSED._value.get() == 1
        path.write_text("topics: {a: attic}")
        assert not await watch.reload()
        assert (await routing.read()).topics == {"a": ("farm",)}
        await QuotaAdmin(routing.database).create_pool("attic", actor="setup")
        assert await watch.reload(), "the same file, but the pool exists now"
    assert (await routing.read()).topics == {"a": ("attic",)}
    assert FILE_REFUSED._value.get() == 0
    wrong = reasons_of(logged, "pools_file_refused")
    assert [sentence.partition(": ")[2] for sentence in wrong[1:]] == [
        "The topic a needs a list of distinct pools: give 1 to 100.",
        "create it with `rota pool create attic` first.",
    ]
    assert "cannot be read" in wrong[0]


async def test_replica_with_an_older_file_does_not_undo_a_newer_one(routing, tmp_path):
    older, newer = tmp_path / "older.yaml", tmp_path / "newer.yaml"
    older.write_text("topics: {a: farm}")
    newer.write_text("topics: {a: cloud}")
    one, other = PoolsFileWatcher(routing, older), PoolsFileWatcher(routing, newer)
    assert await one.reload()
    assert await other.reload()
    assert [await one.reload(), await other.reload()] == [False, False]
    assert (await routing.read()).topics == {"a": ("cloud",)}
    older.write_text(newer.read_text())
    assert not await one.reload(), "the other replica has loaded this content"


async def test_service_loads_later_changes_of_the_file(routing, tmp_path):
    path = tmp_path / "pools.yaml"
    path.write_text("topics: {a: farm}")
    draining, ready = asyncio.Event(), asyncio.Event()
    async with following_registry(routing) as registry, asyncio.TaskGroup() as tasks:
        tasks.create_task(PoolsFileWatcher(routing, path, every_s=0.02).run(Lifecycle(draining, ready.set)))
        await ready.wait()
        path.write_text("topics: {a: [cloud, farm]}")
        await until(lambda: len(registry.routes.pools_for("a")) == 2, what="the new file to be followed")
        draining.set()
