"""A Redis client and a database whose round trips are steps of a schedule (`tests.support.harness.interleavings`)."""

from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError

from rota.infra.postgres import Database
from rota.model.errors import PostgresUnavailable
from tests.support.harness.interleavings import Died, Verdict


def redis_away(*, sent):
    return RedisConnectionError("the reply was lost" if sent else "Error 111 connecting to Redis")


def postgres_away(*, sent):
    return PostgresUnavailable("PostgreSQL was lost.", outcome="unknown" if sent else "not_sent")


class SteppedRedis(Redis):
    """`names` maps script digests to names."""

    def __init__(self, under, process, names):
        super().__init__(connection_pool=under.connection_pool)
        self.process = process
        self.names = names

    async def execute_command(self, *args, **options):
        def work():
            self.process.last_script = args if args[0] == "EVALSHA" else None
            return Redis.execute_command(self, *args, **options)

        if args[0] == "SCRIPT LOAD":  # has its own lock and changes no data
            return await work()
        return await self.process.take("redis", self._what(args), work, redis_away)

    def pipeline(self, transaction=True, shard_hint=None):
        return SteppedPipeline(self.process, self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def _what(self, args):
        if args[0] != "EVALSHA":
            return str(args[0]).lower()
        keys = args[2]
        arguments = [str(word) for word in args[3 + keys :] if isinstance(word, str | int) and len(str(word)) < 16]
        return " ".join([self.names[args[1]], *arguments])


class SteppedPipeline(Pipeline):
    def __init__(self, process, *args):
        super().__init__(*args)
        self.process = process

    async def execute(self, raise_on_error=True):
        def work():
            return Pipeline.execute(self, raise_on_error)

        return await self.process.take("redis", "pipeline", work, redis_away)


class SteppedDatabase(Database):
    """A statement is one step. A transaction is two: its statements and its COMMIT; it holds its locks in between."""

    def __init__(self, under, process):
        self.under = under
        self.target = under.target
        self.pool = under.pool
        self.process = process

    async def rows(self, query, *args, urgent=False):
        return await self._take(query, lambda: self.under.rows(query, *args))

    async def row(self, query, *args):
        return await self._take(query, lambda: self.under.row(query, *args))

    async def value(self, query, *args):
        return await self._take(query, lambda: self.under.value(query, *args))

    async def run(self, query, *args):
        return await self._take(query, lambda: self.under.run(query, *args))

    async def _take(self, query, work):
        return await self.process.take("postgres", query.name.rpartition(".")[2], work, postgres_away)

    @asynccontextmanager
    async def transaction(self, isolation="read committed", *, readonly=False):
        step = await self.process.wait("postgres", "read" if readonly else "change", frail=readonly)
        if step.verdict is Verdict.CUT:
            raise postgres_away(sent=False)
        with self.process.schedule.transaction():
            async with self.under.transaction(isolation, readonly=readonly) as tx:
                yield tx
                if not readonly:
                    step = await self._before_commit(tx)
        if step.verdict in (Verdict.LOST, Verdict.LATE):
            raise postgres_away(sent=True)

    async def _before_commit(self, tx):
        try:
            step = await self.process.wait("postgres", "commit", frail=True)
        except Died:
            # A server rolls back when a client dies; here that must happen before the next step.
            await tx.connection.execute("ROLLBACK")
            raise
        if step.verdict is Verdict.CUT:
            raise postgres_away(sent=False)
        return step
