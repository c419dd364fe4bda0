"""Ages of queues are read when something has changed in them."""

from functools import partial
from types import SimpleNamespace

import pytest

from rota.accounting.admin import QuotaAdmin
from rota.accounting.resources import CapsUpdate
from rota.engine.dispatch.pending_queues import PendingQueues
from rota.engine.dispatch.pending_reader import POLL_MAX_AGE_S, PendingReader
from rota.infra.clock import SystemClock
from rota.queue import Queue
from tests.support.harness.statements import count_statements
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

MAKE_OLDER = sql("UPDATE rota.ready_entries SET enqueued_at = enqueued_at - interval '1 hour'")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm


@pytest.fixture
def reader(farm):
    """Of its own: that of the dispatcher also reads when it is notified."""
    clock = SystemClock()
    return PendingReader(PendingQueues(clock, lambda _cls: ()), farm.database, Queue(farm.database), clock)


@pytest.fixture
def lanes_read(reader, monkeypatch):
    """How many lanes were read, by call."""
    calls = []

    async def head_ages_s(lanes, real=reader.queue.head_ages_s):
        calls.append(len(lanes))
        return await real(lanes)

    monkeypatch.setattr(reader.queue, "head_ages_s", head_ages_s)
    return calls


async def refresh(reader, lanes_read):
    """The ages after a refresh, and how many lanes were read for it."""
    before = sum(lanes_read)
    await reader.refresh(None)
    now = SystemClock().monotonic()
    return {at: now - pending.since_s for at, pending in reader.pending_queues.entries.items() if pending.waiting}, sum(
        lanes_read
    ) - before


async def test_age_of_a_queue_is_read_when_its_counts_have_changed(farm, reader, lanes_read, monkeypatch):
    for priority in range(1, 6):
        await farm.submit("noop", priority=priority)
    await refresh(reader, lanes_read)
    ages, read = await refresh(reader, lanes_read)
    assert (len(ages), read) == (5, 0)
    await farm.database.run(MAKE_OLDER)
    ages, read = await refresh(reader, lanes_read)
    assert (max(ages.values()) < 3000, read) == (True, 0)
    reader.forget()  # as after a lost connection: notifications may have been missed
    ages, read = await refresh(reader, lanes_read)
    assert (min(ages.values()) > 3000, read) == (True, 5)
    await farm.database.run(MAKE_OLDER)
    # Frames may have come and gone: a notification has the ages read although the counts are the same.
    await reader.refresh([next(iter(ages))[0]])
    ages, read = await refresh(reader, lanes_read)
    assert (min(ages.values()) > 3000, max(ages.values()) > 6000, read) == (True, True, 0)
    monkeypatch.setattr("rota.engine.dispatch.pending_reader.HEADS_MAX_AGE_S", 0.0)
    assert (await refresh(reader, lanes_read))[1] >= 5
    await farm.replica.engine.canceller.cancel(await farm.submit("noop", priority=8), actor="test")
    await refresh(reader, lanes_read)
    assert len(reader._heads) == 5, "lanes without frames are forgotten"


async def test_poll_reads_all_queues_only_if_something_has_changed(farm):
    """By a reader of its own, that is not notified of anything."""
    engine, clock = farm.replica.engine, SimpleNamespace(monotonic=lambda: 0.0)
    queues = PendingQueues(clock, lambda _cls: ())
    reader = PendingReader(queues, farm.database, engine.backends.queue, clock)
    refresh, reads = reader.refresh, []

    async def counted():
        reads.append(None)
        await refresh()

    async def reads_of_two_polls():
        reads.clear()
        await reader.refresh_all(always=False)
        first = len(reads)
        await reader.refresh_all(always=False)
        return first, len(reads) - first

    reader.refresh = counted
    job = await farm.submit("noop", priority=3)
    await farm.submit("noop", priority=5)
    assert await reads_of_two_polls() == (1, 0)
    [name] = {name for name, _ in queues.entries}
    for change in (
        lambda: reader.queue.pause(name),
        lambda: reader.queue.resume(name),
        lambda: farm.submit("noop", priority=5),
        lambda: engine.canceller.cancel(job, actor="test"),
    ):
        await change()
        assert await reads_of_two_polls() == (1, 0)
    queues.mark_notified(name)
    assert await reads_of_two_polls() == (1, 0)
    clock.monotonic = lambda: POLL_MAX_AGE_S
    assert await reads_of_two_polls() == (1, 0)


async def test_poll_of_a_farm_without_limits_and_changes_is_two_statements(farm, monkeypatch):
    """The counts, and whether anything is limited: not what is limited, and by how much."""
    await farm.submit("noop")
    dispatcher = farm.replica.engine.dispatcher
    statements = count_statements(farm.database, monkeypatch)

    async def polled():
        statements.clear()
        return not await dispatcher._refresh_all(always=False)

    await until(polled, what="a poll that finds no change")
    assert statements == ["rota.queue.counts_version", "rota.engine.dispatch.waiting_limits"]


async def test_minimum_that_is_removed_does_not_count_any_more(farm):
    await farm.submit("noop")
    dispatcher = farm.replica.engine.dispatcher
    for cores, has_minimum in ((5, True), (0, False)):
        caps = CapsUpdate(min_cores=cores)
        await farm.accounting.change(
            partial(QuotaAdmin.change_folder, show="film", name="default", caps=caps, actor="t")
        )
        await dispatcher._refresh_all(always=True)
        assert bool(dispatcher.pending_queues._minimums) is has_minimum
