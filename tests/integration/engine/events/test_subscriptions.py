"""Events from teller to reader on a real NATS: order, going on from anywhere, and gaps that are told."""

import asyncio
import os
from contextlib import suppress

import pytest

from rota.engine.events import publisher as events_publisher
from rota.engine.events import subscriptions
from rota.engine.events.subscriptions import SlowConsumer
from rota.infra.nats import BusMessage
from rota.infra.nats.topology import EVENTS_STREAM, EVENTS_SUBJECT
from rota.model.errors import NatsUnavailable
from rota.model.events import EventFilter, StreamPosition
from tests.integration.engine.events.events_support import ALL, Reading, following, job, numbers, teller_of, told
from tests.integration.infra.nats_support import buses, delete_stream
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
def teller(database, bus):
    return teller_of(database, bus)


async def test_a_reader_gets_everything_from_now_on_in_order(bus, teller):
    async with following(bus) as feed, feed.subscribe(ALL) as reader:
        await told(teller, SIZES)
        read = []
        while len(read) < TOTAL:
            read += [event for portion in await reader.read(5) for event in portion.events()]
        assert numbers(read) == list(range(TOTAL))
        assert len({event.id for event in read}) == TOTAL


async def _all_ids(feed, teller):
    """The place before anything, and the ids of all events."""
    before = feed.place
    await told(teller, SIZES)
    events = await Reading(feed, after=before).until(TOTAL)
    return before, [event.id for event in events]


async def test_going_on_after_any_event_loses_none_and_repeats_none(bus, teller):
    async with following(bus) as feed:
        before, ids = await _all_ids(feed, teller)
        assert len(ids) == TOTAL
        for cut, at in enumerate([str(before), *ids[:-1]]):
            read = await Reading(feed, after=StreamPosition.parse(at)).until(TOTAL - cut)
            assert [event.id for event in read] == ids[cut:], f"after {cut} events"


async def test_what_the_ring_has_forgotten_is_read_from_the_stream(bus, teller, connect):
    async with following(bus) as feed:
        before, ids = await _all_ids(feed, teller)
        async with following(await connect(), ring_bytes=3 * subscriptions.PAGE_OVERHEAD_BYTES) as small:
            await told(teller, SIZES, first=TOTAL)
            await until(lambda: small.place.seq == 2 * len(SIZES))
            assert small.next_page_number - small._first < len(SIZES)
            for cut, at in enumerate([str(before), *ids]):
                read = await Reading(small, after=StreamPosition.parse(at)).until(2 * TOTAL - cut)
                assert numbers(read) == list(range(cut, 2 * TOTAL)), f"after {cut} events"


async def test_a_place_that_the_stream_has_removed_is_answered_with_a_reset(bus, teller, connect, nats_url, bus_prefix):
    async with following(bus) as feed:
        _, ids = await _all_ids(feed, teller)
        purge = f"$JS.API.STREAM.PURGE.{bus_prefix}_{EVENTS_STREAM}"
        await bus._connection.request(purge, b'{"keep": 1}')
        async with following(await connect()) as late:
            reading = Reading(late, after=StreamPosition.parse(ids[0]))
            [reset] = await reading.until(1)
            assert (reset.kind, reset.facts) == ("reset", {"because": "removed"})
            await told(teller, [2], first=100)
            assert numbers(await Reading(late, after=StreamPosition.parse(reset.id)).until(2)) == [100, 101]


async def test_a_place_of_no_stream_that_there_is_is_answered_with_a_reset(bus, teller):
    async with following(bus) as feed:
        await told(teller, SIZES)
        for strange in ("abc-1-0", f"{feed.place.mark}-999999"):
            [reset] = await Reading(feed, after=StreamPosition.parse(strange)).until(1)
            assert reset.kind == "reset"


async def test_a_place_that_another_replica_was_faster_to_reach_is_waited_for(bus, teller, connect, monkeypatch):
    async with following(bus) as fast, following(await connect()) as slow:
        monkeypatch.setattr(slow, "ingest", lambda _read: None)  # deaf for now
        held = slow.place
        before, ids = await _all_ids(fast, teller)
        assert slow.place == held == before
        monkeypatch.undo()
        looked, state = asyncio.Event(), slow.bus.stream_state

        async def seen(stream):
            looked.set()
            return await state(stream)

        monkeypatch.setattr(slow.bus, "stream_state", seen)
        reading = asyncio.create_task(Reading(slow, after=StreamPosition.parse(ids[-2])).until(1))
        await asyncio.wait_for(looked.wait(), 5)
        # What it had not heard comes now.
        for seq in range(1, len(SIZES) + 1):
            stored = await bus.get_message(EVENTS_STREAM, seq)
            slow._append(slow.decode_page(held.mark, seq, stored.data))
        slow._notify_readers()
        assert [event.id for event in await reading] == ids[-1:]


async def test_a_reader_that_the_ring_leaves_behind_is_told_so_and_goes_on_elsewhere(bus, teller):
    async with following(bus, ring_bytes=4 * subscriptions.PAGE_OVERHEAD_BYTES) as feed:
        async with feed.subscribe(ALL) as slow, feed.subscribe(ALL) as quick:
            await told(teller, [1])
            assert numbers([e for p in await slow.read(5) for e in p.events()]) == [0]
            seen = slow.place
            read = []
            for number in range(1, 20):
                await told(teller, [1], first=number)
                while len(read) <= number:
                    read += [e for p in await quick.read(5) for e in p.events()]
            with pytest.raises(SlowConsumer):
                await slow.read(5)
            assert numbers(read) == list(range(20))
        rest = await Reading(feed, after=seen).until(19)
        assert numbers(rest) == list(range(1, 20))


async def test_more_than_may_wait_is_dropped_and_the_gap_is_told(bus, teller, monkeypatch):
    monkeypatch.setattr(events_publisher, "QUEUED_EVENTS_MAX", 5)
    async with following(bus) as feed:
        before = feed.place
        for number in range(8):
            teller.emit("job.succeeded", jobs=[job(number)])
        await teller.publish()
        teller.emit("job.succeeded", jobs=[job(8)])
        await teller.publish()
        read = await Reading(feed, after=before).until(7)
        assert numbers(read) == ["reset", 0, 1, 2, 3, 4, 8]
        assert read[0].facts == {"because": "dropped", "events": 3}


async def test_events_wait_while_nats_is_away_and_are_told_once(bus, teller, monkeypatch):
    async with following(bus) as feed:
        before = feed.place
        sent, publish = [], bus.publish_many

        async def lossy(messages):
            """The first reply is lost."""
            receipts = await publish(messages)
            sent.append(messages[0].msg_id)
            if len(sent) == 1:
                return [type(receipts[0])(receipts[0].outcome.UNSETTLED, reason="lost")]
            return receipts

        monkeypatch.setattr(bus, "publish_many", lossy)
        teller.emit("job.succeeded", jobs=[job(1)])
        with pytest.raises(NatsUnavailable):
            await teller.publish()
        await teller.publish()
        await told(teller, [1], first=2)
        assert sent[0] == sent[1]
        assert numbers(await Reading(feed, after=before).until(2)) == [1, 2]


async def test_a_message_of_unknown_outcome_is_not_repeated_for_ever(bus, teller, monkeypatch):
    async with following(bus) as feed:
        before = feed.place
        monkeypatch.setattr(events_publisher, "RESEND_WINDOW_S", -1.0)

        async def lost(messages):
            monkeypatch.undo()
            monkeypatch.setattr(events_publisher, "RESEND_WINDOW_S", -1.0)
            receipts = await bus.publish_many(messages)
            return [type(receipts[0])(receipts[0].outcome.UNSETTLED, reason="lost")]

        monkeypatch.setattr(bus, "publish_many", lost)
        teller.emit("job.succeeded", jobs=[job(1)])
        with pytest.raises(NatsUnavailable):
            await teller.publish()
        await teller.publish()
        # It was there after all; who reads is told to look anew, and hears it once.
        assert numbers(await Reading(feed, after=before).until(2)) == [1, "reset"]


async def test_a_stream_that_was_lost_is_told_as_a_reset_and_reading_goes_on(bus, teller):
    async with following(bus) as feed:
        before = feed.place
        await told(teller, [2])
        reading = Reading(feed, after=before)
        assert numbers(await reading.until(2)) == [0, 1]
        await delete_stream(bus, EVENTS_STREAM)
        await told(teller, [2], first=10)
        assert numbers(await reading.until(5, within_s=15)) == [0, 1, "reset", 10, 11]
        assert reading.events[-1].id.split("-")[0] != before.mark


async def test_a_message_that_cannot_be_read_is_told_as_a_reset_and_ends_nobody(bus, teller):
    async with following(bus) as feed:
        before = feed.place
        await bus.publish(BusMessage(subject=EVENTS_SUBJECT, data=b"\xffnonsense", msg_id="strange"))
        await told(teller, [1], first=7)
        assert numbers(await Reading(feed, after=before).until(2)) == ["reset", 7]


async def test_a_restart_of_nats_loses_nothing_that_it_had_stored(database, private_stack, bus_prefix):
    stack = await private_stack("nats")
    nats = stack.servers["nats"]
    async with buses(nats.url, bus_prefix) as start:
        bus = await start()
        teller = teller_of(database, bus)
        async with following(bus) as feed:
            before = feed.place
            await told(teller, [3])
            await until(lambda: feed.place.seq == 1)
            os.kill(nats.process.pid, 9)
            await nats.process.wait()
            teller.emit("job.failed", jobs=[job(50)])
            await nats.restart()
            await until(lambda: _published(teller), within_s=15)
            read = await Reading(feed, after=before).until(4, within_s=15)
            assert numbers(read) == [0, 1, 2, 50]


async def _published(teller):
    with suppress(NatsUnavailable):
        await teller.publish()
        return True


async def test_readers_that_may_not_see_a_show_hear_nothing_of_it(bus, teller):
    film, other = job(1000), job(2000)
    async with following(bus) as feed:
        before = feed.place
        teller.emit("job.succeeded", show=film, jobs=[job(1)], topic="a")
        teller.emit("job.succeeded", show=other, jobs=[job(2)], topic="b")
        teller.emit("worker.came", worker="w", name="w", pool="p")
        teller.emit("job.failed", show="no-such-show", jobs=[job(3)], topic="c")
        teller.emit("job.failed", show=film, jobs=[job(4), job(5)], topic="a")
        await teller.publish()
        only_film = await Reading(feed, EventFilter(shows=frozenset({film})), before).until(3)
        assert numbers(only_film) == [1, 4, 5]
        everything = await Reading(feed, ALL, before).until(6)
        assert numbers(everything) == [1, 2, "worker.came", 3, 4, 5]
        one = await Reading(feed, EventFilter(job=job(5)), before).until(1)
        assert (numbers(one), one[0].id) == ([5], everything[-1].id)
        kinds = await Reading(feed, EventFilter(kinds=("worker", "job.failed")), before).until(4)
        assert numbers(kinds) == ["worker.came", 3, 4, 5]


async def test_a_filtered_reader_moves_on_past_what_it_does_not_want(bus, teller):
    async with (
        following(bus, ring_bytes=4 * subscriptions.PAGE_OVERHEAD_BYTES) as feed,
        feed.subscribe(EventFilter(kinds=("worker",))) as reader,
    ):
        for number in range(20):
            await told(teller, [1], first=number)
            await until(lambda: feed.place.seq > number)  # noqa: B023
            assert await reader.read(0) == []
        assert reader.place == feed.place
