"""What the queue tells about itself, who is told when upkeep breaks, and what a dead dispatcher may no longer book."""

import asyncio
import math
from uuid import uuid4

import asyncpg
import pytest

from rota import runtime
from rota.accounting import allocations
from rota.accounting.admin import QuotaAdmin
from rota.accounting.ledger import BookingGroup, Charge, DeclineReason
from rota.accounting.service import AccountingService
from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.infra.service.lifecycle import ServiceState
from rota.infra.telemetry import metrics
from rota.queue import Queue, QueueMaintenance, storage_report
from rota.queue import metrics as measures
from rota.queue.storage_report import LongTransaction
from tests.support.queue import Dispatcher, entry, sql
from tests.support.waiting import until

OLDER = sql("UPDATE rota.ready_entries SET enqueued_at = clock_timestamp() - interval '1 minute' WHERE lane_id = $1")


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture(autouse=True)
def _told_afresh():
    measures.clear_metrics()
    yield
    measures.clear_metrics()


def told(name):
    """Samples of a metric by their labels, as Prometheus would read them."""
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {line.removeprefix(name).rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_depth_age_and_trust_are_measured(queue, dispatcher, database):
    old, young = await queue.enqueue([entry("film", frames=6), entry("short", frames=2)])
    await dispatcher.claim(4, [old.lane])
    await database.run(OLDER, old.lane)
    await measures.collect_metrics(queue)
    assert told("rota_queue_frames")['{state="waiting"}'] == 4
    assert told("rota_queue_frames")['{state="running"}'] == 4
    assert told("rota_queue_depth") == {'{queue="film"}': 2, '{queue="short"}': 2}
    ages = told("rota_queue_oldest_age_seconds")
    assert 60 <= ages['{queue="film"}'] < 120
    assert ages['{queue="short"}'] < 30
    assert told("rota_queue_counters_trusted") == {"": 1}
    assert told("rota_queue_pending_deltas") == {"": 3}
    await dispatcher.claim(10, [old.lane, young.lane])
    await database.run(sql("UPDATE rota.queue_storage SET counters_trusted = false"))
    await measures.collect_metrics(queue)
    assert told("rota_queue_depth") == {}, "a queue in which nothing waits has no series"
    assert told("rota_queue_counters_trusted") == {"": 0}


async def test_who_blocks_a_slot_or_pins_rows_is_told_by_name(queue, database_url, monkeypatch):
    monkeypatch.setattr(storage_report.long_transactions, "__defaults__", (0.0,))
    sealed = await asyncpg.connect(database_url, server_settings={"application_name": "report"})
    await sealed.execute("BEGIN; SELECT count(*) FROM rota.queue_claims_3")
    opened = await asyncpg.connect(database_url, server_settings={"application_name": "producer"})
    await opened.execute("BEGIN; SELECT count(*) FROM rota.ready_entries_0; SELECT txid_current()")
    await measures.collect_metrics(queue)
    assert list(told("rota_queue_prune_blocked_seconds")) == ['{application="report"}'], (
        "the open slot is nobody's fault"
    )
    assert told("rota_queue_pinned_seconds")[""] > 0
    await sealed.close()
    await opened.close()
    await until(lambda: _nobody(queue), what="the sessions' end")
    await measures.collect_metrics(queue)
    assert (told("rota_queue_prune_blocked_seconds"), told("rota_queue_pinned_seconds")) == ({}, {"": 0})


async def _nobody(queue):
    return not await storage_report.long_transactions(queue.database)


def test_a_thousand_queues_are_no_thousand_series():
    depths = {f"q{number}": number for number in range(1, 1001)}
    found = measures.cap_series(depths)
    assert len(found) == measures.QUEUES_MAX + 1
    assert (found["q1000"], found[measures.OTHER_QUEUES]) == (1000, sum(range(1, 901)))
    assert measures.cap_series({"a": 1}) == {"a": 1}


def test_of_several_sessions_of_an_application_the_oldest_counts():
    held = [
        LongTransaction(pid, "report", age_s, None, False, slots) for pid, age_s, slots in ((1, 9, [2]), (2, 4, [3, 0]))
    ]
    kept = LongTransaction(3, "other", 99, None, True, [7])
    assert measures.blocking_ages_s([*held, kept], open_slot=0) == {"report": 9}


async def test_a_leader_measures_and_one_that_no_longer_leads_says_nothing(queue, database):
    await queue.enqueue([entry("film", frames=3)])
    upkeep = QueueMaintenance(queue, Leases(database), _none_buried)
    supervisor = Supervisor()
    supervisor.add(Service("queue", upkeep.run))
    async with supervisor.running():
        await until(lambda: told("rota_queue_depth") == {'{queue="film"}': 3}, what="measuring")
        assert told("rota_queue_fold_last_success")[""] > 1e9
    assert (told("rota_queue_depth"), told("rota_queue_frames")) == ({}, {})
    assert math.isnan(told("rota_queue_counters_trusted")[""])


async def test_upkeep_that_fails_is_started_again_by_whoever_supervises_it(queue, database, monkeypatch):
    failures = iter([True])

    async def fails_once(lease):
        if next(failures, False):
            raise RuntimeError("a defect")
        return 0

    upkeep = QueueMaintenance(queue, Leases(database), _none_buried)
    monkeypatch.setattr(upkeep, "expire", fails_once)
    service = Service("queue", upkeep.run)
    async with asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await service.wait_for(ServiceState.RESTARTING)
        await until(lambda: upkeep._leadership.is_leader, what="another term")
        await service.stop(5.0)
    assert "a defect" in repr(service.error)


async def _none_buried(tokens):
    return set()


@pytest.fixture
async def books(database):
    """Two shows, since a claim does not say whose frames it holds."""
    books = AccountingService(database, None)
    await books.admin.create_pool("main", actor="ann")
    await books.admin.create_dept("fx", actor="ann")
    for show in ("duck", "goose"):
        await books.admin.create_show(show, actor="ann")
        await books.admin.create_subscription(show, "main", size=10, burst=20, actor="ann")
        await books.admin.create_folder(show, "shots", actor="ann")
        await books.admin.create_point(show, "fx", actor="ann")
    return books


async def booked(books, show, tokens):
    admin: QuotaAdmin = books.admin
    [share], [folder], [point] = await admin.subscriptions(show), await admin.folders(show), await admin.points(show)
    found = await admin.show(show)
    group = BookingGroup(Charge(share.id, folder.id, found.id, found.id, point.id, 100, 0), uuid4(), tokens)
    [outcome] = await books.book(found.id, [group])
    return outcome


async def test_what_a_dead_dispatcher_has_not_booked_it_can_never_book_in_any_show(books):
    await booked(books, "goose", [4, 5])
    assert await runtime.tombstone_unbooked(books, range(1, 7)) == {1, 2, 3, 6}
    for show in ("duck", "goose"):
        late = await booked(books, show, [1, 6])
        assert (list(late.booked), late.declined) == ([], {1: DeclineReason.TOMBSTONED, 6: DeclineReason.TOMBSTONED})
    goose = await books.admin.show("goose")
    assert [proc.token for proc in await allocations.page(books.database, goose.id)] == [4, 5]
    assert await runtime.tombstone_unbooked(books, range(1, 7)) == {1, 2, 3, 6}, "asking again tells the same"


async def test_where_there_is_no_show_nothing_can_be_booked(database):
    assert await runtime.tombstone_unbooked(AccountingService(database, None), range(3)) == {0, 1, 2}
