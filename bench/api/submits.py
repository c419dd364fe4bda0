"""How many jobs come in a second: by HTTP one by one and in bulk, by the SDK, in a transaction of the caller's.

The server is a process of its own, with PostgreSQL beside it on the same machine. In each round the queue's own bulk
enqueue goes first, with entries of one frame and the same payload, and then everybody else in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Final
from uuid import UUID

import asyncpg
import msgspec

from bench.api.server import serving
from bench.contenders.rota import new_ids
from bench.contenders.serve import PRODUCERS
from bench.e2e.setup import Ground
from bench.report import Figure
from rota import Rota
from rota.accounting.service import AccountingService
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.model.access import GrantSpec, Role
from rota.model.ids import JobId, LayerId
from rota.placement.route_store import RouteStore
from rota.queue import Queue, QueueEntry
from rota.server.access import ApiKeyStore

LINES: Final = 2_000
ENTRIES: Final = 1_000
SINGLES_AT_ONCE: Final = 32
PAYLOAD: Final = {"args": [{"scene": "shots/010/comp.blend", "pass": "beauty", "take": 7}], "kwargs": {}}
LAYERS: Final = [{"task": "render", "input": PAYLOAD}]
BULK_BAR: Final = 0.5


class Sizes(msgspec.Struct, frozen=True):
    rounds: int = 5
    bulk: int = 20_000
    singles: int = 2_000
    sdk: int = 500
    frames: int = 50_000


FULL: Final = Sizes()
QUICK: Final = Sizes(rounds=2, bulk=8_000, singles=500, sdk=100, frames=10_000)


class Samples(msgspec.Struct):
    enqueue: list[float] = []
    bulk: list[float] = []
    single: list[float] = []
    sdk: list[float] = []
    sdk_map: list[float] = []
    transaction: list[float] = []

    def figures(self) -> Iterator[Figure]:
        ratios = [ours / queue for ours, queue in zip(self.bulk, self.enqueue, strict=True)]
        note = f"jobs by HTTP, {LINES:,} a request, against entries by the queue itself"
        yield Figure("http_bulk_vs_enqueue", ratios, bar=BULK_BAR, higher_is_better=True, note=note)
        yield Figure("http_bulk_per_s", self.bulk, note=f"jobs of one frame; {PRODUCERS} clients, JSON lines")
        yield Figure("enqueue_per_s", self.enqueue, note=f"{PRODUCERS} producers, {ENTRIES:,} entries a commit")
        yield Figure("http_single_per_s", self.single, note=f"a job a request, {SINGLES_AT_ONCE} at once")
        yield Figure("sdk_single_per_s", self.sdk, note=f"`await task.submit()`, {SINGLES_AT_ONCE} at once")
        yield Figure("sdk_map_per_s", self.sdk_map, note="frames of one job, an item each")
        yield Figure("transaction_per_s", self.transaction, note="`task.on(conn).submit()` and a commit, one by one")


async def submits(ground: Ground, sizes: Sizes) -> Samples:
    prefix, found = f"A{time.monotonic_ns()}", Samples()
    async with AsyncExitStack() as closing:
        url = await ground.postgres.create("submits")
        closing.push_async_callback(ground.postgres.drop, "submits")
        await migrate(url)
        database = await Database.open(PostgresTarget(url=url, pool_min=PRODUCERS))
        closing.push_async_callback(database.close)
        key = await _prepared(database)
        port = await closing.enter_async_context(serving(ground, url, prefix))
        app = Rota(f"http://127.0.0.1:{port}", key=key, show="film")
        closing.push_async_callback(app.close)
        connection = await asyncpg.connect(url)
        closing.push_async_callback(connection.close)
        bench = Bench(database, port, key, app, connection, sizes)
        await bench.warm_up()
        for _ in range(sizes.rounds):
            await ground.postgres.checkpoint()
            await bench.round(found)
    return found


async def _prepared(database: Database) -> str:
    """A pool without workers: what is submitted waits, and nobody but who submits is busy."""
    admin = AccountingService(database, None).admin
    await admin.create_show("film", actor="bench")
    await admin.create_folder("film", "default", actor="bench")
    await admin.create_dept("default", actor="bench")
    await admin.create_pool("farm", actor="bench")
    await admin.create_subscription("film", "farm", size=100, burst=100, actor="bench")
    await RouteStore(database).set_topic("*", ["farm"], actor="bench")
    made = await ApiKeyStore(database).create("bench", [GrantSpec(Role.SUBMITTER)], actor="bench")
    return made.plain.text


class Bench:
    def __init__(
        self,
        database: Database,
        port: int,
        key: str,
        app: Rota,
        connection: asyncpg.Connection[asyncpg.Record],
        sizes: Sizes,
        *,
        show: str = "film",
    ) -> None:
        self._database = database
        self._queue = Queue(database)
        self._port = port
        self._head = f"host: localhost\r\nx-api-key: {key}\r\n"
        self._connection = connection
        self._sizes = sizes
        self._ids: list[UUID] = []
        self._render = app.task(name="render")(_render)
        self._job = msgspec.json.encode({"show": show, "topic": "render", "layers": LAYERS})

    async def warm_up(self) -> None:
        await self._queue.ensure_queue("bench")
        await self._bulk(LINES)
        await self._singles(100)
        await self._render.submit({})

    async def single_per_s(self, way: str, number: int) -> float:
        """Jobs a second, each submitted on its own."""
        ways = {"http_single": self._singles, "sdk_single": self._by_sdk, "transaction": self._in_transactions}
        return await _rate(ways[way], number)

    async def round(self, found: Samples) -> None:
        sizes = self._sizes
        self._ids = new_ids(2 * sizes.bulk)
        found.enqueue.append(await _rate(self._enqueue, sizes.bulk))
        found.bulk.append(await _rate(self._bulk, sizes.bulk))
        found.single.append(await _rate(self._singles, sizes.singles))
        found.sdk.append(await _rate(self._by_sdk, sizes.sdk))
        found.sdk_map.append(await _rate(self._map, sizes.frames))
        found.transaction.append(await _rate(self._in_transactions, sizes.sdk))

    async def _enqueue(self, number: int) -> None:
        payload, ids = msgspec.msgpack.encode(PAYLOAD), self._ids

        async def put(_batch: int) -> None:
            entries = [
                QueueEntry(queue="bench", job=JobId(ids.pop()), layer=LayerId(ids.pop()), payload=payload)
                for _ in range(ENTRIES)
            ]
            await self._queue.enqueue(entries)

        await _shared(PRODUCERS, number // ENTRIES, put)

    async def _bulk(self, number: int) -> None:
        body = (self._job + b"\n") * LINES
        head = f"POST /api/v1/jobs/bulk HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode()
        await self._posted(PRODUCERS, number // LINES, head + body)

    async def _singles(self, number: int) -> None:
        body = self._job
        kind = "content-type: application/json\r\n"
        head = f"POST /api/v1/jobs HTTP/1.1\r\n{self._head}{kind}content-length: {len(body)}\r\n\r\n".encode()
        await self._posted(SINGLES_AT_ONCE, number, head + body)

    async def _posted(self, clients: int, number: int, request: bytes) -> None:
        async with AsyncExitStack() as closing:
            free: asyncio.Queue[Client] = asyncio.Queue()
            for _ in range(clients):
                free.put_nowait(await Client.opened(self._port, closing))

            async def post(_one: int) -> None:
                client = await free.get()
                await client.ask(request)
                free.put_nowait(client)

            await _shared(clients, number, post)

    async def _by_sdk(self, number: int) -> None:
        async def submit(_one: int) -> None:
            await self._render.submit({"scene": "shots/010/comp.blend", "pass": "beauty", "take": 7})

        await _shared(SINGLES_AT_ONCE, number, submit)

    async def _map(self, number: int) -> None:
        await self._render.map([{"take": take} for take in range(number)])

    async def _in_transactions(self, number: int) -> None:
        task = self._render.on(self._connection)
        for _ in range(number):
            async with self._connection.transaction():
                await task.submit({"scene": "shots/010/comp.blend", "pass": "beauty", "take": 7})


class Client:
    """One kept connection; answers are read to their end and must be well."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def opened(cls, port: int, closing: AsyncExitStack) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        closing.callback(writer.close)
        return cls(reader, writer)

    async def ask(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        [length] = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await self._reader.readexactly(int(length))
        assert head.startswith(b"HTTP/1.1 2"), head + body
        return body


async def _render(_take: dict[str, object]) -> None:
    """Never runs here."""


async def _rate(work: Callable[[int], Awaitable[None]], number: int) -> float:
    began = time.perf_counter()
    await work(number)
    return number / (time.perf_counter() - began)


async def _shared(hands: int, number: int, work: Callable[[int], Awaitable[None]]) -> None:
    """So many pieces of work, by so many at once."""
    pieces = iter(range(number))

    async def hand() -> None:
        for piece in pieces:
            await work(piece)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(hands):
            tasks.create_task(hand())
