"""Shared by the event tests: a publisher, a running event stream, and a reader."""

import asyncio
from contextlib import asynccontextmanager
from uuid import UUID

from rota.engine.events.publisher import EventPublisher
from rota.engine.events.subscriptions import EventStream
from rota.infra.nats.topology import events_stream
from rota.infra.service import Service, Supervisor
from rota.model.events import EventFilter
from rota.model.settings.servers import NatsSettings

ALL = EventFilter()


def job(number):
    return UUID(int=number)


@asynccontextmanager
async def running_stream(bus, **more):
    """A running event stream that has found its NATS stream."""
    await bus.ensure([events_stream(NatsSettings())])
    stream = EventStream(bus, **more)
    supervisor = Supervisor(drain_budget_s=5)
    supervisor.add(Service("feed", stream.run))
    async with supervisor.running():
        async with stream.subscribe(ALL):
            pass
        yield stream


async def publish_events(publisher, sizes, *, kind="job.succeeded", first=0, show=None):
    """Publish one message per size, with that many events each; job ids count up from `first`."""
    number = first
    for size in sizes:
        publisher.emit(kind, show=show, jobs=[job(n) for n in range(number, number + size)])
        await publisher.publish()
        number += size
    return number


class Reading:
    """Collects the events of a subscription; `until` waits for a total of `count` events."""

    def __init__(self, stream, event_filter=ALL, after=None):
        self.stream, self.event_filter, self.after = stream, event_filter, after
        self.events = []

    async def until(self, count, within_s=10.0):
        async with asyncio.timeout(within_s), self.stream.subscribe(self.event_filter, self.after) as reader:
            while len(self.events) < count:
                for batch in await reader.read(within_s):
                    self.events += batch.events()
            self.after = reader.place
        return self.events


def numbers(events):
    return [event.job.int if event.job is not None else event.kind for event in events]


def publisher_of(database, bus):
    return EventPublisher(database, bus)
