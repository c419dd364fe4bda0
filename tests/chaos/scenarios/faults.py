"""Faults of scenarios beyond those of the pipeline: table locks, deadlocks, a full disk, restarts one after the other.

Each is recorded as a disturbance while it is in effect, and the watch knows which processes the test has ended.
"""

import asyncio
import signal
import time

import asyncpg

from tests.chaos.pipeline.faults import FaultInjector
from tests.chaos.scenarios.facts import AWAY
from tests.support.waiting import until

FULL = """
CREATE OR REPLACE FUNCTION rota.test_disk_full() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'could not extend file: No space left on device'; END $$"""
FILL = """
CREATE TRIGGER test_disk_full BEFORE INSERT OR UPDATE ON rota.{} FOR EACH STATEMENT
EXECUTE FUNCTION rota.test_disk_full()"""
EMPTY = "DROP TRIGGER IF EXISTS test_disk_full ON rota.{}"
IDS = "SELECT pk_{0}::text AS id FROM rota.{0} ORDER BY 1 DESC LIMIT 6"
LOCK_ROW = "SELECT FROM rota.{0} WHERE pk_{0} = $1::uuid FOR UPDATE"
START_S = 60.0


class ScenarioFaults(FaultInjector):
    def __init__(self, farm, watch):
        super().__init__(farm)
        self._watch = watch

    async def _inject(self, each):
        if each.kind == "calm":
            return
        async with self._locks.setdefault(each.target, asyncio.Lock()):
            disturbance = self._watch.disturbances.begin(each.kind, each.target, time.monotonic())
            try:
                await getattr(self, f"_{each.kind}")(each)
            finally:
                disturbance.ended = time.monotonic()

    async def run(self, faults):
        calm_s = sum(each.hold_s for each in faults if each.kind == "calm")
        await asyncio.sleep(calm_s)
        await super().run(faults)

    async def _end(self, actor, number):
        self._watch.expected_dead.add(actor.name)
        actor.send(number)
        await actor.wait(START_S)

    async def _start(self, actor):
        await actor.start()
        self._watch.expected_dead.discard(actor.name)

    async def _kill(self, each):
        actor = self._actor(each.target)
        async with self._locks.setdefault(f"process {actor.name}", asyncio.Lock()):
            await self._end(actor, signal.SIGKILL)
            await asyncio.sleep(each.hold_s)
            await self._start(actor)

    async def _pause(self, each):
        async with self._locks.setdefault(f"process {each.target}", asyncio.Lock()):
            await super()._pause(each)

    async def _storm(self, each):
        """Kill the servers in turn, each as soon as the other is ready again."""
        for number in range(int(each.hold_s)):
            await self._restart_actor(self.farm.servers[number % 2], signal.SIGKILL)

    async def _roll(self, _each):
        """Restart every server and worker, one after the other, as an upgrade does."""
        for actor in (*self.farm.servers, *self.farm.workers):
            await self._restart_actor(actor, signal.SIGTERM)

    async def _restart_actor(self, actor, number):
        async with self._locks.setdefault(f"process {actor.name}", asyncio.Lock()):
            await self._end(actor, number)
            await self._start(actor)
        if actor in self.farm.servers:
            await until(lambda: self._ready(actor), within_s=START_S, what=f"{actor.name} after its restart")

    async def _ready(self, server):
        return await self._watch.servers.ask(server, "/ready") is not None

    async def _connect(self):
        return await asyncpg.connect(self.farm.urls["postgres"], timeout=5)

    async def _lock(self, each):
        """As VACUUM FULL, REINDEX or ALTER TABLE hold it."""
        connection = await self._connect_until()
        try:
            async with connection.transaction():
                await connection.execute(f"LOCK TABLE rota.{each.target} IN ACCESS EXCLUSIVE MODE")
                await asyncio.sleep(each.hold_s)
        except AWAY:
            return
        finally:
            connection.terminate()

    async def _deadlock(self, each):
        """Lock rows in descending order, against that of the servers, so that some transactions wait in a circle."""
        ends = time.monotonic() + each.hold_s
        while time.monotonic() < ends:
            connection = await self._connect_until()
            try:
                async with connection.transaction():
                    for row in await connection.fetch(IDS.format(each.target)):
                        await connection.execute(LOCK_ROW.format(each.target), row["id"])
                        await asyncio.sleep(0.15)
            except AWAY:
                continue
            finally:
                connection.terminate()

    async def _disk_full(self, each):
        tables = each.target.split(",")
        await self._execute(FULL)
        try:
            for table in tables:
                await self._execute(FILL.format(table))
            await asyncio.sleep(each.hold_s)
        finally:
            for table in tables:
                await self._execute(EMPTY.format(table))

    async def _execute(self, statement):
        """Repeated while PostgreSQL is away or the table locked."""
        while True:
            connection = await self._connect_until()
            try:
                await connection.execute("SET lock_timeout = '2s'")
                await connection.execute(statement)
            except asyncpg.DuplicateObjectError:
                return
            except AWAY:
                await asyncio.sleep(0.1)
            else:
                return
            finally:
                connection.terminate()

    async def _connect_until(self):
        while True:
            try:
                return await self._connect()
            except AWAY:
                await asyncio.sleep(0.1)
