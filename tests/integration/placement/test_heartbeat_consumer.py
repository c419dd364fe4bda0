"""Heartbeats on a real NATS reach the registry; unknown frames they list are looked up in a real PostgreSQL."""

import asyncio
from contextlib import asynccontextmanager
from itertools import count

import pytest

from rota.accounting.service import AccountingService
from rota.infra.service import Lifecycle
from rota.model.protocol import HEARTBEAT_SUBJECT, LIVENESS_SUBJECT, Heartbeat, WorkerLiveness, encode
from rota.placement import Resources, metrics, requirements_of
from rota.placement.heartbeat_consumer import HeartbeatConsumer
from rota.worker.heartbeat import HeartbeatThread
from tests.contract.ledger_suite import sql
from tests.integration.accounting.accounting_support import ShowQuota
from tests.integration.infra.nats_support import buses
from tests.support.placement import Fleet, id_of
from tests.support.waiting import until

FRAME = requirements_of("a", cores=100)
LAYER = sql("""
    WITH c AS (INSERT INTO rota.placement_class (digest, topic, cores, gpus, memory_mb)
               VALUES ('x', 'a', 200, 0, 300) RETURNING class_id),
         q AS (INSERT INTO rota.queue_class SELECT 'q', $1::uuid, $1::uuid, $1::uuid, class_id FROM c RETURNING queue)
    INSERT INTO rota.layer (pk_layer, pk_job, number, str_name, queue, work, frames)
    SELECT $2::uuid, $2::uuid, 0, 'frames', queue, '', 4 FROM q
""")


@pytest.fixture
async def bus(nats_url, bus_prefix):
    async with buses(nats_url, bus_prefix) as start:
        yield await start()


@asynccontextmanager
async def consuming(bus, database=None):
    fleet = Fleet()
    draining, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(HeartbeatConsumer(bus, fleet.registry, database).run(Lifecycle(draining, ready.set)))
        await ready.wait()
        yield fleet
        draining.set()


def beat(number=1, **fields):
    values = {"name": "w", "pool": "farm", "slots": 10, "cores": 1000, "number": number, **fields}
    return encode(Heartbeat(worker=id_of("w"), **values))


def heartbeats(outcome):
    return metrics.HEARTBEATS.labels(outcome)._value.get()


async def test_heartbeat_registers_a_worker(bus):
    async with consuming(bus) as fleet:
        await bus.publish_core(HEARTBEAT_SUBJECT, beat())
        await until(lambda: fleet.registry.fitting_frames(FRAME) == 10, what="the worker")


async def test_unchanged_heartbeats_change_no_ranking(bus):
    async with consuming(bus) as fleet:
        registry = fleet.registry
        await bus.publish_core(HEARTBEAT_SUBJECT, beat())
        await until(lambda: registry.fitting_frames(FRAME) == 10, what="the worker")
        before = registry._change
        for number in range(2, 6):
            await bus.publish_core(HEARTBEAT_SUBJECT, beat(number))
        await until(lambda: fleet.worker().number == 5, what="the last heartbeat")
        assert registry._change == before
        assert not registry.explain(FRAME).passed
        await bus.publish_core(HEARTBEAT_SUBJECT, beat(6, slots=4))
        await until(lambda: registry.fitting_frames(FRAME) == 4, what="fewer slots")
        assert registry._change > before


async def test_lost_worker_is_removed_and_its_later_heartbeats_are_ignored(bus):
    async with consuming(bus) as fleet:
        await bus.publish_core(HEARTBEAT_SUBJECT, beat())
        await until(lambda: fleet.registry.workers, what="the worker")
        await bus.publish_core(LIVENESS_SUBJECT, encode(WorkerLiveness(lost=[id_of("w")])))
        await until(lambda: not fleet.registry.workers, what="its removal")
        lost = heartbeats("lost")
        await bus.publish_core(HEARTBEAT_SUBJECT, beat(2))
        await until(lambda: heartbeats("lost") == lost + 1, what="the heartbeat of the lost worker")
        assert not fleet.registry.workers


async def test_undecodable_heartbeats_are_counted_and_ignored(bus):
    unreadable = heartbeats("unreadable")
    late = heartbeats("late")
    async with consuming(bus) as fleet:
        for data in (b"", b"\xc1", b"{}", beat(slots=-1), beat(held=[(0, 2**52)])):
            await bus.publish_core(HEARTBEAT_SUBJECT, data)
        await bus.publish_core(LIVENESS_SUBJECT, b"nonsense")
        await bus.publish_core(HEARTBEAT_SUBJECT, beat(5))
        await bus.publish_core(HEARTBEAT_SUBJECT, beat(4))
        await until(lambda: heartbeats("late") == late + 1, what="the late heartbeat")
        await until(lambda: heartbeats("unreadable") == unreadable + 6, what="all undecodable messages")
        assert fleet.registry.fitting_frames(FRAME) == 10


async def test_frames_booked_by_another_replica_are_looked_up_in_postgres(bus, database):
    ledger = ShowQuota(AccountingService(database, None))
    await ledger.make(managed=False)
    ledger.host = id_of("w")
    await database.run(LAYER, ledger.show, ledger.layer)
    assert (await ledger.book(range(100, 104), cores=200)).booked
    ledger.host = id_of("another")
    assert (await ledger.book([900], cores=200)).booked
    async with consuming(bus, database) as fleet:
        await bus.publish_core(HEARTBEAT_SUBJECT, beat(held=[(100, 2), (900, 1)]))
        await until(lambda: fleet.registry.fitting_frames(FRAME), what="the lookup in PostgreSQL")
        assert (fleet.worker().booked.cores, fleet.worker().booked.memory_mb) == (400, 600)
        assert fleet.worker().unbooked == [(900, 1)]
        assert fleet.registry.fitting_frames(requirements_of("a", cores=0)) == 7


async def test_worker_with_more_frames_than_fit_into_one_message_is_heard_with_all_of_them(bus):
    held = [(10**12 + 2 * n, 1) for n in range(120_000)]
    values = {"name": "w", "pool": "farm", "slots": 200_000, "cores": 1000, "held": held}
    assert len(encode(Heartbeat(worker=id_of("w"), number=1, **values))) > bus.max_payload
    numbers = count(1)
    thread = HeartbeatThread(
        bus.target,
        id_of("w"),
        0.2,
        lambda: Heartbeat(worker=id_of("w"), number=next(numbers), **values),
        lambda: None,
    )
    async with consuming(bus) as fleet:
        thread.start()
        try:
            await until(lambda: fleet.registry.workers, what="the worker")
            assert fleet.worker().held == held
        finally:
            await thread.stop()


async def test_without_a_database_each_unknown_frame_takes_one_slot(bus):
    async with consuming(bus) as fleet:
        await bus.publish_core(HEARTBEAT_SUBJECT, beat(held=[(100, 2)]))
        await until(lambda: fleet.registry.fitting_frames(FRAME) == 8, what="the unknown frames")


def test_workers_are_counted_by_pool_and_state():
    fleet = Fleet()
    fleet.beat("idle")
    fleet.beat("busy")
    fleet.registry.record_allocations(id_of("busy"), [(1, 1)], Resources())
    fleet.beat("loaded", cpu_load=99)
    fleet.beat("ending", draining=True)
    fleet.beat("stray", pool="made up")
    metrics.count_workers(fleet.registry.workers.values(), fleet.registry.routes)
    counts = {tuple(s.labels.values()): s.value for m in metrics.WORKERS.collect() for s in m.samples}
    assert counts == {
        ("farm", "idle"): 1,
        ("farm", "busy"): 1,
        ("farm", "overloaded"): 1,
        ("farm", "draining"): 1,
        ("(unknown)", "idle"): 1,
    }
