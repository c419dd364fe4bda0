"""What the reconciler concludes from heartbeats that do not come, or do not list a frame."""

import asyncio

import msgspec
import pytest

from rota.engine.recovery import reconciler
from rota.model.protocol import LIVENESS_SUBJECT, Heartbeat, WorkerLiveness, decode
from rota.model.settings import Settings
from rota.placement.registry import HeartbeatOutcome
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

PROCS = sql("SELECT count(*) FROM rota.proc")
LOST = sql("SELECT count(*) FROM rota.worker WHERE state = 'lost'")
PROCS_OF_20_S = sql(
    """SELECT p.token, p.pk_host, p.pk_job, 20.0::float8 AS age_s, false AS ended, NULL::bytea AS work
       FROM rota.proc p WHERE p.token > $1::bigint ORDER BY p.token LIMIT $2::integer"""
)


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    """Its workers send one heartbeat, and no other before `heartbeat_interval`."""
    worker = msgspec.structs.replace(Settings().worker, heartbeat_interval=20.0)
    registry = msgspec.structs.replace(Settings().registry, snapshot_interval=0.05, worker_ttl=3600.0)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, worker=worker, registry=registry) as farm:
        await farm.show()
        yield farm


def heard(replica, seconds_ago, listening_s=100.0):
    """Pretend that the last heartbeat of every worker came so long ago."""
    engine = replica.engine
    now = engine.recovery._clock.monotonic()
    engine.members.hears_itself_since = engine.recovery._elected_at = now - listening_s
    for worker in engine.registry.workers.values():
        worker.last_heartbeat_at = now - seconds_ago


async def lost_after_silence(farm, seconds):
    heard(farm.replica, seconds)  # again each time: on a busy machine the server may have been cut off meanwhile
    return await farm.database.value(LOST)


async def running_frame(farm):
    await farm.worker()
    gate = hanging("x")
    job = await farm.submit("hang", "x")
    await farm.running("x", 1)
    return job, gate


async def test_server_restart_keeps_frames_of_workers_it_has_not_heard_yet(farm, monkeypatch):
    monkeypatch.setattr(reconciler, "DELIVERY_S", -100.0)
    job, gate = await running_frame(farm)
    [worker] = farm.replica.engine.registry.workers
    await until(lambda: _is_in_snapshot(farm, worker), what="a snapshot with the worker")
    restarted = await farm.server()
    assert not restarted.engine.registry.workers[worker].confirmed, "it is known from the snapshot alone"
    await restarted.engine.recovery.reconcile_allocations()
    assert await farm.database.value(PROCS) == 1
    gate.set()
    assert (await farm.ended(job), seen["began"]) == ("SUCCEEDED", ["x"])


async def test_server_restart_keeps_workers_that_are_still_connecting(farm):
    await running_frame(farm)
    recovery = farm.replica.engine.recovery
    heard(farm.replica, seconds_ago=60.0, listening_s=9.0)
    assert await recovery.expire_silent_workers(None) == []


async def test_silence_of_a_worker_is_no_evidence_before_it_was_asked_and_the_server_heard_itself(farm):
    await running_frame(farm)
    engine, silent_s = farm.replica.engine, 35.0
    [worker] = engine.registry.workers
    heard(farm.replica, silent_s + 0.1)
    name, now = engine.members.name, engine.recovery._clock.monotonic()
    engine.members._last_heartbeat[name] = now - 1.0
    assert not engine.recovery._is_silent(worker, 100.0, 20.0)
    engine.recovery._asked = {worker: now - 0.5}
    assert not engine.recovery._is_silent(worker, 100.0, 20.0)
    engine.members._last_heartbeat[name] = now - 0.2
    assert engine.recovery._is_silent(worker, 100.0, 20.0)
    heard(farm.replica, 0.0)


async def test_worker_whose_heartbeat_was_lost_sends_another_one_when_asked(farm):
    """Its own next heartbeat would come in 20 s."""
    job, gate = await running_frame(farm)
    [worker] = farm.replica.engine.registry.workers.values()
    await until(lambda: worker.confirmed, what="the first heartbeat")
    number = worker.number
    heard(farm.replica, 21.0)
    await until(lambda: worker.number > number, what="another heartbeat")
    assert await farm.database.value(LOST) == 0
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_workers_are_read_at_every_tick_only_while_one_is_overdue_or_unknown(farm):
    await running_frame(farm)
    recovery, registry = farm.replica.engine.recovery, farm.replica.engine.registry
    [worker] = registry.workers.values()
    await until(lambda: worker.confirmed, what="the first heartbeat")
    heard(farm.replica, 1.0)
    await recovery.expire_silent_workers(None)
    assert recovery._all_heard()
    heard(farm.replica, 20.6)
    assert not recovery._all_heard(), "its heartbeat is overdue"
    heard(farm.replica, 1.0)
    worker.confirmed = False
    assert not recovery._all_heard(), "it was not heard yet"
    worker.confirmed = True
    del recovery._heartbeats_s[worker.id]
    assert not recovery._all_heard(), "it is new"
    await recovery.expire_silent_workers(None)
    recovery._workers_read_at -= reconciler.WORKERS_READ_INTERVAL_S
    assert not recovery._all_heard(), "another one may be new"


async def test_worker_that_was_asked_and_heard_is_asked_again_in_its_next_silence(farm):
    """Or its silence would never count: it is evidence only if it was asked after its last heartbeat."""
    await running_frame(farm)
    recovery = farm.replica.engine.recovery
    [worker] = farm.replica.engine.registry.workers.values()
    await until(lambda: worker.confirmed, what="the first heartbeat")
    await recovery.expire_silent_workers(None)
    recovery._asked = {worker.id: recovery._clock.monotonic()}
    heard(farm.replica, 0.0)
    await recovery._expire_if_overdue(None)
    assert not recovery._asked


@pytest.mark.parametrize("seconds_ago", [4.0, 34.0])
async def test_heartbeat_interval_of_20_s_allows_a_silence_of_35_s(farm, seconds_ago):
    await running_frame(farm)
    heard(farm.replica, seconds_ago)
    assert await farm.replica.engine.recovery.expire_silent_workers(None) == []


async def test_heartbeat_interval_lowered_by_a_restart_does_not_apply_to_earlier_sessions(farm):
    """The worker registered with 20 s; its server comes back with 2 s and knows it from the snapshot."""
    await running_frame(farm)
    [worker] = farm.replica.engine.registry.workers

    await until(lambda: _is_in_snapshot(farm, worker), what="a snapshot with the worker")
    farm.settings = msgspec.structs.replace(farm.settings, worker=Settings().worker, registry=Settings().registry)
    restarted = await farm.server()
    await until(lambda: restarted.engine.members.hears_itself_since, what="a server that may judge silence")
    restarted.engine.registry.workers[worker].confirmed = True
    heard(restarted, seconds_ago=34.0)
    assert await restarted.engine.recovery.expire_silent_workers(None) == []
    assert restarted.engine.registry.sweep() == 0, "it gets frames for as long as it may be silent"


async def test_worker_silent_for_longer_than_its_heartbeat_interval_allows_is_lost(farm):
    await running_frame(farm)
    await until(lambda: lost_after_silence(farm, 36.0), what="the reconciler to declare it lost")


@pytest.mark.parametrize(("seconds_ago", "procs"), [(19.0, 1), (1.0, 0)])
async def test_heartbeat_interval_of_20_s_does_not_lose_frames_booked_after_the_last_heartbeat(
    farm, monkeypatch, seconds_ago, procs
):
    """A heartbeat before the delivery of a frame says nothing about it; one after it does."""
    await running_frame(farm)
    monkeypatch.setattr(reconciler, "ALL_PROCS", PROCS_OF_20_S)
    [worker] = farm.replica.engine.registry.workers.values()
    heard(farm.replica, seconds_ago)
    worker.held = []
    await farm.replica.engine.recovery.reconcile_allocations()
    assert await farm.database.value(PROCS) == procs


async def test_running_timeout_ends_the_frames_and_counts_the_jobs(farm, monkeypatch):
    """Two frames of one job and one of another, on as many pages: two jobs are overdue."""
    monkeypatch.setattr(reconciler, "PAGE_SIZE", 1)
    monkeypatch.setattr(reconciler, "GRACE_S", -3600.0)
    await farm.worker()
    gate = hanging("x")
    jobs = [await farm.submit("hang", "x", frames=2), await farm.submit("hang", "x")]
    await farm.running("x", 3)
    [worker] = farm.replica.engine.registry.workers.values()
    heard(farm.replica, seconds_ago=1.0)
    worker.held = [(0, 2**40)]
    recovery = farm.replica.engine.recovery
    monkeypatch.setattr(recovery, "_limits", msgspec.structs.replace(recovery._limits, running_timeout=60.0))
    await recovery.reconcile_allocations()
    assert reconciler.STALE_JOBS.labels("RUNNING")._value.get() == 2
    for job in jobs:
        assert await farm.ended(job) == "TIMEOUT"
    gate.set()


async def test_new_leader_tells_a_worker_that_another_leader_declared_lost(farm):
    """The leader that declared it lost has died since; the worker was disconnected and comes back."""
    await running_frame(farm)
    [worker] = farm.replica.engine.registry.workers
    await until(lambda: lost_after_silence(farm, 36.0), what="the reconciler to declare it lost")
    await until(lambda: "x" in seen.get("stopped", []), what="the frame to stop, because its worker was told")
    recovery = farm.replica.engine.recovery
    recovery._lost.clear()
    beat = Heartbeat(worker=worker, name="w", pool="local", slots=8, cores=800, number=99)
    async with farm.replica.bus.subscribe_core(LIVENESS_SUBJECT) as messages, asyncio.timeout(10):
        assert farm.replica.engine.registry.record_heartbeat(beat) is HeartbeatOutcome.LOST
        await recovery._broadcast_liveness()
        while worker not in decode(WorkerLiveness, (await messages.get()).data).lost:
            pass


async def _is_in_snapshot(farm, worker):
    return str(worker).encode() in (await farm.replica.redis.get("sys:workers:snapshot") or b"")
