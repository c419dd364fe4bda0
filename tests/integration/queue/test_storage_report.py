"""Metrics and reports of the queue, restarts of failed maintenance, and tokens that a dead dispatcher may not book."""

import asyncio
import math
from uuid import uuid4

import asyncpg
import pytest

from rota.accounting import allocations
from rota.accounting.admin import QuotaAdmin
from rota.accounting.ledger import BookingGroup, Charge, DeclineReason
from rota.accounting.service import AccountingService
from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.infra.service.lifecycle import ServiceState
from rota.infra.telemetry import metrics
from rota.queue import Queue, QueueMaintenance, storage_report
from rota.queue import metrics as queue_metrics
from rota.queue.storage_report import LongTransaction
from tests.support.queue import Dispatcher, entry, sql
from tests.support.waiting import until

OLDER = sql("UPDATE rota.ready_entries SET enqueued_at = clock_timestamp() - interval '1 minute' WHERE lane_id = $1")


@pytest.fixture
def queue(database):
    return Queue(database)


class StoppedClock:
    now_s = 1000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock():
    return StoppedClock()


@pytest.fixture
def collector(queue, clock):
    return queue_metrics.MetricsCollector(queue, clock)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture(autouse=True)
def _clear_metrics():
    queue_metrics.clear_metrics()
    yield
    queue_metrics.clear_metrics()


def samples(name):
    """Samples of a metric by label, as Prometheus reads them."""
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {line.removeprefix(name).rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_depth_age_and_trust_are_measured(queue, dispatcher, database, collector):
    old, young = await queue.enqueue([entry("film", frames=6), entry("short", frames=2)])
    await dispatcher.claim(4, [old.lane])
    await database.run(OLDER, old.lane)
    await collector.collect()
    assert samples("rota_queue_frames")['{state="waiting"}'] == 4
    assert samples("rota_queue_frames")['{state="running"}'] == 4
    assert samples("rota_queue_depth") == {'{queue="film"}': 2, '{queue="short"}': 2}
    ages = samples("rota_queue_oldest_age_seconds")
    assert 60 <= ages['{queue="film"}'] < 120
    assert ages['{queue="short"}'] < 30
    assert samples("rota_queue_counters_trusted") == {"": 1}
    assert samples("rota_queue_pending_deltas") == {"": 3}
    await dispatcher.claim(10, [old.lane, young.lane])
    await database.run(sql("UPDATE rota.queue_storage SET counters_trusted = false"))
    await collector.collect()
    assert samples("rota_queue_depth") == {}, "a queue without waiting frames has no series"
    assert samples("rota_queue_counters_trusted") == {"": 0}


async def test_counts_that_have_not_changed_are_not_read_again_and_ages_grow(queue, collector, clock, monkeypatch):
    reads = []

    async def counts_exact(real=queue.counts_exact):
        reads.append(None)
        return await real()

    monkeypatch.setattr(queue, "counts_exact", counts_exact)
    await queue.enqueue([entry("film", frames=6)])
    await collector.collect()
    [young] = samples("rota_queue_oldest_age_seconds").values()
    clock.now_s += 100.0
    await collector.collect()
    assert (len(reads), samples("rota_queue_depth")) == (1, {'{queue="film"}': 6})
    assert samples("rota_queue_oldest_age_seconds")['{queue="film"}'] == pytest.approx(young + 100.0)
    await queue.enqueue([entry("film", frames=1)])
    await collector.collect()
    assert (len(reads), samples("rota_queue_depth")) == (2, {'{queue="film"}': 7})


async def test_sessions_blocking_a_slot_or_pinning_rows_are_reported_by_application(
    queue, collector, database_url, monkeypatch
):
    monkeypatch.setattr(storage_report.long_transactions, "__defaults__", (0.0,))
    sealed = await asyncpg.connect(database_url, server_settings={"application_name": "report"})
    await sealed.execute("BEGIN; SELECT count(*) FROM rota.queue_claims_3")
    opened = await asyncpg.connect(database_url, server_settings={"application_name": "producer"})
    await opened.execute("BEGIN; SELECT count(*) FROM rota.ready_entries_0; SELECT txid_current()")
    await collector.collect()
    assert list(samples("rota_queue_prune_blocked_seconds")) == ['{application="report"}'], (
        "a session in the open slot is not reported"
    )
    assert samples("rota_queue_pinned_seconds")[""] > 0
    await sealed.close()
    await opened.close()
    await until(lambda: _no_long_transactions(queue), what="the sessions to end")
    await collector.collect()
    assert (samples("rota_queue_prune_blocked_seconds"), samples("rota_queue_pinned_seconds")) == ({}, {"": 0})


async def _no_long_transactions(queue):
    return not await storage_report.long_transactions(queue.database)


def test_series_of_a_thousand_queues_are_capped():
    depths = {f"q{number}": number for number in range(1, 1001)}
    found = queue_metrics.cap_series(depths)
    assert len(found) == queue_metrics.QUEUES_MAX + 1
    assert (found["q1000"], found[queue_metrics.OTHER_QUEUES]) == (1000, sum(range(1, 901)))
    assert queue_metrics.cap_series({"a": 1}) == {"a": 1}


def test_oldest_session_of_an_application_determines_its_age():
    held = [
        LongTransaction(pid, "report", age_s, None, False, slots) for pid, age_s, slots in ((1, 9, [2]), (2, 4, [3, 0]))
    ]
    kept = LongTransaction(3, "other", 99, None, True, [7])
    assert queue_metrics.blocking_ages_s([*held, kept], open_slot=0) == {"report": 9}


async def test_leader_publishes_metrics_and_clears_them_when_it_stops_leading(queue, database):
    await queue.enqueue([entry("film", frames=3)])
    maintenance = QueueMaintenance(queue, Leases(database), _tombstone_nothing)
    supervisor = Supervisor()
    supervisor.add(Service("queue", maintenance.run))
    async with supervisor.running():
        await until(lambda: samples("rota_queue_depth") == {'{queue="film"}': 3}, what="the first measurement")
        assert samples("rota_queue_fold_last_success")[""] > 1e9
    assert (samples("rota_queue_depth"), samples("rota_queue_frames")) == ({}, {})
    assert math.isnan(samples("rota_queue_counters_trusted")[""])


async def test_failed_maintenance_is_restarted_by_its_supervisor(queue, database, monkeypatch):
    failures = iter([True])

    async def fails_once(lease):
        if next(failures, False):
            raise RuntimeError("a defect")
        return 0

    maintenance = QueueMaintenance(queue, Leases(database), _tombstone_nothing)
    monkeypatch.setattr(maintenance, "expire", fails_once)
    service = Service("queue", maintenance.run)
    async with asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await service.wait_for(ServiceState.RESTARTING)
        await until(lambda: maintenance.leadership.is_leader, what="another term")
        await service.stop(5.0)
    assert "a defect" in repr(service.error)


async def _tombstone_nothing(tokens):
    return set()


@pytest.fixture
async def accounting(database):
    """Two shows, since a claim does not name the show of its frames."""
    accounting = AccountingService(database, None)
    await accounting.admin.create_pool("main", actor="ann")
    await accounting.admin.create_dept("fx", actor="ann")
    for show in ("duck", "goose"):
        await accounting.admin.create_show(show, actor="ann")
        await accounting.admin.create_subscription(show, "main", size=10, burst=20, actor="ann")
        await accounting.admin.create_folder(show, "shots", actor="ann")
        await accounting.admin.create_point(show, "fx", actor="ann")
    return accounting


async def booked(accounting, show, tokens):
    admin: QuotaAdmin = accounting.admin
    [share], [folder], [point] = await admin.subscriptions(show), await admin.folders(show), await admin.points(show)
    found = await admin.show(show)
    group = BookingGroup(Charge(share.id, folder.id, found.id, found.id, point.id, 100, 0), uuid4(), tokens)
    [outcome] = await accounting.book(found.id, [group])
    return outcome


async def test_unbooked_tokens_of_a_dead_dispatcher_can_never_be_booked_in_any_show(accounting):
    await booked(accounting, "goose", [4, 5])
    assert await accounting.bar_unbooked(range(1, 7)) == {1, 2, 3, 6}
    for show in ("duck", "goose"):
        late = await booked(accounting, show, [1, 6])
        assert (list(late.booked), late.declined) == ([], {1: DeclineReason.TOMBSTONED, 6: DeclineReason.TOMBSTONED})
    goose = await accounting.admin.show("goose")
    assert [proc.token for proc in await allocations.page(accounting.database, goose.id)] == [4, 5]
    assert await accounting.bar_unbooked(range(1, 7)) == {1, 2, 3, 6}, "a repeated call returns the same tokens"


async def test_bar_unbooked_without_shows_returns_every_token(database):
    assert await AccountingService(database, None).bar_unbooked(range(3)) == {0, 1, 2}
