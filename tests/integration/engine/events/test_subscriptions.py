"""Events from publisher to subscription on a real NATS: order, resuming from any position, reported gaps."""

import asyncio
import os
from contextlib import suppress

import pytest

from rota.engine.events import publisher as events_publisher
from rota.engine.events import subscriptions
from rota.engine.events.subscriptions import SlowConsumer
from rota.infra import failpoints
from rota.infra.failpoints import FaultPlan
from rota.infra.nats import BusMessage, PublishOutcome, PublishReceipt
from rota.infra.nats.topology import EVENTS_STREAM, EVENTS_SUBJECT
from rota.model.errors import NatsUnavailable, PostgresUnavailable
from rota.model.events import EventFilter, StreamPosition
from tests.integration.engine.events.events_support import (
    ALL,
    Reading,
    job,
    numbers,
    publish_events,
    publisher_of,
    running_stream,
)
from tests.integration.infra.nats_support import buses, delete_stream
from tests.support.queue import sql
from tests.support.waiting import until

SIZES = (1, 3, 1, 7, 2, 5)
TOTAL = sum(SIZES)


@pytest.fixture
async def connect(nats_url, bus_prefix):
    async with buses(nats_url, bus_prefix) as start:
        yield start


@pytest.fixture
async def bus(connect):
    return await connect()


@pytest.fixture
def publisher(database, bus):
    return publisher_of(database, bus)


async def test_subscription_receives_all_new_events_in_order(bus, publisher):
    async with running_stream(bus) as stream, stream.subscribe(ALL) as reader:
        await publish_events(publisher, SIZES)
        read = []
        while len(read) < TOTAL:
            read += [event for batch in await reader.read(5) for event in batch.events()]
        assert numbers(read) == list(range(TOTAL))
        assert len({event.id for event in read}) == TOTAL


async def _all_ids(stream, publisher):
    """The position before all events, and the ids of all events."""
    before = stream.place
    await publish_events(publisher, SIZES)
    events = await Reading(stream, after=before).until(TOTAL)
    return before, [event.id for event in events]


async def test_commit_whose_reply_is_lost_becomes_a_reset(bus, database, publisher, monkeypatch):
    database.unknown_outcome_listeners.append(publisher.report_unconfirmed)
    monkeypatch.setattr(failpoints, "after_send", FaultPlan({}, {}, {"postgres.commit": 1}).after_send)
    async with running_stream(bus) as stream:
        before = stream.place
        with pytest.raises(PostgresUnavailable):
            async with database.transaction() as tx:
                await tx.run(sql("SELECT"))
        await publish_events(publisher, [1])
        reset, after = await Reading(stream, after=before).until(2)
    assert (reset.kind, reset.facts) == ("reset", {"because": "unconfirmed"})
    assert numbers([after]) == [0]


async def test_reset_of_an_unconfirmed_commit_survives_a_refused_message(bus, publisher, monkeypatch):
    async def refuse(messages):
        return [PublishReceipt(PublishOutcome.REJECTED, reason="the stream is full") for _ in messages]

    async with running_stream(bus) as stream:
        before = stream.place
        publisher.report_unconfirmed()
        with monkeypatch.context() as patched:
            patched.setattr(publisher.bus, "publish_many", refuse)
            with pytest.raises(NatsUnavailable):
                await publisher.publish()
        await publisher.publish()
        [reset] = await Reading(stream, after=before).until(1)
    assert reset.facts == {"because": "unconfirmed"}


async def test_resuming_after_any_event_neither_loses_nor_repeats(bus, publisher):
    async with running_stream(bus) as stream:
        before, ids = await _all_ids(stream, publisher)
        assert len(ids) == TOTAL
        for cut, at in enumerate([str(before), *ids[:-1]]):
            read = await Reading(stream, after=StreamPosition.parse(at)).until(TOTAL - cut)
            assert [event.id for event in read] == ids[cut:], f"after {cut} events"


async def test_events_evicted_from_the_ring_are_read_from_the_stream(bus, publisher, connect):
    async with running_stream(bus) as stream:
        before, ids = await _all_ids(stream, publisher)
        async with running_stream(await connect(), ring_bytes=3 * subscriptions.PAGE_OVERHEAD_BYTES) as small:
            await publish_events(publisher, SIZES, first=TOTAL)
            await until(lambda: small.place.seq == 2 * len(SIZES))
            assert small.next_page_number - small._first < len(SIZES)
            for cut, at in enumerate([str(before), *ids]):
                read = await Reading(small, after=StreamPosition.parse(at)).until(2 * TOTAL - cut)
                assert numbers(read) == list(range(cut, 2 * TOTAL)), f"after {cut} events"


async def test_position_removed_from_the_stream_yields_a_reset(bus, publisher, connect, nats_url, bus_prefix):
    async with running_stream(bus) as stream:
        _, ids = await _all_ids(stream, publisher)
        purge = f"$JS.API.STREAM.PURGE.{bus_prefix}_{EVENTS_STREAM}"
        await bus._connection.request(purge, b'{"keep": 1}')
        async with running_stream(await connect()) as late:
            reading = Reading(late, after=StreamPosition.parse(ids[0]))
            [reset] = await reading.until(1)
            assert (reset.kind, reset.facts) == ("reset", {"because": "removed"})
            await publish_events(publisher, [2], first=100)
            assert numbers(await Reading(late, after=StreamPosition.parse(reset.id)).until(2)) == [100, 101]


async def test_position_of_an_unknown_stream_yields_a_reset(bus, publisher):
    async with running_stream(bus) as stream:
        await publish_events(publisher, SIZES)
        for unknown in ("abc-1-0", f"{stream.place.mark}-999999"):
            [reset] = await Reading(stream, after=StreamPosition.parse(unknown)).until(1)
            assert reset.kind == "reset"


async def test_position_ahead_of_this_replica_is_waited_for(bus, publisher, connect, monkeypatch):
    async with running_stream(bus) as fast, running_stream(await connect()) as slow:
        # It receives nothing by itself: a late delivery would bring it to the position before it is asked for it.
        monkeypatch.setattr(slow, "ingest", lambda _read: None)
        held = slow.place
        before, ids = await _all_ids(fast, publisher)
        assert slow.place == held == before
        state_read, state = asyncio.Event(), slow.bus.stream_state

        async def seen(stream):
            state_read.set()
            return await state(stream)

        monkeypatch.setattr(slow.bus, "stream_state", seen)
        reading = asyncio.create_task(Reading(slow, after=StreamPosition.parse(ids[-2])).until(1))
        await asyncio.wait_for(state_read.wait(), 5)
        # Deliver what it missed.
        for seq in range(1, len(SIZES) + 1):
            stored = await bus.get_message(EVENTS_STREAM, seq)
            slow._append(slow.decode_page(held.mark, seq, stored.data))
        slow._notify_readers()
        assert [event.id for event in await reading] == ids[-1:]


async def test_slow_consumer_is_evicted_and_resumes_from_its_position(bus, publisher):
    async with running_stream(bus, ring_bytes=4 * subscriptions.PAGE_OVERHEAD_BYTES) as stream:
        async with stream.subscribe(ALL) as slow, stream.subscribe(ALL) as quick:
            await publish_events(publisher, [1])
            assert numbers([e for p in await slow.read(5) for e in p.events()]) == [0]
            seen = slow.place
            read = []
            for number in range(1, 20):
                await publish_events(publisher, [1], first=number)
                while len(read) <= number:
                    read += [e for p in await quick.read(5) for e in p.events()]
            with pytest.raises(SlowConsumer):
                await slow.read(5)
            assert numbers(read) == list(range(20))
        rest = await Reading(stream, after=seen).until(19)
        assert numbers(rest) == list(range(1, 20))


async def test_full_publisher_queue_drops_events_and_publishes_the_gap(bus, publisher, monkeypatch):
    monkeypatch.setattr(events_publisher, "QUEUED_EVENTS_MAX", 5)
    async with running_stream(bus) as stream:
        before = stream.place
        for number in range(8):
            publisher.emit("job.succeeded", jobs=[job(number)])
        await publisher.publish()
        publisher.emit("job.succeeded", jobs=[job(8)])
        await publisher.publish()
        read = await Reading(stream, after=before).until(7)
        assert numbers(read) == ["reset", 0, 1, 2, 3, 4, 8]
        assert read[0].facts == {"because": "dropped", "events": 3}


async def test_events_queued_during_a_nats_outage_are_published_once(bus, publisher, monkeypatch):
    async with running_stream(bus) as stream:
        before = stream.place
        sent, publish = [], bus.publish_many

        async def lossy(messages):
            """The first reply is lost."""
            receipts = await publish(messages)
            sent.append(messages[0].msg_id)
            if len(sent) == 1:
                return [type(receipts[0])(receipts[0].outcome.UNSETTLED, reason="lost")]
            return receipts

        monkeypatch.setattr(bus, "publish_many", lossy)
        publisher.emit("job.succeeded", jobs=[job(1)])
        with pytest.raises(NatsUnavailable):
            await publisher.publish()
        await publisher.publish()
        await publish_events(publisher, [1], first=2)
        assert sent[0] == sent[1]
        assert numbers(await Reading(stream, after=before).until(2)) == [1, 2]


async def test_publish_of_unknown_outcome_is_not_retried_forever(bus, publisher, monkeypatch):
    async with running_stream(bus) as stream:
        before = stream.place
        monkeypatch.setattr(events_publisher, "RESEND_WINDOW_S", -1.0)

        async def lost(messages):
            monkeypatch.undo()
            monkeypatch.setattr(events_publisher, "RESEND_WINDOW_S", -1.0)
            receipts = await bus.publish_many(messages)
            return [type(receipts[0])(receipts[0].outcome.UNSETTLED, reason="lost")]

        monkeypatch.setattr(bus, "publish_many", lost)
        publisher.emit("job.succeeded", jobs=[job(1)])
        with pytest.raises(NatsUnavailable):
            await publisher.publish()
        await publisher.publish()
        # The message was stored after all: readers get it once, then a reset.
        assert numbers(await Reading(stream, after=before).until(2)) == [1, "reset"]


async def test_recreated_stream_yields_a_reset_and_reading_continues(bus, publisher):
    async with running_stream(bus) as stream:
        before = stream.place
        await publish_events(publisher, [2])
        reading = Reading(stream, after=before)
        assert numbers(await reading.until(2)) == [0, 1]
        await delete_stream(bus, EVENTS_STREAM)
        await publish_events(publisher, [2], first=10)
        assert numbers(await reading.until(5, within_s=15)) == [0, 1, "reset", 10, 11]
        assert reading.events[-1].id.split("-")[0] != before.mark


async def test_undecodable_message_yields_a_reset_and_reading_continues(bus, publisher):
    async with running_stream(bus) as stream:
        before = stream.place
        await bus.publish(BusMessage(subject=EVENTS_SUBJECT, data=b"\xffnonsense", msg_id="strange"))
        await publish_events(publisher, [1], first=7)
        assert numbers(await Reading(stream, after=before).until(2)) == ["reset", 7]


async def test_nats_restart_loses_no_stored_event(database, private_stack, bus_prefix):
    stack = await private_stack("nats")
    nats = stack.servers["nats"]
    async with buses(nats.url, bus_prefix) as start:
        bus = await start()
        publisher = publisher_of(database, bus)
        async with running_stream(bus) as stream:
            before = stream.place
            await publish_events(publisher, [3])
            await until(lambda: stream.place.seq == 1)
            os.kill(nats.process.pid, 9)
            await nats.process.wait()
            publisher.emit("job.failed", jobs=[job(50)])
            await nats.restart()
            await until(lambda: _published(publisher), within_s=15)
            read = await Reading(stream, after=before).until(4, within_s=15)
            assert numbers(read) == [0, 1, 2, 50]


async def _published(publisher):
    with suppress(NatsUnavailable):
        await publisher.publish()
        return True


async def test_readers_receive_only_events_of_shows_they_may_see(bus, publisher):
    film, other = job(1000), job(2000)
    async with running_stream(bus) as stream:
        before = stream.place
        publisher.emit("job.succeeded", show=film, jobs=[job(1)], topic="a")
        publisher.emit("job.succeeded", show=other, jobs=[job(2)], topic="b")
        publisher.emit("worker.came", worker="w", name="w", pool="p")
        publisher.emit("job.failed", show="no-such-show", jobs=[job(3)], topic="c")
        publisher.emit("job.failed", show=film, jobs=[job(4), job(5)], topic="a")
        await publisher.publish()
        only_film = await Reading(stream, EventFilter(shows=frozenset({film})), before).until(3)
        assert numbers(only_film) == [1, 4, 5]
        everything = await Reading(stream, ALL, before).until(6)
        assert numbers(everything) == [1, 2, "worker.came", 3, 4, 5]
        one = await Reading(stream, EventFilter(job=job(5)), before).until(1)
        assert (numbers(one), one[0].id) == ([5], everything[-1].id)
        kinds = await Reading(stream, EventFilter(kinds=("worker", "job.failed")), before).until(4)
        assert numbers(kinds) == ["worker.came", 3, 4, 5]


async def test_filtered_reader_advances_past_unmatched_events(bus, publisher):
    async with (
        running_stream(bus, ring_bytes=4 * subscriptions.PAGE_OVERHEAD_BYTES) as stream,
        stream.subscribe(EventFilter(kinds=("worker",))) as reader,
    ):
        for number in range(20):
            await publish_events(publisher, [1], first=number)
            await until(lambda: stream.place.seq > number)  # noqa: B023
            assert await reader.read(0) == []
        assert reader.place == stream.place
