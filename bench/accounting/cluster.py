"""What `bench accounting` books in: servers with the schema, and shows whose limits nothing reaches.

Servers are those of `rota up`: PostgreSQL with fsync, Valkey without persistence, both on this machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

import msgspec
import redis.asyncio

from rota.accounting import allocations
from rota.accounting.ledger import BookingGroup, Charge
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.live.seeding import SeedingResult, seed
from rota.accounting.transactional import TransactionalLedger
from rota.infra.postgres import Database, PostgresTarget, migrate, query
from rota.infra.redis import RedisKeys, RedisTarget, connect
from rota.local import LocalStack, StackOptions
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.units import Centicores

MAKE = query("bench", "farm")
MAKE_LAYERS = query("bench", "farm_layers")

PLENTY: Final = 2_000_000_000
CORE: Final = Centicores(100)
HOST: Final = UUID(int=1)


@dataclass(frozen=True, slots=True)
class Servers:
    postgres_url: str
    redis_url: str
    database: Database
    client: redis.asyncio.Redis
    live: LiveLedger
    transactional: TransactionalLedger


@asynccontextmanager
async def opened(postgres_url: str, redis_url: str) -> AsyncIterator[Servers]:
    """Both ledgers on servers that run."""
    async with AsyncExitStack() as closing:
        database = await Database.open(PostgresTarget(url=postgres_url, pool_max=16))
        closing.push_async_callback(database.close)
        client = connect(RedisTarget(url=redis_url))
        closing.push_async_callback(client.aclose)
        live = LiveLedger(database, client, RedisKeys())
        yield Servers(postgres_url, redis_url, database, client, live, TransactionalLedger(database))


@asynccontextmanager
async def started() -> AsyncIterator[Servers]:
    """Servers of our own, with an empty schema."""
    async with AsyncExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="rota-bench-", ignore_cleanup_errors=True))
        stack = LocalStack(StackOptions(Path(folder), servers=("postgres", "redis")))
        closing.push_async_callback(stack.stop)
        await stack.start()
        await migrate(stack.url("postgres"))
        yield await closing.enter_async_context(opened(stack.url("postgres"), stack.url("redis")))


class Farm:
    """One show with limits at all five levels. No token is given twice, in no show."""

    _next_token = 0

    def __init__(self, servers: Servers, *, managed: bool) -> None:
        self.servers = servers
        self.managed = managed
        self.show = ShowId(uuid4())
        self.fence = 1
        self.layers: list[Charge] = []
        self._job = Charge(
            PoolId(uuid4()), FolderId(uuid4()), JobId(uuid4()), LayerId(uuid4()), DeptId(uuid4()), CORE, gpus=1
        )

    async def make(self, layers: int = 1) -> Farm:
        """In PostgreSQL, and in Redis if it is managed."""
        charge, database = self._job, self.servers.database
        shared = (charge.alloc, charge.folder, charge.dept)
        await database.run(MAKE, self.show, f"show-{self.show}", self.managed, *shared, PLENTY)
        self.layers = [self._another_job() for _ in range(layers)]
        made = ([each.job for each in self.layers], [each.layer for each in self.layers])
        await database.run(MAKE_LAYERS, self.show, *made, PLENTY)
        if self.managed:
            await self.seed()
        return self

    async def seed(self) -> SeedingResult:
        """Redis as PostgreSQL has it: tokens without rows are gone."""
        seeded = await seed(self.servers.live, self.show)
        assert seeded, "nobody else seeds here"
        self.fence = seeded.fence
        return seeded

    def frames(self, number: int, layer: int = 0) -> list[BookingGroup]:
        """Frames of a layer that has limits."""
        return [BookingGroup(self.layers[layer], HOST, self._tokens(number))]

    def jobs(self, number: int) -> list[BookingGroup]:
        """Jobs of one frame, without limits of their own."""
        return [BookingGroup(self._another_job(), HOST, self._tokens(1), capped=False) for _ in range(number)]

    async def insert(self, groups: Sequence[BookingGroup]) -> None:
        """Rows alone, as if they had been booked under the fence that stands."""
        inserted = await allocations.insert(self.servers.database, self.show, self.fence, groups)
        assert inserted == allocations.ProcInsertResult(), "every row is new"

    def _another_job(self) -> Charge:
        return msgspec.structs.replace(self._job, job=JobId(uuid4()), layer=LayerId(uuid4()))

    @staticmethod
    def _tokens(number: int) -> range:
        first = Farm._next_token
        Farm._next_token += number
        return range(first, first + number)
