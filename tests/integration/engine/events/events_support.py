"""What the tests of events share: a teller, a feed that follows, and readers in words."""

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
async def following(bus, **more):
    """A feed that has found its stream."""
    await bus.ensure([events_stream(NatsSettings())])
    feed = EventStream(bus, **more)
    supervisor = Supervisor(drain_budget_s=5)
    supervisor.add(Service("feed", feed.run))
    async with supervisor.running():
        async with feed.subscribe(ALL):
            pass
        yield feed


async def told(teller, sizes, *, kind="job.succeeded", first=0, show=None):
    """Messages with so many events each; their jobs are numbered."""
    number = first
    for size in sizes:
        teller.emit(kind, show=show, jobs=[job(n) for n in range(number, number + size)])
        await teller.publish()
        number += size
    return number


class Reading:
    """What a reader was told, until it has `count` events or none came for a moment."""

    def __init__(self, feed, wanted=ALL, after=None):
        self.feed, self.wanted, self.after = feed, wanted, after
        self.events = []

    async def until(self, count, within_s=10.0):
        async with asyncio.timeout(within_s), self.feed.subscribe(self.wanted, self.after) as reader:
            while len(self.events) < count:
                for portion in await reader.read(within_s):
                    self.events += portion.events()
            self.after = reader.place
        return self.events


def numbers(events):
    return [event.job.int if event.job is not None else event.kind for event in events]


def teller_of(database, bus):
    return EventPublisher(database, bus)
