"""A dispatcher stepped by the test: real PostgreSQL and Redis, workers that only send heartbeats, no NATS.

rig = await Rig(database, redis).open()
await rig.show("film", {"farm": 8}, managed=True)
rig.beat("w", pool="farm", slots=4)
job = await rig.submit("film", frames=3)
await rig.turn()
assert await rig.started(job) == 3
"""

import asyncio
from uuid import uuid4

from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.engine.backends import Backends
from rota.engine.dispatch.dispatcher import Dispatcher
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.engine.explain.explainer import Explainer
from rota.engine.recovery.reconciler import LEASE
from rota.engine.submission.submitter import Submitter
from rota.infra.blob_store import BlobStore, BlobStoreTarget
from rota.infra.clock import SystemClock
from rota.infra.lease import Leases
from rota.infra.nats.messages import PublishOutcome, PublishReceipt
from rota.model.ids import PoolId
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.protocol import Heartbeat
from rota.placement import Pool, PoolSpec, Routes, WorkerRegistry
from rota.queue import Queue
from tests.support.jobs import EMPTY, NO_EVENTS, a_finisher
from tests.support.queue import sql

CLEAR = [sql(text) for text in EMPTY.split("; ") if "session_replication_role" not in text and "rota.audit" not in text]
CLEAR += [sql(f"DELETE FROM rota.{table}") for table in ("proc", "proc_grave", "job_slot", "worker", "alloc")]
STARTED = sql("SELECT count(*) FROM rota.proc WHERE pk_job = $1::uuid")
PARKED = sql("SELECT count(*) FROM rota.queue_returned WHERE parked_job = $1::uuid")


TURNS_MAX = 12


class SilentBus:
    """Accepts every message and delivers none."""

    connected = True

    async def publish_many(self, messages):
        return [PublishReceipt(PublishOutcome.STORED) for _ in messages]


class RecordingAccounting(AccountingService):
    """Counts booking calls and records refusals."""

    def __init__(self, *given):
        super().__init__(*given)
        self.asked = 0
        self.refusals = []

    async def book(self, show, groups, *, force=False):
        self.asked += 1
        outcomes = await super().book(show, groups, force=force)
        self.refusals += [outcome.refusal for outcome in outcomes if outcome.refusal]
        return outcomes


class Rig:
    def __init__(self, database, redis):
        self.database = database
        self.accounting = RecordingAccounting(database, redis)
        self.queue = Queue(database)
        self.bus = SilentBus()
        self.registry = WorkerRegistry(seed=1)
        leases = Leases(database)
        finisher = a_finisher(database, self.bus, self.accounting)
        store = BlobStore(database, BlobStoreTarget(directory=None, small_bytes=1 << 20, most_bytes=1 << 20))
        backends = Backends(database, redis, self.bus, self.accounting, self.queue, store, leases)
        state_writer = JobStateWriter(database, NO_EVENTS, SystemClock())
        self.dispatcher = Dispatcher(backends, self.registry, finisher, state_writer, lambda: True)
        self.pending_queues = self.dispatcher.pending_queues
        self.submitter = Submitter(database, NO_EVENTS)
        self.explainer = Explainer(
            database, accounting=self.accounting, registry=self.registry, queues=self.pending_queues, bus=self.bus
        )
        self.pools = {}
        self._leases = leases
        self._workers = {}

    async def open(self):
        """Empty the database and take the leases."""
        async with self.database.transaction() as tx:
            for statement in CLEAR:
                await tx.run(statement)
        granted = (await self._leases.acquire([LEASE, "dispatcher:test"], kind="dispatcher", ttl_s=600.0)).granted
        [lease] = [each for each in granted if each.name == "dispatcher:test"]
        self.dispatcher._owner = await self.queue.register_owner(lease)
        await self._change("create_dept", "default")
        return self

    async def show(self, name, shares, *, managed=False, folder=None, point=None, jobs=-1):
        """`shares` maps pools to bursts in cores; missing pools are created."""
        await self._change("create_show", name)
        await self._change("create_folder", name, "default", caps=CapsUpdate(**(folder or {})))
        if point is not None:
            await self._change("create_point", name, "default", caps=CapsUpdate(**point))
        for pool, burst in shares.items():
            await self.pool(pool)
            await self._change("create_subscription", name, pool, size=burst, burst=burst)
        if jobs >= 0:
            await self._change("change_show", name, max_jobs=jobs)
        if managed:
            await self._change("set_managed", name, True)

    async def pool(self, name):
        if name not in self.pools:
            change = await self._change("create_pool", name)
            self.pools[name] = PoolId(change.after.id)

    def route(self, topics, **status):
        """`status` is given for pools that are not active."""
        pools = {
            name: Pool(pool, PoolSpec(name=name, **({"status": status[name]} if name in status else {})))
            for name, pool in self.pools.items()
        }
        self.registry.set_routes(Routes(topics, pools))

    def beat(self, name, **fields):
        worker, number = self._workers.get(name, (uuid4(), 0))
        self._workers[name] = (worker, number + 1)
        given = {"pool": "farm", "slots": 10, "cores": 1000, **fields}
        self.registry.record_heartbeat(Heartbeat(worker=worker, name=name, number=number + 1, **given))

    async def submit(self, show, *, topic="default", labels=None, job=None, **layer):
        spec = LayerSpec(**{"task": "noop", **layer})
        given = Submission(show=show, layers=(spec,), topic=topic, labels=labels or {}, **(job or {}))
        [submitted] = await self.submitter.submit([given])
        return submitted.job

    async def turn(self):
        """One dispatcher turn over all waiting frames, and the rounds it starts."""
        await self.dispatcher._refresh_all(always=True)
        async with asyncio.TaskGroup() as tasks:
            await self.dispatcher._start_rounds(tasks)
            while self.dispatcher._turn_cut:  # a turn that takes long goes on after a pause
                await self.dispatcher._start_rounds(tasks)

    async def settle(self):
        """Run turns until one makes no booking call, so that the state is stable."""
        self.accounting.refusals.clear()
        for _ in range(TURNS_MAX):
            before = self.accounting.asked
            await self.turn()
            if self.accounting.asked == before:
                return
        raise AssertionError(f"dispatch is not stable after {TURNS_MAX} turns")

    async def started(self, job):
        return await self.database.value(STARTED, job)

    async def is_parked(self, job):
        return bool(await self.database.value(PARKED, job))

    async def _change(self, what, *args, **more):
        return await self.accounting.change(lambda admin: getattr(admin, what)(*args, actor="test", **more))
