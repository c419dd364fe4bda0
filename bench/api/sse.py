"""Two hundred clients on one server, all following all events.

The server is a process of its own; clients are connections of this one, which also tells the events, as another replica
would. First as fast as they go, then one by one, with the time from telling an event to its arrival at each client.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Final
from uuid import UUID

import msgspec

from bench.api.explain import p99
from bench.api.server import serving
from bench.e2e.setup import Ground
from bench.report import Figure
from rota.accounting.service import AccountingService
from rota.engine.events.publisher import EventPublisher
from rota.infra.nats import Bus, NatsTarget
from rota.infra.nats.topology import events_stream as stream_of
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.model.access import GrantSpec, Role
from rota.model.settings.servers import NatsSettings
from rota.server.access import ApiKeyStore

CLIENTS: Final = 200
EVENTS: Final = 2_000
BATCH: Final = 100
PACED: Final = 100
EVERY_S: Final = 0.03
WITHIN_S: Final = 120.0
NUMBER: Final = re.compile(rb'"job":"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-([0-9a-f]{12})"')


class Samples(msgspec.Struct):
    clients: int
    events: int
    reached: int
    seconds: float
    latencies_ms: list[float]

    def figures(self) -> Iterator[Figure]:
        note = f"clients on one server that got all of {self.events:,} events"
        yield Figure("sse_clients", [float(self.reached)], bar=float(self.clients), higher_is_better=True, note=note)
        per_s = self.clients * self.events / self.seconds
        yield Figure("sse_events_per_s", [per_s], note="events that arrived, of all clients together")
        note = f"{1 / EVERY_S:.0f} events/s, from telling one to its arrival at each of {self.clients} clients"
        yield Figure("sse_p99_ms", [p99(self.latencies_ms)], note=note)
        yield Figure("sse_p50_ms", self.latencies_ms, note="the same, half of them")


class Client(asyncio.Protocol):
    """Counts events, and notes when those of `sent` arrive."""

    def __init__(self, head: bytes, sent: dict[int, float], latencies_ms: list[float]) -> None:
        self.events = 0
        self.opened = asyncio.Event()
        self._head = head
        self._sent = sent
        self._latencies_ms = latencies_ms
        self._left = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        text = self._left + data
        end = text.rfind(b"\n\n") + 1
        whole, self._left = text[:end], text[end:]
        self.events += whole.count(b"\ndata: ")
        if b"\nid: " in whole:
            self.opened.set()
        if self._sent:
            for found in NUMBER.finditer(whole):
                if (at := self._sent.get(int(found[1], 16))) is not None:
                    self._latencies_ms.append((now - at) * 1000)


async def sse(ground: Ground, *, clients: int = CLIENTS, events: int = EVENTS) -> Samples:
    """Makes a database of its own, and a server on it."""
    prefix, sent, latencies_ms = f"S{time.monotonic_ns()}", dict[int, float](), list[float]()
    async with AsyncExitStack() as closing:
        url = await ground.postgres.create("events")
        closing.push_async_callback(ground.postgres.drop, "events")
        await migrate(url)
        database = await Database.open(PostgresTarget(url=url))
        closing.push_async_callback(database.close)
        await AccountingService(database, None).admin.create_show("film", actor="bench")
        made = await ApiKeyStore(database).create("bench", [GrantSpec(Role.VIEWER)], actor="bench")
        port = await closing.enter_async_context(serving(ground, url, prefix))
        bus = await Bus.connect(NatsTarget(url=ground.nats_url, prefix=prefix))
        closing.push_async_callback(bus.close)
        await bus.ensure([stream_of(NatsSettings())])
        head = (
            f"GET /api/v1/events?kind=job HTTP/1.1\r\nhost: localhost\r\nx-api-key: {made.plain.text}\r\n\r\n".encode()
        )
        opened = [await _client(port, head, sent, latencies_ms, closing) for _ in range(clients)]
        teller = EventPublisher(database, bus)
        seconds = await _all_at_once(teller, opened, events)
        reached = sum(client.events == events for client in opened)
        await _paced(teller, opened, events, sent)
    return Samples(clients, events, reached, seconds, latencies_ms)


async def _client(
    port: int, head: bytes, sent: dict[int, float], latencies_ms: list[float], closing: AsyncExitStack
) -> Client:
    client = Client(head, sent, latencies_ms)
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
    closing.callback(transport.abort)
    await asyncio.wait_for(client.opened.wait(), WITHIN_S)
    return client


async def _all_at_once(teller: EventPublisher, clients: list[Client], events: int) -> float:
    began = time.perf_counter()
    for first in range(0, events, BATCH):
        teller.emit("job.succeeded", show="film", jobs=[UUID(int=first + at) for at in range(BATCH)], topic="bench")
        await teller.publish()
    await _until(lambda: all(client.events >= events for client in clients))
    return time.perf_counter() - began


async def _paced(teller: EventPublisher, clients: list[Client], events: int, sent: dict[int, float]) -> None:
    for number in range(10_000_000, 10_000_000 + PACED):
        sent[number] = time.perf_counter()
        teller.emit("job.succeeded", show="film", jobs=[UUID(int=number)], topic="bench")
        await teller.publish()
        await asyncio.sleep(EVERY_S)
    await _until(lambda: all(client.events >= events + PACED for client in clients))


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {WITHIN_S:.0f} s in vain"
        await asyncio.sleep(0.005)
