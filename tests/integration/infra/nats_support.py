"""Helpers of the NATS tests: one stream, its consumer, and their state on the server."""

import asyncio
from contextlib import asynccontextmanager

import msgspec

from rota.infra.nats import BatchConsumer, BatchProcessor, Bus, BusMessage, ConsumerSpec, NatsTarget, StreamSpec
from rota.infra.service import Lifecycle

JOBS = StreamSpec(name="JOBS", subjects=("job.>",), storage="memory")
READER = ConsumerSpec(stream="JOBS", durable="reader", filter="job.>", ack_wait_s=30)
SHORT_ACK_WAIT = msgspec.structs.replace(READER, ack_wait_s=0.25)
WAIT_S = 5.0


@asynccontextmanager
async def buses(nats_url, prefix):
    """Factory for buses with one prefix, closed at the end."""
    opened = []

    async def start(**more):
        bus = await Bus.connect(NatsTarget(**{"url": nats_url, "prefix": prefix, **more}))
        opened.append(bus)
        return bus

    yield start
    for bus in opened:
        await bus.close()


def message(number=0, **more):
    return BusMessage(**{"subject": "job.a", "data": b"%d" % number, "msg_id": f"id{number}", **more})


async def acknowledged(bus, spec=READER):
    """The sequence up to which the consumer has settled every message."""
    info = await consumer_info(bus, spec)
    return info["ack_floor"]["stream_seq"]


async def consumer_info(bus, spec=READER):
    data = await bus._connection.request(f"$JS.API.CONSUMER.INFO.{bus._names.stream(spec.stream)}.{spec.durable}")
    return msgspec.json.decode(data)


async def stream_info(bus, name="JOBS"):
    return msgspec.json.decode(await bus._connection.request(f"$JS.API.STREAM.INFO.{bus._names.stream(name)}"))


async def delete_stream(bus, name="JOBS"):
    await bus._connection.request(f"$JS.API.STREAM.DELETE.{bus._names.stream(name)}")


async def until_fetched(reader, count):
    taken = []
    async for batch in reader.batches(wait_s=WAIT_S):
        taken += batch
        if len(taken) >= count:
            break
    return taken


class RunningConsumer:
    """A `BatchConsumer` in its own task; records its events in order."""

    def __init__(self, bus, spec, handler=None, dead_letter=None, *, wait_s=30.0, most=256, **processing):
        self.events = []
        self.dead = asyncio.Event()
        processor = BatchProcessor(self._handle, self._terminated, **processing)
        self.run = BatchConsumer(bus, spec, processor, wait_s=wait_s, most=most).run
        self._handler = handler
        self._dead_letter = dead_letter
        self._draining = asyncio.Event()

    async def __aenter__(self):
        ready = asyncio.Event()
        self.task = asyncio.create_task(self.run(Lifecycle(self._draining, ready.set)))
        await ready.wait()
        return self

    async def __aexit__(self, *_):
        self._draining.set()
        await self.task

    async def _handle(self, batch):
        for delivery in batch:
            self.events.append(("handled", delivery.data))
        return await self._handler(batch) if self._handler else None

    async def _terminated(self, delivery, reason):
        self.events.append(("dead letter", delivery.data, reason))
        if self._dead_letter:
            await self._dead_letter(delivery)
        self.dead.set()

    def handled(self):
        return [event[1] for event in self.events if event[0] == "handled"]
