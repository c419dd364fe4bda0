"""The ordered reader on a real NATS: order, no duplicates, and every gap reported."""

import asyncio
import os

import msgspec
import pytest
from nats import errors

from rota.infra.nats import StreamGap, StreamMessage, ordered_reader
from rota.model.errors import NatsUnavailable
from tests.integration.infra.nats_support import JOBS, buses, delete_stream, message, stream_info
from tests.support.waiting import until


@pytest.fixture
async def connect(nats_url, bus_prefix):
    async with buses(nats_url, bus_prefix) as start:
        yield start


@pytest.fixture
async def bus(connect):
    bus = await connect()
    await bus.ensure([JOBS])
    return bus


class Follower:
    """Reads the stream in its own task."""

    def __init__(self, bus):
        self.bus = bus
        self.read = []

    async def __aenter__(self):
        self.task = asyncio.create_task(self._follow())
        await until(
            lambda: getattr(self, "reader", None) and self.reader.mark and self.reader._subscription,
            what="the subscription",
        )
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _follow(self):
        async with self.bus.ordered_reader("JOBS") as self.reader:
            async for batch in self.reader.batches():
                self.read += batch

    def numbers(self):
        return [int(read.data) for read in self.read if isinstance(read, StreamMessage)]

    def missed(self):
        return [read.seq for read in self.read if isinstance(read, StreamGap)]


async def test_ordered_reader_returns_new_messages_in_order(bus):
    await bus.publish(message(0))
    async with Follower(bus) as follower:
        await bus.publish_many([message(number) for number in range(1, 500)])
        await until(lambda: len(follower.read) >= 499)
        assert follower.numbers() == list(range(1, 500))
        assert [read.seq for read in follower.read] == list(range(2, 501))


async def test_ordered_reader_resumes_after_the_last_message_when_reconnected(bus, connect):
    other = await connect()
    async with Follower(bus) as follower:
        await other.publish(message(1))
        await until(lambda: follower.numbers() == [1])
        follower.reader.on_disconnected()  # as the connection calls it when it is lost
        await other.publish_many([message(number) for number in range(2, 50)])
        await until(lambda: len(follower.numbers()) >= 49)
        assert follower.numbers() == list(range(1, 50))
        assert follower.missed() == []


async def test_subscription_that_could_not_be_ended_does_not_return_with_the_connection(bus, connect, monkeypatch):
    """Its consumer would go on, and each of its messages would seem to be out of order."""
    other = await connect()
    async with Follower(bus) as follower:
        client, restarts = bus._connection._client, []
        first = follower.reader._subscription

        async def lost(*_):
            raise errors.FlushTimeoutError

        async def counted(start=follower.reader._start_consumer):
            restarts.append(follower.numbers())
            return await start()

        with monkeypatch.context() as patched:
            patched.setattr(client, "flush", lost)
            patched.setattr(client, "_send_unsubscribe", lost)
            follower.reader._mark_broken("silent")
            await until(lambda: follower.reader._subscription not in (None, first), what="a new consumer")
        client._transport.close()
        await until(lambda: not bus.connected)
        await until(lambda: bus.connected and follower.reader._subscription)
        monkeypatch.setattr(follower.reader, "_start_consumer", counted)
        for number in range(1, 20):
            await other.publish(message(number))
            await until(lambda number=number: follower.numbers()[-1:] == [number])
        assert follower.numbers() == list(range(1, 20))
        assert len(restarts) <= 1, "the one after the connection"


async def test_messages_removed_by_stream_limits_are_reported_as_a_gap(bus, connect):
    other = await connect()
    await bus.ensure([msgspec.structs.replace(JOBS, max_msgs=3)])
    async with Follower(bus) as follower:
        await until(lambda: follower.reader._subscription)
        await follower.reader._connection.unsubscribe(
            follower.reader._subscription
        )  # receives nothing and does not notice
        await other.publish_many([message(number) for number in range(10)])
        follower.reader.on_disconnected()
        await until(lambda: len(follower.numbers()) >= 3)
        assert follower.read == [StreamGap(follower.reader.mark, 7), *follower.read[1:]]
        assert follower.numbers() == [7, 8, 9]


async def test_recreated_stream_is_reported_as_a_gap(bus, connect):
    other = await connect()
    await other.ensure([JOBS])
    async with Follower(bus) as follower:
        before = follower.reader.mark
        await other.publish_many([message(number) for number in range(5)])
        await until(lambda: len(follower.numbers()) == 5)
        await delete_stream(other)
        await other.publish_many([message(number) for number in range(100, 110)])
        await until(lambda: len(follower.numbers()) >= 15, within_s=15)
        assert follower.numbers() == [*range(5), *range(100, 110)]
        assert follower.missed() == [0]
        assert {read.mark for read in follower.read[6:]} == {follower.reader.mark} != {before}


async def test_ordered_reader_recreates_a_deleted_stream(bus):
    async with Follower(bus) as follower:
        await delete_stream(bus)
        await until(follower.missed, within_s=15)
        assert (await stream_info(bus))["state"]["messages"] == 0


async def test_message_lost_in_transit_is_read_again(bus, monkeypatch):
    async with Follower(bus) as follower:
        taken, drop = follower.reader._on_message, {2}

        async def lossy(msg):
            if msg.data == b"3" and drop:
                drop.clear()
            else:
                await taken(msg)

        follower.reader._subscription.on_message = lossy
        follower.reader._subscription.subscription._cb = lossy
        await bus.publish_many([message(number) for number in range(1, 6)])
        await until(lambda: len(follower.numbers()) >= 5)
        assert follower.numbers() == [1, 2, 3, 4, 5]
        assert follower.missed() == []


async def test_slow_ordered_reader_buffers_a_bounded_amount_and_misses_nothing(bus, monkeypatch):
    monkeypatch.setattr(ordered_reader, "BUFFER_BYTES_MAX", 40)
    async with Follower(bus) as follower:
        await bus.publish_many([message(number) for number in range(300)])
        await until(lambda: len(follower.numbers()) >= 300)
        assert follower.numbers() == list(range(300))


async def test_ordered_reader_survives_a_nats_restart(private_stack, bus_prefix):
    stack = await private_stack("nats")
    nats = stack.servers["nats"]
    async with buses(nats.url, bus_prefix) as start:
        bus = await start()
        await bus.ensure([msgspec.structs.replace(JOBS, storage="file")])
        async with Follower(bus) as follower:
            await bus.publish(message(1))
            await until(lambda: follower.numbers() == [1])
            os.kill(nats.process.pid, 9)
            await nats.process.wait()
            await nats.restart()
            await until(lambda: bus.connected, within_s=15)
            await until(lambda: _published(bus, message(2)), within_s=15)
            await until(lambda: follower.numbers() == [1, 2], within_s=15)
            assert follower.missed() == []


async def _published(bus, what):
    try:
        return await bus.publish(what)
    except NatsUnavailable:
        return None
